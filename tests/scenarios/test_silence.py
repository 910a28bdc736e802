"""A silent engine: each clock measures its own kind of silence, none a long prefill by mistake."""

from __future__ import annotations

import re

import pytest
import trio

from tests.support.gateway import running_gateway
from tests.support.http1 import Truncated, http1
from tests.support.routes import CHAT, DONE, STREAMING, Route
from tests.support.scripted import ScriptedEngine, deaf_port
from tests.support.scripts import Ending, Sse, Stream, Whole, never_answers
from tests.support.visitors import WAYS, visit

protocols = pytest.mark.parametrize("way", ["fin", "h2_reset"], ids=["http1", "http2"])
TOKEN = b'data: {"choices":[{"delta":{"content":" tk"}}]}\n\n'
THOUGHT = b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n'


@protocols
@pytest.mark.parametrize("stream", [True, False])
async def test_engine_that_never_answers_is_a_504(way: str, stream: bool) -> None:
    engine = ScriptedEngine(never_answers, slots=1)
    async with running_gateway(engine, stream={"first_byte_seconds": 0.2}) as gateway:
        async with visit(way, gateway.url, CHAT.path, CHAT.payload(stream=stream)) as visitor:
            since = trio.current_time()
            assert (await visitor.head()).status == 504
            assert 0.2 <= trio.current_time() - since < 2
            assert b'"engine_timeout"' in await visitor.rest()
            await visitor.still_served()
        await engine.calls[0].closed()
        await gateway.record(outcome="engine_timeout", status=504, code="engine_timeout", phase="prefill")
    assert len(engine.calls) == 1


@pytest.mark.parametrize("way", WAYS)
async def test_who_waits_for_an_engine_that_never_answers_may_leave(way: str) -> None:
    engine = ScriptedEngine(never_answers, slots=1)
    async with running_gateway(engine, stream={"first_byte_seconds": 60}) as gateway:
        async with visit(way, gateway.url, CHAT.path, CHAT.payload(stream=True)) as visitor:
            call = await engine.call()
            left = await visitor.leave()
            assert await call.closed() - left < 0.5
        await gateway.record(outcome="client_gone")


async def test_head_without_a_first_byte_times_out_too() -> None:
    engine = ScriptedEngine(Stream(prefill=trio.Event()), slots=1)
    async with (
        running_gateway(engine, stream={"first_byte_seconds": 0.2}) as gateway,
        http1(gateway.url) as client,
    ):
        answer = await client.ask(CHAT.path, CHAT.payload(stream=True))
        assert (answer.status, answer.json["error"]["code"]) == (504, "engine_timeout")
        await gateway.record(outcome="engine_timeout", phase="prefill")


@pytest.mark.parametrize("late_head", [True, False])
async def test_long_prefill_survives_the_idle_clock(late_head: bool) -> None:
    engine = ScriptedEngine(Stream(prefill=0.6, late_head=late_head), slots=1)
    clocks = {"first_byte_seconds": 10, "idle_seconds": 0.2}
    async with running_gateway(engine, stream=clocks) as gateway, http1(gateway.url) as client:
        assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).body.endswith(DONE)
        record = await gateway.record(outcome="completed")
        assert record["ttft_ms"] >= 600


@pytest.mark.parametrize("clock", ["first_byte_seconds", "idle_seconds", "total_seconds"])
async def test_zero_turns_a_clock_off(clock: str) -> None:
    others = {"first_byte_seconds": 5, "idle_seconds": 5, "total_seconds": 5}
    engine = ScriptedEngine(Stream(tokens=2, prefill=0.2, pause_after=1, until=0.2), slots=1)
    async with running_gateway(engine, stream={**others, clock: 0}) as gateway, http1(gateway.url) as client:
        assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).status == 200
        await gateway.record(outcome="completed")


async def test_thinking_aloud_counts_as_progress() -> None:
    pieces: list[bytes | float | trio.Event] = []
    for _ in range(6):
        pieces += [THOUGHT, 0.1]
    engine = ScriptedEngine(Sse([*pieces, TOKEN, DONE]), slots=1)
    async with running_gateway(engine, stream={"idle_seconds": 0.3}) as gateway, http1(gateway.url) as client:
        answer = await client.ask(CHAT.path, CHAT.payload(stream=True))
        assert answer.body == THOUGHT * 6 + TOKEN + DONE
        await gateway.record(outcome="completed")


