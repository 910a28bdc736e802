"""The support code itself, clients straight against the scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.support.http1 import Http1, Truncated, connect, http1
from tests.support.routes import CHAT, ROUTES, STREAMING, Route
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import End, Ending, Raw, Stale, Stream, Whole, honest, never_answers


@asynccontextmanager
async def served(engine: ScriptedEngine) -> AsyncIterator[ScriptedEngine]:
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.serve)
            yield engine
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("route", STREAMING, ids=str)
async def test_stream_arrives_whole_and_the_connection_is_kept(route: Route) -> None:
    async with served(ScriptedEngine(honest)) as engine, http1(engine.url) as client:
        for _ in range(2):
            answer = await client.ask(route.path, route.payload(stream=True))
            assert route.parts is not None
            assert answer.body == route.parts.all(5)
            assert answer.head["content-type"] == route.media
        assert [call.nth for call in engine.calls] == [0, 1]
        assert (engine.running, engine.peak) == (0, 1)


@pytest.mark.parametrize("route", ROUTES, ids=str)
async def test_whole_answer(route: Route) -> None:
    async with served(ScriptedEngine(honest)) as engine, http1(engine.url) as client:
        answer = await client.ask(route.path, route.payload(stream=False))
        assert answer.json == route.whole


@pytest.mark.parametrize("ending", [Ending.FIN, Ending.RST])
async def test_cut_stream_is_told_from_a_whole_one(ending: Ending) -> None:
    async with served(ScriptedEngine(Stream(tokens=3, ending=ending))) as engine, http1(engine.url) as client:
        await client.post(CHAT.path, CHAT.payload(stream=True))
        await client.head()
        with pytest.raises(Truncated):
            await client.rest()
        assert engine.calls[0].closed_at is None


@pytest.mark.parametrize("way", ["close", "reset", "half_close"])
async def test_engine_notes_when_its_client_leaves(way: str) -> None:
    async with served(ScriptedEngine(never_answers)) as engine, http1(engine.url) as client:
        await client.post(CHAT.path, CHAT.payload(stream=True))
        call = await engine.call()
        left = trio.current_time()
        await getattr(client, way)()
        assert await call.closed() - left < 0.1
        assert engine.running == 0


async def test_close_that_waits_in_the_kernel_is_not_counted_as_running() -> None:
    async with served(ScriptedEngine(never_answers, slots=1)) as engine:
        for i in range(50):
            client = Http1(await connect(engine.url))
            await client.post(CHAT.path, CHAT.payload(stream=True))
            await engine.call(i)
            client.stream.socket.close()  # no checkpoint: the next request is on its way in the same turn
        await engine.until(lambda: engine.running == 0)
        assert engine.peak == 1


async def test_ghost_counts_until_its_work_ends() -> None:
    async with served(ScriptedEngine(Stream(gap=0.01, tokens=1000, goes_on_for=0.05))) as engine:
        async with http1(engine.url) as client:
            await client.post(CHAT.path, CHAT.payload(stream=True))
            call = await engine.call()
            await call.made(3)
        closed = await call.closed()
        assert engine.running == 1
        await call.finished()
        assert trio.current_time() - closed >= 0.05
        assert engine.running == 0


async def test_several_sequences_weigh_as_many() -> None:
    async with served(ScriptedEngine(Whole(), slots=8)) as engine, http1(engine.url) as client:
        await client.ask(CHAT.path, CHAT.payload(stream=False, n=3))
        await client.ask("/v1/completions", {"model": "model", "prompt": ["a", "b"], "best_of": 2})
        assert [call.weight for call in engine.calls] == [3, 4]
        assert engine.peak == 4


@pytest.mark.parametrize("end", End)
async def test_stale_connection_dies_upon_the_second_request(end: End) -> None:
    async with served(ScriptedEngine(Stale(honest, end))) as engine, http1(engine.url) as client:
        await client.ask(CHAT.path, CHAT.payload(stream=False))
        await client.post(CHAT.path, CHAT.payload(stream=False))
        assert await client.eof() == b""
        assert len(engine.calls) == 2


async def test_bytes_go_out_as_written(tmp_path: Path) -> None:
    script = Raw([b"HTTP/1.1 200 OK\r\nContent-", b"Length: 2\r\n\r\nok", End.FIN])
    async with (
        served(ScriptedEngine(script, unix=str(tmp_path / "engine"))) as engine,
        http1(engine.url) as client,
    ):
        answer = await client.ask(CHAT.path, CHAT.payload(stream=False))
        assert answer.body == b"ok"
        assert await client.eof() == b""


async def test_one_byte_a_segment() -> None:
    async with served(ScriptedEngine(Stream(tokens=1, bytewise=0.0))) as engine, http1(engine.url) as client:
        await client.post(CHAT.path, CHAT.payload(stream=True))
        await client.head()
        assert CHAT.parts is not None
        assert await client.rest() == CHAT.parts.all(1)


async def test_dead_engine_refuses() -> None:
    async with served(ScriptedEngine(honest)) as engine:
        await engine.stop()
        with pytest.raises(OSError, match="refused"):
            await connect(engine.url)
