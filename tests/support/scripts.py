"""Ready-made scripts for the scripted engine: whole answers, streams with every kind of end, errors, silence.

Waiting inside a script is the engine's speed (`gap`, seconds) or a test's own signal (`trio.Event`), never
a guess.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import trio

from tests.support.routes import BY_PATH, Route
from tests.support.scripted import Call, Script
from tests.support.wire import Headers


class Ending(Enum):
    """How a stream ends, after its tokens."""

    CLEAN = auto()  # terminal marker, last chunk, connection kept
    HELD = auto()  # terminal marker, then the engine holds the socket open
    NO_MARKER = auto()  # everything before the marker, then a clean last chunk
    FIN = auto()  # no marker, no last chunk: the connection just closes
    RST = auto()
    SILENT = auto()  # nothing more ever comes


@dataclass
class Step:
    """Wait for some seconds, or for a signal of the test's."""

    wait: float | trio.Event = 0.0

    async def __call__(self) -> None:
        if isinstance(self.wait, trio.Event):
            await self.wait.wait()
        elif self.wait:
            await trio.sleep(self.wait)


@dataclass
class Stream:
    """A streamed answer in the dialect of the route asked for."""

    tokens: int = 5
    gap: float = 0.0
    prefill: float | trio.Event = 0.0  # silence before the first body byte
    late_head: bool = False  # the head too comes only after the prefill
    pause_after: int | None = None  # after that many tokens, wait for `until`
    until: float | trio.Event = 0.0
    ending: Ending = Ending.CLEAN
    framing: str = "chunked"
    headers: Headers = field(default_factory=list)
    bytewise: float | None = None  # one byte a segment, with this gap
    goes_on_for: float = 0.0

    async def __call__(self, call: Call) -> None:
        route = BY_PATH[call.path]
        assert route.parts is not None
        call.goes_on_for = self.goes_on_for
        if not self.late_head:
            await self._head(call, route)
        await Step(self.prefill)()
        if self.late_head:
            await self._head(call, route)
        for part in route.parts.opening:
            await self._send(call, part)
        for i in range(self.tokens):
            if i == self.pause_after:
                await Step(self.until)()
            await self._send(call, route.parts.token(i))
            call.token()
            if self.gap and i + 1 < self.tokens:
                await trio.sleep(self.gap)
        if self.pause_after == self.tokens:
            await Step(self.until)()
        await self._end(call, route.parts.closing)

    async def _head(self, call: Call, route: Route) -> None:
        await call.head(200, [("Content-Type", route.media), *self.headers], framing=self.framing)

    async def _send(self, call: Call, data: bytes) -> None:
        if self.bytewise is None:
            await call.send(data)
        else:
            await call.send_bytewise(data, self.bytewise)

    async def _end(self, call: Call, closing: tuple[bytes, ...]) -> None:
        if self.ending is Ending.SILENT:
            await call.closed()
        elif self.ending is Ending.RST:
            await call.rst()
        elif self.ending is Ending.FIN:
            await call.fin()
        else:
            for part in closing[:-1]:
                await self._send(call, part)
            if self.ending is not Ending.NO_MARKER:
                call.done()  # the moment a real engine's sequence is over
                await self._send(call, closing[-1])
            if self.ending is Ending.HELD:
                await call.closed()
            await call.end()


@dataclass
class Whole:
    """An answer in one piece, after the time it takes."""

    takes: float | trio.Event = 0.0
    body: bytes | None = None
    goes_on_for: float = 0.0

    async def __call__(self, call: Call) -> None:
        call.goes_on_for = self.goes_on_for
        await Step(self.takes)()
        body = BY_PATH[call.path].whole_bytes() if self.body is None else self.body
        call.done()
        await call.head(200, [("Content-Type", "application/json")], framing="length", length=len(body))
        await call.write(body)


@dataclass
class Status:
    """An error answer."""

    status: int
    body: bytes = b'{"error":{"message":"no","type":"engine","code":null}}'
    headers: Headers = field(default_factory=lambda: [("Content-Type", "application/json")])
    takes: float | trio.Event = 0.0

    async def __call__(self, call: Call) -> None:
        await Step(self.takes)()
        call.done()
        await call.head(self.status, self.headers, framing="length", length=len(self.body))
        await call.write(self.body)


class End(Enum):
    FIN = auto()
    RST = auto()


@dataclass
class Raw:
    """Steps one after the other: bytes as they are, seconds, signals, and how the connection ends."""

    steps: list[bytes | float | trio.Event | End]

    async def __call__(self, call: Call) -> None:
        for step in self.steps:
            if isinstance(step, bytes):
                await call.write(step)
            elif step is End.FIN:
                await call.fin()
            elif step is End.RST:
                await call.rst()
            elif not isinstance(step, End):
                await Step(step)()


@dataclass
class Sse:
    """A 200 event stream with exactly this body, each piece a chunk, then a clean last chunk."""

    pieces: list[bytes | float | trio.Event]
    media: str = "text/event-stream"
    headers: Headers = field(default_factory=list)

    async def __call__(self, call: Call) -> None:
        await call.head(200, [("Content-Type", self.media), *self.headers])
        for piece in self.pieces:
            if isinstance(piece, bytes):
                await call.send(piece)
                call.token()
            else:
                await Step(piece)()
        await call.end()


@dataclass
class Stale:
    """Answers the first request of a connection, and closes upon a later one without a byte."""

    answer: Script
    end: End = End.FIN

    async def __call__(self, call: Call) -> None:
        if call.nth == 0:
            await self.answer(call)
        elif self.end is End.FIN:
            await call.fin()
        else:
            await call.rst()


async def never_answers(call: Call) -> None:
    await call.closed()


def wants_stream(call: Call) -> bool:
    """`stream` absent means true on Ollama's own routes, false elsewhere."""
    route = BY_PATH[call.path]
    return route.parts is not None and bool(call.json.get("stream", route.kind == "ollama"))


async def honest(call: Call) -> None:
    """A well-behaved engine with no delays."""
    script: Script = Stream() if wants_stream(call) else Whole()
    await script(call)