@protocols
@pytest.mark.parametrize("route", STREAMING, ids=str)
async def test_silence_within_a_stream_is_told_in_band(way: str, route: Route) -> None:
    engine = ScriptedEngine(Stream(tokens=2, ending=Ending.SILENT), slots=1, kind=route.kind)
    async with running_gateway(engine, stream={"idle_seconds": 0.2}) as gateway:
        async with visit(way, gateway.url, route.path, route.payload(stream=True)) as visitor:
            await visitor.head()
            with pytest.raises(Truncated) as cut:
                await visitor.rest()
            await visitor.still_served()
        assert b"engine_timeout" in cut.value.got
        await engine.calls[0].closed()
        await gateway.record(outcome="engine_timeout", status=504, phase="streaming")


async def test_total_time_ends_a_lively_stream() -> None:
    engine = ScriptedEngine(Stream(tokens=1000, gap=0.02), slots=1)
    async with (
        running_gateway(engine, stream={"total_seconds": 0.4}) as gateway,
        http1(gateway.url) as client,
    ):
        await client.post(CHAT.path, CHAT.payload(stream=True))
        await client.head()
        with pytest.raises(Truncated) as cut:
            await client.rest()
        assert b"engine_timeout" in cut.value.got
        await gateway.record(outcome="engine_timeout")
        await engine.calls[0].closed()


async def test_connecting_has_a_limit() -> None:
    with deaf_port() as port:
        words = {
            "name": "deaf",
            "kind": "openai",
            "url": f"http://127.0.0.1:{port}",
            "slots": 1,
            "models": ["model"],
        }
        async with (
            running_gateway(words, stream={"connect_seconds": 0.2}) as gateway,
            http1(gateway.url) as client,
        ):
            answer = await client.ask(CHAT.path, CHAT.payload(stream=True))
            assert (answer.status, answer.json["error"]["code"]) == (503, "no_engine")
            await gateway.record(status=503, code="no_engine", phase="connecting")


# Heartbeats: off by default, comments only, only between events.

COMMENT = re.compile(rb"^:[^\n]*\n\n", re.MULTILINE)


async def test_heartbeats_come_only_between_events() -> None:
    half = len(TOKEN) // 2
    pieces: list[bytes | float | trio.Event] = [TOKEN, 0.25, TOKEN[:half], 0.25, TOKEN[half:], 0.25, DONE]
    engine = ScriptedEngine(Sse(pieces), slots=1)
    async with (
        running_gateway(engine, stream={"heartbeat_seconds": 0.05}) as gateway,
        http1(gateway.url) as client,
    ):
        answer = await client.ask(CHAT.path, CHAT.payload(stream=True))
        assert TOKEN in answer.body.removeprefix(TOKEN), "a heartbeat came within an event"
        first, second, rest = answer.body.split(TOKEN)
        assert first == b""
        assert COMMENT.findall(second), "no heartbeat between the events"
        assert COMMENT.sub(b"", second) == b""
        assert COMMENT.findall(rest)
        assert COMMENT.sub(b"", rest) == DONE
        await gateway.record(outcome="completed")


async def test_no_heartbeats_by_default_nor_outside_event_streams() -> None:
    engine = ScriptedEngine(Whole(takes=0.3), slots=1)
    async with (
        running_gateway(engine, stream={"heartbeat_seconds": 0.05}) as gateway,
        http1(gateway.url) as client,
    ):
        assert (await client.ask(CHAT.path, CHAT.payload(stream=False))).json == CHAT.whole
    engine = ScriptedEngine(Sse([TOKEN, 0.3, DONE]), slots=1)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).body == TOKEN + DONE


async def test_a_heartbeat_commits_the_answer_and_errors_are_in_band_from_then_on() -> None:
    engine = ScriptedEngine(Stream(prefill=trio.Event()), slots=1)
    clocks = {"heartbeat_seconds": 0.05, "first_byte_seconds": 0.4}
    async with running_gateway(engine, stream=clocks) as gateway, http1(gateway.url) as client:
        await client.post(CHAT.path, CHAT.payload(stream=True))
        assert (await client.head()).status == 200
        with pytest.raises(Truncated) as cut:
            await client.rest()
        assert COMMENT.match(cut.value.got)
        assert b"engine_timeout" in cut.value.got
        await gateway.record(outcome="engine_timeout")


async def test_no_heartbeat_before_the_engine_s_head() -> None:
    engine = ScriptedEngine(never_answers, slots=1)
    clocks = {"heartbeat_seconds": 0.05, "first_byte_seconds": 0.3}
    async with running_gateway(engine, stream=clocks) as gateway, http1(gateway.url) as client:
        assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).status == 504
