"""llama.cpp itself behind the gateway: what it streams arrives, and it stops when its reader leaves.

The engine's own log is the witness, for asking llama.cpp disturbs it (see `real_engine.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

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
