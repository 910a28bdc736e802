"""Relaying a body without waking the reader for each piece, over each way there is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import trio

from gateway import config
from gateway.arrivals import Arrivals
from gateway.engine import Answer, Call, Engine, relay_each
from gateway.errors import Code, EngineError
from gateway.transport import make_engine
from tests.support.scripted import Script, ScriptedEngine
from tests.support.scripts import End, Raw

MOST = 64 * 1024
"""What a read may bring."""

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(params=["arrivals", "alone", "by receiving"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Scene:
    """An engine, the way to it, and what was taken of its body."""

    def __init__(self, scripted: ScriptedEngine, engine: Engine, way: str) -> None:
        self.scripted = scripted
        self.engine = engine
        self.way = way
        self.got = bytearray()
        self._more = trio.Event()

    def open(self) -> AbstractAsyncContextManager[Answer]:
        head = [(b"Host", b"h"), (b"Content-Length", b"2")]
        return self.engine.open(
            Call(target=b"/v1/x", headers=head, body=b"{}", fresh=False, connected=lambda: None)
        )

    async def relay(self, answer: Answer, *, until: bytes = b"never") -> bool:
        def take(data: bytes) -> int:
            self.got += data
            self._more.set()
            return 0 if until in self.got else MOST

        return await (relay_each(answer, take) if self.way == "by receiving" else answer.relay(take, MOST))

    async def has(self, so_far: bytes) -> None:
        """Wait until so much was taken."""
        while self.got != so_far:
            self._more = trio.Event()
            await self._more.wait()


@asynccontextmanager
async def scene(way: str, script: Script) -> AsyncIterator[Scene]:
    scripted = ScriptedEngine(script)
    arrivals = Arrivals()
    entry = config.Engine(name="e", kind="openai", url=scripted.url, slots=1, models=("m",))
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scripted.serve)
            nursery.start_soon(arrivals.run)
            engine = make_engine(entry, connect_seconds=2, arrivals=arrivals if way == "arrivals" else None)
            yield Scene(scripted, engine, way)
            await engine.transport.aclose()
            nursery.cancel_scope.cancel()


async def test_every_piece_is_taken_until_the_clean_end(way: str) -> None:
    steps = [trio.Event() for _ in range(3)]
    script = Raw([CHUNKED + b"3\r\none\r\n", steps[0], b"3\r\ntwo\r\n", steps[1], b"0\r\n\r\n"])
    async with scene(way, script) as here:
        async with here.open() as answer, trio.open_nursery() as nursery:
            results: list[bool] = []

            async def relay() -> None:
                results.append(await here.relay(answer))

            nursery.start_soon(relay)
            for step, so_far in zip(steps, (b"one", b"onetwo"), strict=False):
                await here.has(so_far)
                step.set()
        assert (bytes(here.got), results) == (b"onetwo", [False])
        async with here.open():
            assert here.scripted.accepted == 1, "the connection is used again"


async def test_whoever_declines_can_go_on_later(way: str) -> None:
    go_on = trio.Event()
    async with (
        scene(way, Raw([CHUNKED + b"1\r\na\r\n", go_on, b"1\r\nb\r\n0\r\n\r\n"])) as here,
        here.open() as answer,
    ):
        assert await here.relay(answer, until=b"a")
        assert here.got == b"a"
        go_on.set()
        at_the_end = await here.relay(answer, until=b"b")
        assert at_the_end is (way == "by receiving"), "who reads himself has to read on to see the end"
        assert not await here.relay(answer)
        assert not await here.relay(answer)
        assert here.got == b"ab"


@pytest.mark.parametrize("end", [End.FIN, End.RST])
async def test_a_body_that_breaks_off_is_taken_first_and_then_a_failure(way: str, end: End) -> None:
    go_on = trio.Event()
    async with (
        scene(way, Raw([CHUNKED + b"1\r\na\r\n", go_on, end])) as here,
        here.open() as answer,
        trio.open_nursery() as nursery,
    ):

        async def relay() -> None:
            with pytest.raises(EngineError) as caught:
                await here.relay(answer)
            assert caught.value.code is Code.ENGINE_FAILED

        nursery.start_soon(relay)
        await here.has(b"a")
        go_on.set()


async def test_cancelling_closes_the_connection_at_once(way: str) -> None:
    async with scene(way, Raw([CHUNKED + b"1\r\na\r\n", trio.Event()])) as here:
        with trio.CancelScope() as scope:
            async with here.open() as answer, trio.open_nursery() as nursery:
                nursery.start_soon(here.relay, answer)
                await here.has(b"a")
                scope.cancel()
        (call,) = here.scripted.calls
        await call.closed()


@pytest.mark.parametrize("way", ["arrivals", "alone"])
async def test_a_read_brings_no_more_than_is_wished(way: str) -> None:
    sizes: list[int] = []

    def take(data: bytes) -> int:
        sizes.append(len(data))
        return next(wishes, 0)

    wishes, first = iter([1000, 5000]), 3000
    body = Raw([b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", 0.05, b"x" * 100_000, trio.Event()])
    async with scene(way, body) as here, here.open() as answer:
        assert await answer.relay(take, first)
        assert sizes == [3000, 1000, 5000]


async def test_what_the_taker_raises_is_raised_to_the_reader(way: str) -> None:
    def breaks(_data: bytes) -> bool:
        raise ValueError("broken")

    async with (
        scene(way, Raw([CHUNKED, 0.05, b"1\r\na\r\n", trio.Event()])) as here,
        here.open() as answer,
    ):
        with pytest.raises(ValueError, match="broken"):
            await (relay_each(answer, breaks) if way == "by receiving" else answer.relay(breaks, MOST))
