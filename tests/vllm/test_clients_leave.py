"""Clients leave, and vLLM itself says that it stopped: whatever it was at, and for the leaver alone."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

import pytest
import trio

from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import Http1, http1
from tests.support.real_engine import events_of
from tests.support.visitors import WAYS, Visitor, visit
from tests.vllm.server import SEQUENCES, STEP_TOKENS, Gauges, Vllm
from tests.vllm.table import FIRST_STEP_IS_PROVEN, Table, proven

TEST_SECONDS = 120
IDLE_SECONDS = 5.0  # far above what is measured: the machine may be busy with other things
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = 12 * STEP_TOKENS  # a prompt of twelve steps
WHOLE = 250  # tokens of an answer that must not end before another client has come and gone

number = count()


def ask(path: str = CHAT, *, stream: bool, max_tokens: int = 3000, prompt: int = 20) -> dict[str, Any]:
    """A request that ends with `max_tokens` and not before, and whose prompt vLLM hasn't seen yet."""
    words = f"{next(number)}-{random.random()} ".ljust(prompt, "x")
    content = {"messages": [{"role": "user", "content": words}]} if path == CHAT else {"prompt": words}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    more = {"stream": stream, "max_tokens": max_tokens, "ignore_eos": True}
    return {"model": "tiny", **content, **more, **usage}


async def some_time() -> None:
    """So that clients leave anywhere within a step, and not always at its end."""
    await trio.sleep(random.uniform(0, 0.15))


async def load_falls(vllm: Vllm, to: int, since: float) -> tuple[Gauges, float]:
    """The gauges at no more than `to`, and how long after `since` that was."""
    gauges = await vllm.until(lambda gauges: gauges.load <= to, IDLE_SECONDS)
    return gauges, trio.current_time() - since


async def leaves(case: str, visitor: Visitor, gateway: Gateway, vllm: Vllm, table: Table) -> None:
    """The only client leaves: vLLM is idle soon after, and really has nothing left to do."""
    left = await visitor.leave()
    _, seconds = await load_falls(vllm, 0, left)
    record = await gateway.record(outcome="client_gone")
    table.add(case, seconds, record)
    proven(record)
    await vllm.makes_no_more_than(3, ask(stream=False))


