"""llama.cpp itself behind the gateway: what it streams arrives, and it stops when its reader leaves.

The engine's own log is the witness, for asking llama.cpp disturbs it (see `real_engine.py`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import openai
import pytest
import trio

from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import http1
from tests.support.http2 import http2
from tests.support.real_engine import SLOTS, RealEngine, events_of, real_engine, talk
from tests.support.routes import CHAT
from tests.support.stock import curl, json_arguments, openai_async, openai_sync
from tests.support.visitors import WAYS, visit

pytestmark = pytest.mark.engine

STOP_SECONDS = 1.0
IDLE_SECONDS = 0.3  # it is within a tenth on an idle machine


@pytest.fixture(scope="session")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    with real_engine(tmp_path_factory.mktemp("fast"), layers=2, dim=64) as engine:
        yield engine


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """Some hundreds of tokens a second: an answer of a few thousand lasts long enough to be left."""
    with real_engine(tmp_path_factory.mktemp("slow"), layers=96, dim=16) as engine:
        yield engine


async def test_streams(fast: RealEngine) -> None:
    async with running_gateway(fast.entry) as gateway, http1(gateway.url) as client:
        answer = await client.ask(CHAT.path, talk(stream=True, max_tokens=40))
        assert answer.head["content-type"].startswith("text/event-stream")
        assert answer.body.endswith(b"data: [DONE]\n\n")
        words = "".join(e["choices"][0]["delta"].get("content") or "" for e in events_of(answer.body))
        assert len(words.split()) == 40
        record = await gateway.record(outcome="completed")
        assert record["events"] >= 40


async def test_answers_in_one_piece(fast: RealEngine) -> None:
    async with running_gateway(fast.entry) as gateway, http1(gateway.url) as client:
        answer = await client.ask(CHAT.path, talk(max_tokens=40))
        assert answer.json["usage"]["completion_tokens"] == 40
        assert len(answer.json["choices"][0]["message"]["content"].split()) == 40
        answer = await client.ask("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 7})
        assert answer.json["usage"]["completion_tokens"] == 7


async def test_a_conversation_id_keeps_nothing_running(slow: RealEngine) -> None:
    """With this header llama.cpp goes on for a client that has left."""
    before = slow.ends
    async with running_gateway(slow.entry) as gateway:
        async with http1(gateway.url) as client:
            await client.post(CHAT.path, talk(stream=True, max_tokens=3000), {"X-Conversation-Id": "c"})
            await client.head()
            await client.until(b"data: ", 5)
        with trio.fail_after(STOP_SECONDS):
            await slow.released(before + 1)
        await gateway.record(outcome="client_gone")


@pytest.mark.parametrize("way", WAYS)
async def test_stops_when_the_reader_leaves(slow: RealEngine, way: str) -> None:
    before = slow.ends
    async with running_gateway(slow.entry) as gateway:
        async with visit(way, gateway.url, CHAT.path, talk(stream=True, max_tokens=3000)) as visitor:
            assert (await visitor.head()).status == 200
            await visitor.until(b"data: ", 10)
            await visitor.leave()
            with trio.fail_after(STOP_SECONDS):
                await slow.released(before + 1)
        record = await gateway.record(outcome="client_gone")
        assert record["status"] == 499
        assert await slow.busy_slots() == 0


async def test_only_the_leaver_s_work_stops(slow: RealEngine) -> None:
    before = slow.ends
    async with running_gateway(slow.entry) as gateway, http2(gateway.url) as connection:
        stays = await connection.post(CHAT.path, talk("stay", stream=True, max_tokens=300))
        leaves = await connection.post(CHAT.path, talk("leave", stream=True, max_tokens=3000))
        await stays.until(b"data: ", 3)
        await leaves.until(b"data: ", 3)
        await leaves.reset()
        with trio.fail_after(STOP_SECONDS):
            await slow.released(before + 1)
        assert not stays.over
        answer = await stays.answer()
        assert len(events_of(answer.body)) >= 300
        await gateway.record(outcome="completed")
        await gateway.record(outcome="client_gone")


@asynccontextmanager
async def somebody_streaming(engine: RealEngine) -> AsyncIterator[Gateway]:
    """A gateway through which somebody else is being answered all the time."""
    async with running_gateway(engine.entry) as gateway, http1(gateway.url) as stays:
        await stays.post(CHAT.path, talk("stay", stream=True, max_tokens=900))
        await stays.head()
        await stays.until(b"data: ", 3)
        yield gateway


async def test_who_does_not_stream_is_called_off_while_another_streams(slow: RealEngine) -> None:
    """Asked directly, llama.cpp makes such an answer to its end."""
    before = slow.ends
    async with somebody_streaming(slow) as gateway:
        async with http1(gateway.url) as leaves:
            await leaves.post(CHAT.path, talk("leave", max_tokens=3000))
            await gateway.in_phase("streaming", 2)
        left = trio.current_time()
        with trio.fail_after(STOP_SECONDS):
            await slow.released(before + 1)
        assert trio.current_time() - left < IDLE_SECONDS
        record = await gateway.record(outcome="client_gone")
        assert (record["stream"], record["reclaimed_by"]) == (False, "engine_idle")
        assert record["reclaim_ms"] < 1000
        assert not gateway.matching(outcome="completed"), "the other one still streams"


async def test_leaving_in_a_long_prefill(slow: RealEngine) -> None:
    before = slow.ends
    async with somebody_streaming(slow) as gateway:
        async with http1(gateway.url) as leaves:
            await leaves.post(CHAT.path, talk("leave " * 600, stream=True, max_tokens=3000))
            await gateway.in_phase("prefill")
            await trio.sleep(0.1)  # In the midst of it: of that nothing tells.
        with trio.fail_after(2 * STOP_SECONDS):
            await slow.released(before + 1)
        assert not gateway.matching(outcome="completed"), "the other one still streams"
        await gateway.record(outcome="client_gone", phase="prefill")


async def test_progress_is_for_who_asks_for_it(fast: RealEngine) -> None:
    async with running_gateway(fast.entry) as gateway, http1(gateway.url) as client:
        plain = await client.ask(CHAT.path, talk("x " * 200, stream=True, max_tokens=4))
        asked = await client.ask(CHAT.path, talk("y " * 200, stream=True, max_tokens=4, return_progress=True))
        assert b"prompt_progress" not in plain.body
        assert asked.body.count(b"prompt_progress") >= 2
        whole = await client.ask(CHAT.path, talk("x " * 200, max_tokens=4))
        assert whole.json["object"] == "chat.completion"
        assert whole.json["usage"]["completion_tokens"] == 4


async def test_what_cannot_be_added_up_goes_up_as_it_is(fast: RealEngine) -> None:
    async with running_gateway(fast.entry) as gateway, http1(gateway.url) as client:
        answer = await client.ask(CHAT.path, talk(max_tokens=3, logprobs=True))
        assert len(answer.json["choices"][0]["logprobs"]["content"]) == 3
        metrics = await gateway.metrics()
        assert metrics['gateway_unchanged_requests_total{engine="llama"}'] == 1


async def test_never_more_at_once_than_it_has_slots(fast: RealEngine) -> None:
    async def ask(gateway: Gateway) -> None:
        async with http1(gateway.url) as client:
            assert (await client.ask(CHAT.path, talk(stream=True, max_tokens=100))).status == 200

    async with running_gateway(fast.entry) as gateway:
        async with trio.open_nursery() as nursery:
            for _ in range(4 * SLOTS):
                nursery.start_soon(ask, gateway)
        await gateway.recorded(4 * SLOTS, outcome="completed")
        async with http1(fast.url) as client:
            metrics = (await client.ask("/metrics")).body.decode()
        assert "llamacpp:requests_deferred 0" in metrics


async def test_curl(fast: RealEngine, slow: RealEngine) -> None:
    before = slow.ends
    async with running_gateway(fast.entry) as gateway:
        body = json.dumps(talk(stream=True, max_tokens=20))
        async with curl("--http1.1", *json_arguments(gateway.url + CHAT.path, body)) as client:
            assert (await client.rest()).endswith(b"data: [DONE]\n\n")
    async with running_gateway(slow.entry) as gateway:
        body = json.dumps(talk(stream=True, max_tokens=3000))
        async with curl("--http2-prior-knowledge", *json_arguments(gateway.url + CHAT.path, body)) as client:
            await client.until(b"data: ", 5)
            client.interrupt()
            with trio.fail_after(STOP_SECONDS):
                await slow.released(before + 1)


async def test_openai_client(slow: RealEngine) -> None:
    def whole(client: openai.OpenAI) -> int:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=12
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens

    async def leave(client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=3000, stream=True
        )
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 5:
                break
        await stream.close()

    async with running_gateway(slow.entry) as gateway:
        assert await openai_sync(gateway.url, whole) == 12
        before = slow.ends
        await openai_async(gateway.url, leave)
        with trio.fail_after(STOP_SECONDS):
            await slow.released(before + 1)
        await gateway.record(outcome="client_gone", status=499)
