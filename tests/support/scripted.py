"""A scripted inference engine: it does to the gateway exactly what a test wrote down, and takes notes.

A `ScriptedEngine` listens on a real socket (TCP or unix) in the test's own Trio loop. Each inference
request becomes a `Call`, and a script (an async function of the call, see `scripts.py`) decides what goes
back, byte by byte if need be.

Concurrency is counted exactly, because "the engine never gets more work than it can hold" is under test:
- a call counts from the moment its request has been read whole;
- it stops counting when the script says so (terminal marker or last byte), or when its socket is seen closed;
- `peak` must not see a ghost of our making: two sockets can be readable in the same turn, one with the close
  of the old call and one with the new request. So before a new call is counted, every live socket is peeked
  at, and the closed ones end first. What the gateway closed before it dispatched is visible by then.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import trio

from tests.support.wire import GONE, Headers, Request, RequestReader

Script = Callable[["Call"], Awaitable[None]]

REASONS = {
    200: "OK",
    302: "Found",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    413: "Content Too Large",
    422: "Unprocessable Entity",
    429: "Too Many Requests",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class Notes:
    """Wakes everybody who waits for something to become true, each time anything has changed."""

    def __init__(self) -> None:
        self._lot = trio.lowlevel.ParkingLot()

    def changed(self) -> None:
        self._lot.unpark_all()

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            await self._lot.park()


class Call:
    """One inference request as the engine saw it, and the hands of the script that answers it."""

    def __init__(self, connection: Connection, request: Request) -> None:
        self.connection = connection
        self.engine = connection.engine
        self.method, self.target = request.method, request.target
        self.headers, self.body = request.headers, request.body
        self.nth = connection.served  # 0: the first request of its connection
        self.arrived = trio.current_time()
        self.closed_at: float | None = None  # the gateway's side was seen closed
        self.finished_at: float | None = None  # it no longer counts
        self.sent = 0  # bytes, head and framing included
        self.tokens = 0
        self.goes_on_for = 0.0  # seconds of work after the close: a ghost of the engine's making
        self.framing = "length"
        self.stray = b""  # bytes behind the request: a gateway never pipelines
        self.weight = weight_of(self)

    def __repr__(self) -> str:
        state = "running" if self.finished_at is None else "finished"
        gone = ", peer gone" if self.closed_at is not None else ""
        return f"<Call {self.method} {self.target} {state}{gone}, {self.tokens} tokens>"

    @cached_property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def path(self) -> str:
        path, _, _ = self.target.partition("?")
        return path

    def header(self, name: str) -> str | None:
        """The only value of a header; None without one."""
        values = [value for key, value in self.headers if key.lower() == name.lower()]
        assert len(values) <= 1, f"{name} came {len(values)} times"
        return values[0] if values else None

    async def closed(self) -> float:
        """When the gateway's side was seen closed."""
        await self.engine.notes.until(lambda: self.closed_at is not None)
        assert self.closed_at is not None
        return self.closed_at

    async def made(self, tokens: int) -> None:
        await self.engine.notes.until(lambda: self.tokens >= tokens)

    async def finished(self) -> None:
        await self.engine.notes.until(lambda: self.finished_at is not None)

    # What scripts do.

    async def write(self, data: bytes) -> None:
        """Exactly these bytes on the socket."""
        await self.connection.stream.send_all(data)
        self.sent += len(data)
        self.engine.notes.changed()

    async def head(
        self,
        status: int = 200,
        headers: Headers | None = None,
        *,
        framing: str = "chunked",
        length: int | None = None,
    ) -> None:
        """framing: chunked, length (give `length`) or close."""
        self.framing = framing
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}"]
        lines += [f"{name}: {value}" for name, value in headers or []]
        if framing == "chunked":
            lines.append("Transfer-Encoding: chunked")
        elif framing == "length":
            lines.append(f"Content-Length: {length or 0}")
        else:
            lines.append("Connection: close")
        await self.write("\r\n".join([*lines, "", ""]).encode("latin-1"))

    def framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self.framing == "chunked" else data

    async def send(self, data: bytes) -> None:
        """A piece of the body, framed as the head announced."""
        await self.write(self.framed(data))

    async def send_bytewise(self, data: bytes, gap: float) -> None:
        """The same, one byte a segment, framing included."""
        framed = self.framed(data)
        for at in range(len(framed)):
            await self.write(framed[at : at + 1])
            await trio.sleep(gap)

    async def end(self) -> None:
        """The clean end of the body."""
        self.done()
        if self.framing == "chunked":
            await self.write(b"0\r\n\r\n")
        elif self.framing == "close":
            await self.fin()

    def done(self) -> None:
        """The work is over: from here on the call doesn't count."""
        if self.finished_at is None:
            self.finished_at = trio.current_time()
            self.engine.running -= self.weight
            self.engine.notes.changed()

    def token(self) -> None:
        self.tokens += 1
        self.engine.notes.changed()

    async def fin(self) -> None:
        self.done()
        self.connection.ended = True
        await self.connection.stream.aclose()

    async def rst(self) -> None:
        self.done()
        self.connection.ended = True
        self.connection.raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await self.connection.stream.aclose()

    def peer_gone(self) -> None:
        if self.closed_at is None:
            self.closed_at = trio.current_time()
            if not self.goes_on_for:
                self.done()
            self.engine.notes.changed()


def weight_of(call: Call) -> int:
    """How many sequences the engine makes for this request."""
    try:
        body = json.loads(call.body)
        prompt = body.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        return prompts * max(int(body.get("n") or 1), int(body.get("best_of") or 1))
    except (ValueError, AttributeError):
        return 1