async def ends_whole(client: Http1, tokens: int) -> None:
    """An answer that nobody has cut short."""
    events = events_of(await client.rest())
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert reasons[-1] == "length", reasons
    assert events[-1]["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize("way", WAYS * 3)
async def test_while_streaming(vllm: Vllm, table: Table, way: str) -> None:
    async with (
        running_gateway(vllm.entry(), seconds=TEST_SECONDS) as gateway,
        visit(way, gateway.url, CHAT, ask(stream=True)) as visitor,
    ):
        assert (await visitor.head()).status == 200
        await visitor.until(b"data: ", 5)
        await some_time()
        await leaves("stream, decoding", visitor, gateway, vllm, table)


@pytest.mark.parametrize("way", ["fin", "h2_reset"] * 5)
async def test_while_an_answer_in_one_piece_is_made(vllm: Vllm, table: Table, way: str) -> None:
    async with running_gateway(vllm.entry(), seconds=TEST_SECONDS) as gateway:
        before = await vllm.now()
        async with visit(way, gateway.url, CHAT, ask(stream=False)) as visitor:
            await vllm.until(lambda gauges: gauges.tokens > before.tokens + 5)
            await some_time()
            await leaves("one piece, decoding", visitor, gateway, vllm, table)


@pytest.mark.parametrize("stream", [True, False] * 4)
async def test_in_a_later_step_of_its_prefill(vllm: Vllm, table: Table, stream: bool) -> None:
    async with running_gateway(vllm.entry(), seconds=TEST_SECONDS) as gateway:
        before = await vllm.now()
        async with visit("fin", gateway.url, CHAT, ask(stream=stream, prompt=LONG)) as visitor:
            await vllm.until(lambda gauges: gauges.running == 1)
            await some_time()
            assert (await vllm.now()).tokens == before.tokens
            await leaves(
                f"{'stream' if stream else 'one piece'}, later in prefill", visitor, gateway, vllm, table
            )


@pytest.mark.parametrize("stream", [True, False] * 3)
async def test_in_the_first_step_of_its_prefill(vllm: Vllm, table: Table, stream: bool) -> None:
    """The gauges don't show this one: that vLLM is idle is seen by what it counts at the step's end."""
    async with running_gateway(vllm.entry(), seconds=TEST_SECONDS) as gateway:
        before, taken = await vllm.until(lambda gauges: gauges.load == 0), vllm.taken
        async with visit("fin", gateway.url, CHAT, ask(stream=stream, prompt=LONG)) as visitor:
            await vllm.takes(taken + 1)
            told = too_early = False
            left = await visitor.leave()

            def over(gauges: Gauges) -> bool:
                # The load: had the step ended just before the client left, the next one had to end too.
                nonlocal too_early, told
                if gauges.prompts > before.prompts and gauges.load == 0:
                    return True
                too_early |= told  # before these gauges were asked for
                told = bool(gateway.matching(outcome="client_gone"))
                return False

            await vllm.until(over, IDLE_SECONDS)
            seconds = trio.current_time() - left
        record = await gateway.record(outcome="client_gone")
        table.add("first step of prefill (step over)", seconds, record)
        proven(record)
        if FIRST_STEP_IS_PROVEN:
            assert not too_early, "vLLM was called idle while it worked"
        await vllm.makes_no_more_than(3, ask(stream=False))


@pytest.mark.parametrize("stream", [True, False] * 3)
async def test_while_queued_in_the_gateway(vllm: Vllm, table: Table, stream: bool) -> None:
    """The engine never hears of it."""
    async with running_gateway(vllm.entry(slots=1), seconds=TEST_SECONDS) as gateway:
        taken = vllm.taken
        async with http1(gateway.url) as first:
            await first.post(CHAT, ask(stream=True))
            await first.head()
            await first.until(b"data: ", 2)
            async with visit("fin", gateway.url, CHAT, ask(stream=stream)) as visitor:
                await gateway.queued(1)
                left = await visitor.leave()
                record = await gateway.record(outcome="client_gone")
                table.add("queued in the gateway (record written)", trio.current_time() - left, record)
            assert record.get("reclaimed_by") in (None, "none")
            seen = first.got.count(b"data: ")
            await first.until(b"data: ", seen + 5)
            assert (await vllm.now()).load == 1
        await vllm.makes_no_more_than(3, ask(stream=False))
    assert vllm.taken == taken + 2  # the first one, and the three tokens


@pytest.mark.parametrize("turn", range(4))
async def test_others_go_on(vllm: Vllm, table: Table, turn: int) -> None:
    async with running_gateway(vllm.entry(), seconds=TEST_SECONDS) as gateway:
        async with AsyncExitStack() as stack:
            others = [await stack.enter_async_context(http1(gateway.url)) for _ in range(SEQUENCES - 1)]
            for other in others:
                await other.post(CHAT, ask(stream=True, max_tokens=WHOLE))
                await other.head()
                await other.until(b"data: ", 2)
            async with visit("fin", gateway.url, CHAT, ask(stream=True)) as visitor:
                await visitor.head()
                await visitor.until(b"data: ", 3)
                await vllm.until(lambda gauges: gauges.running == SEQUENCES)
                await some_time()
                left = await visitor.leave()
                gauges, seconds = await load_falls(vllm, len(others), left)
            assert gauges.running == len(others)
            for other in others:
                await ends_whole(other, WHOLE)
        record = await gateway.record(outcome="client_gone")
        table.add(f"stream, {len(others)} others go on", seconds, record)
        proven(record)
        await gateway.recorded(len(others), outcome="completed")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("leaver", "stayer"), [("call", "call-0"), ("call-0", "call"), ("call", "call"), ("call", "call-0-1")]
)
async def test_only_the_leaver_of_two_whose_ids_are_alike(
    vllm: Vllm, table: Table, path: str, leaver: str, stayer: str
) -> None:
    """An engine names its work after X-Request-Id; vLLM stops all that has the name it is told to stop."""
    async with running_gateway(vllm.entry(), seconds=TEST_SECONDS) as gateway:
        async with http1(gateway.url) as stays, http1(gateway.url) as goes:
            for client, name, tokens in ((stays, stayer, WHOLE), (goes, leaver, 3000)):
                body = ask(path, stream=True, max_tokens=tokens)
                await client.post(path, body, {"X-Request-Id": name})
                assert (await client.head())["x-request-id"] == name
                await client.until(b"data: ", 2)
            await vllm.until(lambda gauges: gauges.running == 2)
            left = trio.current_time()
            await goes.close()
            gauges, seconds = await load_falls(vllm, 1, left)
            assert gauges.running == 1
            await ends_whole(stays, WHOLE)
        record = await gateway.record(outcome="client_gone", caller_id=leaver)
        table.add("one of two whose ids are alike", seconds, record)
        proven(record)
        await gateway.record(outcome="completed", caller_id=stayer)
        await vllm.makes_no_more_than(3, ask(stream=False))
