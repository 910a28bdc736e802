"""A simulated inference engine with the HTTP face of an OpenAI-compatible server (HTTP/1.1).

    python -m bench.engine --port PORT [--slots N]

POST /v1/chat/completions, /v1/completions, /v1/embeddings · GET /v1/models, /health
GET /bench/stats (counters, and one record for each request that ended) · POST /bench/reset[?slots=N]

A request may carry "sim": {"prefill_ms", "tps" (0: as fast as the socket takes it), "pad" (bytes added to
each event), "batch" (events per write when tps is 0)} and is named by its "user" field. Every token has
its number in it, so that the client can tell when one is missing, doubled or out of order.

Like uvicorn, the engine takes EOF on its socket for the client's leaving; that instant, the tokens made so
far and the instants of the last few are what the bench is after. `most_held` counts running and waiting
requests together: the most that callers ever had here at one time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections import deque
from typing import Any, cast

from bench.generation import MODEL, Generation
from bench.loop import run

REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found"}
MAX_HEAD, MAX_BODY = 65536, 64 << 20
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


class Engine:
    """Slots, the queue before them, and the log of what has ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slots: int) -> None:
        self.loop = loop
        self.slots = slots
        self.running: set[Generation] = set()
        self.waiting: deque[Generation] = deque()
        self.connections = 0
        self.reset()

    def reset(self) -> None:
        self.ended: deque[dict[str, Any]] = deque(maxlen=200_000)
        self.requests = self.tokens = self.bad_requests = self.embeddings = 0
        self.most_running = self.most_held = 0

    def submit(self, generation: Generation) -> None:
        self.requests += 1
        if len(self.running) < self.slots:
            self._run(generation)
        else:
            self.waiting.append(generation)
        self.most_held = max(self.most_held, len(self.running) + len(self.waiting))

    def _run(self, generation: Generation) -> None:
        self.running.add(generation)
        self.most_running = max(self.most_running, len(self.running))
        generation.begin()

    def end(self, generation: Generation, outcome: str) -> None:
        """Write a request's record and hand its slot on."""
        self.ended.append(generation.record(outcome))
        if generation in self.running:
            self.running.discard(generation)
        elif generation in self.waiting:
            self.waiting.remove(generation)
        while self.waiting and len(self.running) < self.slots:
            self._run(self.waiting.popleft())

    def stats(self) -> dict[str, Any]:
        return {
            "bench": "engine",
            "running": len(self.running),
            "waiting": len(self.waiting),
            "slots": self.slots,
            "requests": self.requests,
            "tokens": self.tokens,
            "embeddings": self.embeddings,
            "bad_requests": self.bad_requests,
            "connections": self.connections,
            "most_running": self.most_running,
            "most_held": self.most_held,
            "ended": list(self.ended),
        }


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, one request at a time."""

    transport: asyncio.Transport

    def __init__(self, engine: Engine) -> None:
        self.engine, self.buffer = engine, bytearray()
        self.generation: Generation | None = None
        self.paused = self.last = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.engine.connections += 1

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        generation = self.generation
        if generation and generation.stage == "decode" and generation.stream and not generation.timer:
            generation.pump()

    def _client_left(self) -> None:
        generation, self.generation = self.generation, None
        if generation:
            generation.close("aborted")

    def eof_received(self) -> None:
        self._client_left()

    def connection_lost(self, _error: Exception | None) -> None:
        self.engine.connections -= 1
        self._client_left()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.generation is None:
            self._parse()
        elif len(self.buffer) > MAX_BODY:
            self.transport.abort()

    def answered(self) -> None:
        self.generation = None
        if self.last:
            self.transport.close()
        elif self.buffer:
            self.engine.loop.call_soon(self._parse)

    def reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: application/json\r\n"
        head += "connection: close\r\n" if self.last else ""
        self.transport.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)

    def _refuse(self, why: str) -> None:
        self.engine.bad_requests += 1
        self.last = True
        self.reply(400, {"error": {"message": why, "type": "BadRequestError", "code": 400}})
        self.transport.close()

    def _body(self, start: int, headers: dict[str, str]) -> tuple[bytes, int] | None:
        """The request's body and the offset behind it, or None while it is incomplete."""
        if "chunked" not in headers.get("transfer-encoding", "").lower():
            end = start + int(headers.get("content-length", 0))
            if end - start > MAX_BODY:
                raise ValueError("body too large")
            return (bytes(self.buffer[start:end]), end) if len(self.buffer) >= end else None
        parts: list[bytes] = []
        while True:
            line = self.buffer.find(b"\r\n", start)
            if line < 0:
                return None
            size = int(bytes(self.buffer[start:line]).split(b";")[0], 16)
            if len(self.buffer) < line + 4 + size:
                return None
            if size == 0:
                return b"".join(parts), line + 4
            parts.append(bytes(self.buffer[line + 2 : line + 2 + size]))
            start = line + 4 + size

    def _parse(self) -> None:
        while self.generation is None and self.buffer and not self.transport.is_closing():
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self.buffer) > MAX_HEAD:
                    self._refuse("head too large")
                return
            try:
                lines = self.buffer[:end].decode("latin-1").split("\r\n")
                method, target, version = lines[0].split(" ")
                pairs = (line.partition(":") for line in lines[1:])
                headers = {name.lower(): value.strip() for name, _, value in pairs}
                got = self._body(end + 4, headers)
            except ValueError as error:
                return self._refuse(str(error))
            if got is None:
                return
            del self.buffer[: got[1]]
            self.last = version != "HTTP/1.1" or headers.get("connection", "").lower() == "close"
            self._route(method, target, got[0])

    def _route(self, method: str, target: str, body: bytes) -> None:
        engine = self.engine
        path, _, query = target.partition("?")
        if method == "POST" and path in ("/v1/chat/completions", "/v1/completions"):
            return self._generate(path.startswith("/v1/chat"), body)
        if method == "POST" and path == "/v1/embeddings":
            engine.embeddings += 1
            vector = [0.015625] * 384
            usage = {"prompt_tokens": 8, "total_tokens": 8}
            data = [{"object": "embedding", "index": 0, "embedding": vector}]
            self.reply(200, {"object": "list", "model": MODEL, "data": data, "usage": usage})
        elif path == "/health":
            self.reply(200, {})
        elif path == "/v1/models":
            self.reply(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1}]})
        elif path == "/bench/stats":
            self.reply(200, engine.stats())
        elif path == "/bench/reset" and method == "POST":
            engine.reset()
            engine.slots = int(query[6:]) if query.startswith("slots=") else engine.slots
            self.reply(200, {})
        else:
            self.reply(404, {"detail": "Not Found"})
        if self.last:
            self.transport.close()

    def _generate(self, chat: bool, body: bytes) -> None:
        try:
            fields = json.loads(body)
            if not isinstance(fields, dict):
                raise TypeError("the body is not an object")
            generation = Generation(self.engine, self, chat, fields)
        except (ValueError, TypeError, AttributeError) as error:
            return self._refuse(str(error))
        self.generation = generation
        if generation.stream:
            self.transport.write(STREAM_HEAD)
        self.engine.submit(generation)


async def serve(port: int, slots: int, life: float) -> None:
    loop = asyncio.get_running_loop()
    engine = Engine(loop, slots)
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=4096)
    async with server:
        await asyncio.sleep(life)


def main() -> None:
    parser = argparse.ArgumentParser(description="A simulated OpenAI-compatible engine.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=4096)
    parser.add_argument("--life", type=float, default=3600, help="seconds until it ends by itself")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        run(serve(options.port, options.slots, options.life))


if __name__ == "__main__":
    main()