class Connection:
    """One accepted socket: reads requests, plays their scripts, watches for the peer meanwhile."""

    def __init__(self, engine: ScriptedEngine, raw: socket.socket) -> None:
        raw.setblocking(False)
        self.engine, self.raw = engine, raw
        self.stream = trio.SocketStream(trio.socket.from_stdlib_socket(raw))
        self.reader = RequestReader(self.stream)
        self.served = 0
        self.call: Call | None = None
        self.ended = False  # by the script

    async def serve(self) -> None:
        async with self.stream:
            while (request := await self.reader.request()) is not None:
                call = Call(self, request)
                self.served += 1
                if call.method == "GET" or call.path in self.engine.pages:
                    call.weight = 0
                    self.engine.probes.append(call.path)
                    self.engine.asked.append(call)
                    self.engine.notes.changed()
                    await self.engine.probe(call)
                else:
                    await self._play(call)

    async def _play(self, call: Call) -> None:
        self.call = call
        script = self.engine.admit(call)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, call, nursery.cancel_scope)
                try:
                    await script(call)
                except GONE:
                    call.peer_gone()
                if call.closed_at is None:
                    nursery.cancel_scope.cancel()
            if call.goes_on_for and call.closed_at is not None:
                await trio.sleep(call.goes_on_for)
        finally:
            call.done()
            self.call = None

    async def _watch(self, call: Call, playing: trio.CancelScope) -> None:
        while data := await self.reader.receive():
            call.stray += data
        if not self.ended:
            call.peer_gone()
        playing.cancel()

    def peek(self) -> None:
        """End the call of a socket whose close waits in the kernel unread."""
        if self.call is None or self.raw.fileno() < 0:
            return
        try:
            gone = self.raw.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            gone = False
        except OSError:
            gone = True
        if gone:
            self.call.peer_gone()


@contextmanager
def deaf_port() -> Iterator[int]:
    """A port where connecting hangs: its backlog is full, and the kernel drops what else knocks."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        while True:
            guest = stack.enter_context(socket.socket())
            guest.setblocking(False)
            guest.connect_ex(listener.getsockname())
            if not select.select([], [guest], [], 0.05)[1]:
                break
        port: int = listener.getsockname()[1]
        yield port


class ScriptedEngine:
    """Listens from the start. `plan` is played first, one script a call, then `script` for the rest."""

    def __init__(
        self,
        script: Script,
        *,
        slots: int = 4,
        name: str = "engine",
        kind: str = "openai",
        models: tuple[str, ...] = ("model",),
        unix: str | None = None,
    ) -> None:
        self.script, self.slots, self.name, self.kind, self.models = script, slots, name, kind, models
        self.plan: list[Script] = []
        self.calls: list[Call] = []
        self.pages: dict[str, Script] = {}  # other pages than inference, beyond what `probe` answers
        self.probes: list[str] = []
        self.asked: list[Call] = []  # those of the other pages
        self.connections: set[Connection] = set()
        self.accepted = 0
        self.running = self.peak = 0
        self.notes = Notes()
        self._stopping = trio.CancelScope()
        self._stopped = trio.Event()
        if unix is None:
            self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
            self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        else:
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.listener.bind(unix)
            self.listener.listen(1024)
            self.url = "unix:" + unix
        self.listener.setblocking(False)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def serve(self) -> None:
        with self.listener, self._stopping:
            async with trio.open_nursery() as nursery:
                while True:
                    await trio.lowlevel.wait_readable(self.listener)
                    try:
                        raw, _ = self.listener.accept()
                    except (BlockingIOError, ConnectionAbortedError):
                        continue
                    nursery.start_soon(self._serve_one, Connection(self, raw))
        self._stopped.set()

    async def _serve_one(self, connection: Connection) -> None:
        self.accepted += 1
        self.connections.add(connection)
        try:
            await connection.serve()
        except GONE:
            pass  # Within the head of a page that was asked for.
        finally:
            self.connections.discard(connection)
            self.notes.changed()
            self.notes.changed()

    async def stop(self) -> None:
        """The engine dies: its listener and every connection close."""
        self._stopping.cancel()
        await self._stopped.wait()

    def admit(self, call: Call) -> Script:
        for connection in self.connections:
            connection.peek()
        self.calls.append(call)
        self.running += call.weight
        self.peak = max(self.peak, self.running)
        self.notes.changed()
        return self.plan.pop(0) if self.plan else self.script

    async def probe(self, call: Call) -> None:
        """What an engine answers besides inference."""
        if call.path in self.pages:
            await self.pages[call.path](call)
            return
        if call.path == "/v1/models":
            names = [
                {"id": name, "object": "model", "created": 1, "owned_by": self.kind} for name in self.models
            ]
            status, body = 200, json.dumps({"object": "list", "data": names})
        elif call.path == "/api/tags":
            status, body = (
                200,
                json.dumps({"models": [{"name": name, "model": name} for name in self.models]}),
            )
        elif call.path == "/metrics":
            status, body = 200, f"vllm:num_requests_running {self.running}\nvllm:num_requests_waiting 0\n"
        else:
            status, body = (
                (200, "") if call.path in ("/health", "/version") else (404, '{"detail":"Not Found"}')
            )
        await call.head(status, [("Content-Type", "application/json")], framing="length", length=len(body))
        await call.write(body.encode())

    async def call(self, index: int = 0) -> Call:
        """The call with this index, as soon as it has arrived."""
        await self.notes.until(lambda: len(self.calls) > index)
        return self.calls[index]

    async def until(self, true: Callable[[], bool]) -> None:
        await self.notes.until(true)
