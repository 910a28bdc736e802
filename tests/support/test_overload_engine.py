"""The overload engine by itself: when it dies, what it goes on with, and what it says of itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from overload.answers import MODEL, text_of
from overload.answers import metrics as render
from overload.display import Reading
from overload.engine import OverloadEngine
from overload.gpu import Gpu, OutOfMemory, Sequence, Settings
from overload.storm import Plan
from trio.testing import MockClock

from tests.support.gateway import running_gateway
from tests.support.http1 import Http1, Truncated, http1
from tests.support.overload import overload_engine, overload_entry, storm
from tests.support.process import ROOT, free_ports
from tests.support.real_engine import events_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STEP = 0.002


def chat(tokens: int, *, prompt: int = 16, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "word " * prompt}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, **more}


async def metrics(engine: OverloadEngine) -> dict[str, float]:
    """By name, without the labels."""
    async with http1(engine.url) as client:
        text = (await client.ask("/metrics")).body.decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.partition("{")[0].split(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@asynccontextmanager
async def leaver(engine: OverloadEngine, tokens: int = 1000, **more: Any) -> AsyncIterator[Http1]:
    """One that reads a token of its stream, and has left at the end of the block."""
    async with http1(engine.url) as client:
        await client.post(CHAT, chat(tokens, stream=True, **more))
        await client.head()
        await client.until(b'"content":"0 "')
        yield client


# The GPU alone, on a clock that jumps.


@asynccontextmanager
async def running_gpu(**settings: Any) -> AsyncIterator[Gpu]:
    gpu = Gpu(Settings(step_seconds=1.0, **settings))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gpu.run)
        yield gpu
        nursery.cancel_scope.cancel()


async def finished(sequence: Sequence) -> None:
    await sequence.more_than(sequence.most)


async def test_what_fits_exactly_lives(autojump_clock: MockClock) -> None:
    async with running_gpu(blocks=6) as gpu:
        for _ in range(3):  # blocks come back
            for sequence in [gpu.start(16, 16) for _ in range(3)]:
                await finished(sequence)
        assert (gpu.used, gpu.counters.peak_blocks, gpu.counters.peak_running) == (0, 6, 3)
        assert (gpu.counters.finished, gpu.counters.stopped, gpu.counters.generated) == (9, 0, 9 * 16)


async def test_one_block_more_is_its_death(autojump_clock: MockClock) -> None:
    with pytest.RaisesGroup(OutOfMemory):
        async with running_gpu(blocks=5) as gpu:
            for sequence in [gpu.start(16, 16) for _ in range(3)]:
                await finished(sequence)


async def test_a_sequence_takes_blocks_as_it_grows(autojump_clock: MockClock) -> None:
    async with running_gpu(blocks=9) as gpu:
        sequence = gpu.start(30, 40)
        assert (len(gpu.waiting), gpu.used) == (1, 0)
        held = []
        while not sequence.over:
            await sequence.more_than(sequence.made)
            held.append((sequence.made, gpu.used))
    assert held == [(made, -(-(30 + made) // 16)) for made in range(1, 40)] + [(40, 0)]


async def test_a_growing_sequence_kills_it_too(autojump_clock: MockClock) -> None:
    with pytest.RaisesGroup(OutOfMemory):
        async with running_gpu(blocks=2) as gpu:
            await finished(sequence := gpu.start(16, 17))
    assert sequence.made == 17  # the block for the 33rd token wasn't there


@pytest.mark.parametrize("linger", [0.0, 5.0])
async def test_a_left_sequence_goes_on_for_so_long(linger: float, autojump_clock: MockClock) -> None:
    async with running_gpu(blocks=9, linger_seconds=linger) as gpu:
        sequence = gpu.start(16, 100)
        made = await sequence.more_than(2)
        sequence.leave()
        sequence.leave()  # once is enough
        assert gpu.left_behind == [sequence]
        left_at = trio.current_time()
        await gpu.until_stopped(1)
        assert linger <= trio.current_time() - left_at <= linger + 1
        assert sequence.made - made == max(0, linger - 1)
        assert (gpu.used, gpu.running, gpu.left_behind, gpu.counters.finished) == (0, [], [], 0)


async def test_a_left_sequence_may_finish_before_it_is_stopped(autojump_clock: MockClock) -> None:
    async with running_gpu(blocks=9, linger_seconds=50) as gpu:
        sequence = gpu.start(16, 10)
        sequence.leave()
        await finished(sequence)
        assert (gpu.used, gpu.counters.finished, gpu.counters.stopped) == (0, 1, 0)


async def test_what_was_left_counts_until_it_stops(autojump_clock: MockClock) -> None:
    async with running_gpu(blocks=5, linger_seconds=5) as gpu:
        gpu.start(32, 16)
        (left := gpu.start(16, 16)).leave()
        await gpu.until_stopped(1)
        await finished(gpu.start(16, 8))  # now there is room
        assert left.made < 16
    with pytest.RaisesGroup(OutOfMemory):
        async with running_gpu(blocks=5, linger_seconds=5) as gpu:
            gpu.start(32, 16)
            gpu.start(16, 16).leave()
            await finished(gpu.start(16, 8))


async def test_the_clock_stands_still_without_work(autojump_clock: MockClock) -> None:
    async with running_gpu(blocks=9) as gpu:
        await finished(gpu.start(16, 5))
        await trio.sleep(100)
        await finished(gpu.start(16, 5))
        assert gpu.counters.steps == 10


# Over HTTP.


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_has_each_token_once(path: str) -> None:
    async with overload_engine(step_seconds=STEP) as engine, http1(engine.url) as client:
        payload = chat(20, stream=True, stream_options={"include_usage": True})
        if path == COMPLETIONS:
            payload = {**payload, "prompt": "word " * 16}
            del payload["messages"]
        for _ in range(2):  # the connection is kept
            answer = await client.ask(path, payload)
            assert answer.head["content-type"].startswith("text/event-stream")
            assert answer.body.endswith(b"data: [DONE]\n\n")
            *events, usage = events_of(answer.body)
            pieces = [c["delta"]["content"] if path == CHAT else c["text"] for [c] in map(choices, events)]
            assert [piece for piece in pieces if piece] == [f"{n} " for n in range(20)]
            assert [c["finish_reason"] for [c] in map(choices, events)][-2:] == [None, "length"]
            assert usage["usage"] == {"prompt_tokens": 16, "completion_tokens": 20, "total_tokens": 36}
        assert engine.gpu.counters.generated == 40


def choices(event: Any) -> list[Any]:
    found: list[Any] = event["choices"]
    return found


async def test_whole_answers() -> None:
    async with overload_engine(step_seconds=STEP) as engine, http1(engine.url) as client:
        answer = await client.ask(CHAT, chat(12))
        assert answer.json["choices"][0]["message"]["content"] == text_of(12)
        answer = await client.ask(COMPLETIONS, {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 4})
        assert answer.json["choices"][0]["text"] == text_of(4)
        assert answer.json["usage"]["prompt_tokens"] == 3


async def test_pages_and_refusals() -> None:
    async with overload_engine(step_seconds=STEP) as engine, http1(engine.url) as client:
        assert (await client.ask("/health")).status == 200
        assert [model["id"] for model in (await client.ask("/v1/models")).json["data"]] == [MODEL]
        assert (await client.ask("/nowhere")).status == 404
        assert (await client.ask(CHAT, {**chat(1), "model": "other"})).status == 404
        assert (await client.ask(CHAT, b"{")).status == 400
        assert (await client.ask(CHAT, chat(-1))).status == 400
        assert engine.gpu.counters.started == 0


async def test_it_tells_what_it_does() -> None:
    async with overload_engine(step_seconds=STEP, blocks=200, linger_seconds=60) as engine:
        async with leaver(engine, 1500), leaver(engine, 1500):
            pass
        await engine.gpu.until(lambda: len(engine.gpu.left_behind) == 2)
        now = await metrics(engine)
        assert (now["vllm:num_requests_running"], now["vllm:num_requests_waiting"]) == (2, 0)
        assert now["overload:left_behind_sequences"] == 2
        assert 4 / 200 <= now["vllm:kv_cache_usage_perc"] <= engine.gpu.used / 200
        assert now["vllm:prompt_tokens_total"] == 32
        assert now["vllm:generation_tokens_total"] >= now["vllm:iteration_tokens_total_count"] > 0
        assert now["process_start_time_seconds"] > 1e9


@pytest.mark.parametrize("way", ["fin", "rst"])
async def test_it_goes_on_when_the_client_has_left(way: str) -> None:
    async with overload_engine(step_seconds=STEP, linger_seconds=0.1) as engine:
        async with leaver(engine) as client:
            sequence = engine.gpu.running[0]
            if way == "rst":
                await client.reset()
        made = sequence.made
        await engine.gpu.until_stopped(1)
        assert sequence.left_at is not None
        assert trio.current_time() - sequence.left_at >= 0.1
        assert sequence.made > made
        now = await metrics(engine)
        assert (now["vllm:num_requests_running"], now["vllm:kv_cache_usage_perc"]) == (0, 0)


async def test_it_goes_on_with_whole_answers_too() -> None:
    async with overload_engine(step_seconds=STEP, linger_seconds=0.05) as engine:
        async with http1(engine.url) as client:
            await client.post(CHAT, chat(5000))
            await engine.gpu.until(lambda: bool(engine.gpu.running))
        await engine.gpu.until(lambda: bool(engine.gpu.left_behind))
        await engine.gpu.until_stopped(1)


async def test_death_cuts_every_connection() -> None:
    async with overload_engine(step_seconds=STEP, blocks=10, dies=True) as engine:
        async with leaver(engine, 100) as client:
            async with http1(engine.url) as last:
                await last.post(CHAT, chat(100, prompt=200))
                assert await last.eof() == b""
            with pytest.raises(Truncated):
                await client.rest()
        await engine.dead.wait()
        assert "CUDA out of memory" in str(engine.death)
        with pytest.raises(OSError, match="refused"):
            async with http1(engine.url):
                pass


async def test_a_process_dies_with_status_1() -> None:
    [port] = free_ports(1)
    command = [sys.executable, "-m", "overload.engine", "--port", str(port), "--blocks", "8"]
    process = await trio.lowlevel.open_process(
        command, cwd=ROOT / "scripts", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        with trio.fail_after(20):
            assert b"listening" in await process.stdout.receive_some()
            async with http1(f"http://127.0.0.1:{port}") as client:
                await client.post(CHAT, chat(10, prompt=200))
                assert await client.eof() == b""
            assert b"torch.OutOfMemoryError: CUDA out of memory." in await process.stderr.receive_some()
            assert await process.wait() == 1
    finally:
        process.kill()
        await process.stdout.aclose()
        await process.stderr.aclose()
        await process.wait()


async def test_the_display_reads_what_the_engine_says(autojump_clock: MockClock) -> None:
    async with running_gpu(blocks=10, linger_seconds=50) as gpu:
        (left := gpu.start(16, 16)).leave()
        await left.more_than((other := gpu.start(16, 16)).made)
        read = Reading.parse(render(gpu).decode())
        assert (read.running, read.left_behind, read.peak_running) == (2, 1, 2)
        assert (read.usage, read.left_usage, read.peak_usage) == (0.4, 0.2, 0.4)
        await finished(other)
        gpu.start(16, 16)
        gpu.start(1600, 1)
        with pytest.raises(OutOfMemory) as death:
            gpu.step()
    read.died(str(death.value))
    assert (read.running, read.left_behind, read.usage) == (2, 0, 1.0)


# The storm.

ROOM = 8  # whole answers
PLAN = Plan(
    leavers=6, patient=2, prompt_tokens=64, answer_tokens=32, leave_after=(0.0, 0.03), ramp_seconds=0.02
)
GPU = Settings(blocks=ROOM * 6, step_seconds=STEP, linger_seconds=0.3)


async def test_as_many_as_fit_get_whole_answers() -> None:
    calm = Plan(leavers=0, patient=ROOM, prompt_tokens=64, answer_tokens=32, ramp_seconds=0.02)
    async with overload_engine(GPU) as engine:
        tally = await storm(engine.url, calm, seconds=0.3)
        assert tally.whole == tally.asked >= ROOM
        assert engine.gpu.counters.peak_blocks <= GPU.blocks


async def test_the_same_clients_kill_it_by_leaving() -> None:
    async with overload_engine(GPU, dies=True) as engine:
        tally = await storm(engine.url, PLAN, seconds=10, until=engine.dead)
        assert tally.aborted


async def test_they_kill_it_through_a_gateway_that_does_not_wait() -> None:
    async with (
        overload_engine(GPU, dies=True) as engine,
        running_gateway(overload_entry(engine, slots=ROOM, reclaim="off")) as gateway,
    ):
        await storm(gateway.url, PLAN, seconds=10, until=engine.dead)
