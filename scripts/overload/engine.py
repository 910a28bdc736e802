"""The overload engine: vLLM's API over a simulated GPU that dies when it is given too much.

As a process: ``python -m overload.engine --port 8000 --blocks 720``. Asked for more blocks than there are, it
says so on stderr and exits with status 1; every connection is cut.

In a test's own loop: ``port = await nursery.start(engine.serve)``. When the GPU dies, its listener and its
connections are closed as if the process had ended, ``dead`` is set, ``death`` says why, and `serve` returns.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Awaitable, Callable

import h11
import trio

from overload.answers import Asked, Faulty, Wording, metrics, models, parse
from overload.gpu import Gpu, OutOfMemory, Sequence, Settings

HOST = "127.0.0.1"
JSON = "application/json"
TEXT = "text/plain; version=0.0.4; charset=utf-8"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Departed(Exception):
    """The client has closed its connection."""


class OverloadEngine:
    """One engine, alive until its GPU dies or it is cancelled."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.gpu = Gpu(settings or Settings())
        self.port = 0
        self.dead = trio.Event()
        self.death: OutOfMemory | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"

    async def serve(self, port: int = 0, *, task_status: trio.TaskStatus[int]) -> None:
        """Serve until the GPU dies; says on which port."""
        async with trio.open_nursery() as nursery:
            listeners = await trio.open_tcp_listeners(port, host=HOST, backlog=1024)
            self.port = listeners[0].socket.getsockname()[1]
            nursery.start_soon(trio.serve_listeners, self._serve_connection, listeners)
            task_status.started(self.port)
            try:
                await self.gpu.run()
            except OutOfMemory as death:
                self.death = death
            nursery.cancel_scope.cancel()
        self.dead.set()

    async def _serve_connection(self, stream: trio.SocketStream) -> None:
        connection = Connection(stream)
        with contextlib.suppress(Departed, h11.RemoteProtocolError):
            while connection.ready_for_another():
                request, body = await connection.request()
                await self._answer(connection, request.method, request.target.partition(b"?")[0], body)

    async def _answer(self, connection: Connection, method: bytes, path: bytes, body: bytes) -> None:
        pages: dict[str, Callable[[], tuple[str, bytes]]] = {
            "GET /health": lambda: (JSON, b""),
            "GET /v1/models": lambda: (JSON, models()),
            "GET /metrics": lambda: (TEXT, metrics(self.gpu)),
        }
        asked_for = f"{method.decode('ascii')} {path.decode('latin-1')}"
        try:
            if asked_for in (f"POST {CHAT}", f"POST {COMPLETIONS}"):
                await self._generate(connection, parse(body), chat=asked_for.endswith(CHAT))
            elif asked_for in pages:
                await connection.whole(200, *pages[asked_for]())
            else:
                raise Faulty(404, f"There is no {asked_for}.")
        except Faulty as fault:
            await connection.whole(fault.status, JSON, fault.body)

    async def _generate(self, connection: Connection, asked: Asked, *, chat: bool) -> None:
        sequence = self.gpu.start(asked.prompt_tokens, asked.most)
        wording = Wording(asked, chat=chat, number=self.gpu.counters.started)
        try:
            await connection.while_there(
                lambda: (stream_answer if asked.stream else whole_answer)(connection, sequence, wording)
            )
        finally:
            sequence.leave()  # nothing to leave, if its answer is whole


async def stream_answer(connection: Connection, sequence: Sequence, wording: Wording) -> None:
    """Send each token as it is made."""
    await connection.head(200, [("Content-Type", "text/event-stream; charset=utf-8")])
    await connection.data(wording.opening())
    sent = 0
    while sent < sequence.most:
        made = await sequence.more_than(sent)
        await connection.data(wording.tokens(sent, made))
        sent = made
    await connection.data(wording.closing())
    await connection.end()


async def whole_answer(connection: Connection, sequence: Sequence, wording: Wording) -> None:
    """Send the answer once it is made."""
    await sequence.more_than(sequence.most - 1)
    await connection.whole(200, JSON, wording.whole())


class Connection:
    """One client's connection. Every method raises Departed when the client has closed it."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._h11 = h11.Connection(h11.SERVER)

    def ready_for_another(self) -> bool:
        """Whether another request may follow what there was so far."""
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
        return self._h11.our_state is h11.IDLE

    async def request(self) -> tuple[h11.Request, bytes]:
        """Read the next request and its body."""
        request = await self._event()
        if not isinstance(request, h11.Request):
            raise Departed
        body = b""
        while isinstance(event := await self._event(), h11.Data):
            body += event.data
        return request, body

    async def _event(self) -> object:
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            await self._receive()
        return event

    async def _receive(self) -> None:
        try:
            data = await self._stream.receive_some(65536)
        except trio.BrokenResourceError as error:
            raise Departed from error
        if not data:
            raise Departed
        self._h11.receive_data(data)

    async def while_there(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work, unless the client leaves before it is done: then it is broken off."""
        departed = False

        async def watch() -> None:
            nonlocal departed
            with contextlib.suppress(Departed):
                while True:
                    await self._receive()  # the next request, perhaps; it waits in h11
            departed = True
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            with contextlib.suppress(Departed):  # on the way out the watcher sees it, too
                await work()
                nursery.cancel_scope.cancel()
        if departed:
            raise Departed

    async def head(self, status: int, headers: list[tuple[str, str]]) -> None:
        """Send the head; without a length the body is chunked."""
        await self._send(h11.Response(status_code=status, headers=headers))

    async def data(self, data: bytes) -> None:
        """Send a piece of the body."""
        if data:
            await self._send(h11.Data(data=data))

    async def end(self) -> None:
        """End the body."""
        await self._send(h11.EndOfMessage())

    async def whole(self, status: int, kind: str, body: bytes) -> None:
        """Send a whole answer, in one piece."""
        head = h11.Response(
            status_code=status, headers=[("Content-Type", kind), ("Content-Length", str(len(body)))]
        )
        await self._send(head, h11.Data(data=body), h11.EndOfMessage())

    async def _send(self, *events: h11.Event) -> None:
        try:
            await self._stream.send_all(b"".join(self._h11.send(event) or b"" for event in events))
        except trio.BrokenResourceError as error:
            raise Departed from error


def main() -> int:
    """Run as a process; the exit status."""
    usual = Settings()
    parser = argparse.ArgumentParser(prog="overload.engine", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--blocks", type=int, default=usual.blocks, help="KV blocks of 16 tokens there are")
    parser.add_argument("--step-seconds", type=float, default=usual.step_seconds, help="one token each")
    parser.add_argument(
        "--linger-seconds",
        type=float,
        default=usual.linger_seconds,
        help="how long a sequence goes on without its client",
    )
    given = parser.parse_args()
    engine = OverloadEngine(Settings(given.blocks, given.step_seconds, given.linger_seconds))

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            print(f"listening on 127.0.0.1:{await nursery.start(engine.serve, given.port)}", flush=True)

    with contextlib.suppress(KeyboardInterrupt):
        trio.run(run)
    if engine.death is None:
        return 0
    print(f"torch.OutOfMemoryError: {engine.death}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
