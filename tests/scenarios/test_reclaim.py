"""The slot of a request that was cut short is free when its engine has stopped, and not before.

Times are real here and margins wide; the arithmetic is tested in tests/test_evidence.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import http1
from tests.support.routes import CHAT, COMPLETIONS
from tests.support.scripted import Call, Script, ScriptedEngine, deaf_port
from tests.support.scripts import Ending, Status, Stream, Whole, honest, never_answers
from tests.support.visitors import visit

GOES_ON = 0.6
BOUND = 1.0  # the least that vLLM may have


def lingering(seconds: float = GOES_ON, **more: Any) -> Stream:
    return Stream(tokens=1000, gap=0.01, goes_on_for=seconds, **more)


def vllm(script: Script, *, slots: int = 1) -> ScriptedEngine:
    return ScriptedEngine(script, slots=slots, kind="vllm")


async def leave_after_a_token(gateway: Gateway, engine: ScriptedEngine, nth: int = 0) -> float:
    """Come, be answered, and leave; returns when."""
    async with http1(gateway.url) as client:
        await client.post(CHAT.path, CHAT.payload(stream=True))
        await (await engine.call(nth)).made(2)
        await client.head()
        return trio.current_time()


async def ask(gateway: Gateway) -> int:
    async with http1(gateway.url) as client:
        return (await client.ask(CHAT.path, CHAT.payload(stream=False))).status


@pytest.mark.parametrize("phase", ["decode", "prefill", "whole"])
async def test_next_request_waits_for_the_engine(phase: str) -> None:
    engine = vllm(honest)
    scripts: dict[str, Script] = {
        "decode": lingering(),
        "prefill": Stream(prefill=trio.Event(), goes_on_for=GOES_ON),
        "whole": Whole(takes=trio.Event(), goes_on_for=GOES_ON),
    }
    engine.plan = [scripts[phase]]
    async with running_gateway(engine, engine={"reclaim_seconds": 10}) as gateway:
        async with http1(gateway.url) as client:
            await client.post(CHAT.path, CHAT.payload(stream=phase != "whole"))
            call = await engine.call()
            if phase == "decode":
                await call.made(2)
        assert await ask(gateway) == 200
        assert call.finished_at is not None
        assert engine.calls[1].arrived >= call.finished_at
        record = await gateway.record(outcome="client_gone")
        assert record["reclaimed_by"] == "engine_idle"
        assert GOES_ON * 900 <= record["reclaim_ms"] < GOES_ON * 1000 + 2000
        assert record["teardown_ms"] < 200, "the request itself doesn't wait"
        assert (await gateway.metrics())['gateway_reclaim_seconds_count{engine="engine"}'] == 1


async def test_while_it_is_reclaimed_the_slot_is_seen_to_be() -> None:
    engine = vllm(lingering())
    async with running_gateway(engine) as gateway:
        await leave_after_a_token(gateway, engine)
        await gateway.live(0)
        ledger = (await gateway.ledger())["engines"]["engine"]
        assert (ledger["running"], ledger["reclaiming"], ledger["free"]) == (0, 1, 0)
        metrics = await gateway.metrics()
        assert metrics['gateway_slots{engine="engine",state="reclaiming"}'] == 1
        assert not gateway.records, "it is written when it is known what became of the slot"


@pytest.mark.parametrize(("mode", "by"), [("observe", "engine_idle"), ("off", "none")])
async def test_who_does_not_enforce_frees_at_the_close(mode: str, by: str) -> None:
    engine = vllm(honest, slots=2)
    engine.plan = [lingering()]
    async with running_gateway(engine, engine={"reclaim": mode, "slots": 1}) as gateway:
        await leave_after_a_token(gateway, engine)
        assert await ask(gateway) == 200
        assert engine.calls[0].finished_at is None, "the first one is still at it"
        record = await gateway.record(outcome="client_gone")
        assert record["reclaimed_by"] == by
        if mode == "observe":
            assert GOES_ON * 900 <= record["reclaim_ms"] < GOES_ON * 1000 + 2000
            sum_of = (await gateway.metrics())['gateway_reclaim_seconds_sum{engine="engine"}']
            assert sum_of == pytest.approx(record["reclaim_ms"] / 1000, abs=0.01)


async def test_one_that_goes_on_for_ever_is_a_ghost_until_the_engine_is_idle() -> None:
    engine = vllm(honest, slots=2)
    engine.plan = [lingering(1000)]
    async with running_gateway(engine, engine={"reclaim_seconds": BOUND}) as gateway:
        left = await leave_after_a_token(gateway, engine)
        record = await gateway.record(outcome="client_gone")
        assert trio.current_time() - left >= BOUND
        assert (record["reclaimed_by"], record["reclaim_ms"]) == ("none", None)
        metrics = await gateway.metrics()
        assert metrics['gateway_ghosts{engine="engine"}'] == 1
        assert metrics['gateway_slots{engine="engine",state="ghost"}'] == 1
        assert await ask(gateway) == 200, "the other slot works"
        engine.calls[0].done()
        await gateway.idle()
        assert (await gateway.metrics())['gateway_ghost_seconds_total{engine="engine"}'] > 0


async def test_all_slots_but_one_can_be_ghosts() -> None:
    engine = vllm(honest, slots=5)
    engine.plan = [lingering(1000) for _ in range(3)]
    async with running_gateway(engine, engine={"reclaim_seconds": BOUND, "slots": 3}) as gateway:
        async with trio.open_nursery() as nursery:
            for nth in range(3):
                nursery.start_soon(leave_after_a_token, gateway, engine, nth)
        await gateway.recorded(3, outcome="client_gone")
        ledger = (await gateway.ledger())["engines"]["engine"]
        assert (ledger["ghosts"], ledger["free"]) == (2, 1)
        assert sorted(record["reclaimed_by"] for record in gateway.records) == ["bound", "none", "none"]
        for call in engine.calls:
            call.done()


async def hangs(call: Call) -> None:
    await call.closed()


GARBAGE = b"\xff\x00 not metrics\nvllm:num_requests_running NaN\nvllm:num_requests_waiting -3\n"


@pytest.mark.parametrize(
    "says",
    [
        hangs,
        Whole(body=GARBAGE),
        Whole(body=b""),
        Whole(body=b"{" * 100_000),
        Status(500),
        Status(404),
        Whole(body=b"vllm:num_requests_running 3\n"),
    ],
    ids=["hangs", "garbage", "nothing", "braces", "500", "404", "half"],
)
async def test_engine_that_cannot_be_asked_is_free_at_the_bound(says: Script) -> None:
    engine = vllm(honest, slots=2)
    engine.plan = [lingering(1000)]
    engine.pages["/metrics"] = says
    async with running_gateway(engine, engine={"reclaim_seconds": BOUND, "slots": 1}) as gateway:
        left = await leave_after_a_token(gateway, engine)
        assert await ask(gateway) == 200
        assert BOUND <= engine.calls[1].arrived - left < BOUND + 1
        record = await gateway.record(outcome="client_gone")
        assert record["reclaimed_by"] == "bound"
        assert record["reclaim_ms"] == pytest.approx(BOUND * 1000, abs=500)
        engine.calls[0].done()


async def test_what_the_engine_refused_or_has_ended_is_not_reclaimed() -> None:
    engine = vllm(honest)
    engine.plan = [Status(503), Stream(tokens=2, ending=Ending.HELD)]
    engine.pages["/metrics"] = hangs  # whatever is reclaimed takes its time
    async with running_gateway(engine, engine={"reclaim_seconds": 10}) as gateway:
        assert await ask(gateway) == 503
        async with http1(gateway.url) as client:
            await client.post(CHAT.path, CHAT.payload(stream=True))
            await client.head()
            await client.until(b"[DONE]")
        assert await ask(gateway) == 200
        await gateway.recorded(3)
        assert {record["reclaimed_by"] for record in gateway.records} == {None}


async def test_what_was_not_written_is_not_reclaimed() -> None:
    with deaf_port() as port:
        entry = {
            "name": "deaf",
            "kind": "vllm",
            "url": f"http://127.0.0.1:{port}",
            "slots": 1,
            "models": ["model"],
        }
        async with running_gateway(entry) as gateway:
            async with visit("fin", gateway.url, CHAT.path, CHAT.payload(stream=True)) as visitor:
                await gateway.in_phase("connecting")
                await visitor.leave()
            record = await gateway.record(outcome="client_gone")
            assert (record["phase"], record["reclaimed_by"]) == ("connecting", None)


async def test_engine_that_is_gone_has_stopped() -> None:
    engine = vllm(lingering(1000))
    async with running_gateway(engine, engine={"reclaim_seconds": 10}) as gateway:
        await leave_after_a_token(gateway, engine)
        await gateway.live(0)
        await engine.stop()
        assert (await gateway.record(outcome="client_gone"))["reclaimed_by"] == "engine_idle"


async def test_engine_started_anew_has_none_of_the_old() -> None:
    started = 1000.0

    async def says(call: Call) -> None:
        gauges = "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"
        await Whole(body=f"{gauges}process_start_time_seconds {started}\n".encode())(call)

    engine = vllm(honest, slots=3)
    engine.plan = [lingering(1000)]
    engine.pages["/metrics"] = says
    async with running_gateway(engine, engine={"reclaim_seconds": BOUND, "slots": 2}) as gateway:
        await leave_after_a_token(gateway, engine)
        await gateway.record(reclaimed_by="none")
        assert (await gateway.ledger())["engines"]["engine"]["ghosts"] == 1
        started = 2000.0
        engine.calls[0].done()


async def test_load_that_is_not_ours_ends_the_waiting() -> None:
    others = 2

    async def says(call: Call) -> None:
        running = call.engine.running + others
        await Whole(body=f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\n".encode())(call)

    engine = vllm(honest, slots=2)
    engine.plan = [lingering()]
    engine.pages["/metrics"] = says
    async with running_gateway(engine, engine={"slots": 1}) as gateway:
        await until_metric(gateway, 'gateway_foreign_sequences{engine="engine"}', lambda value: value == 2)
        await leave_after_a_token(gateway, engine)
        assert await ask(gateway) == 200
        assert engine.calls[0].finished_at is None


async def until_metric(gateway: Gateway, name: str, true: Callable[[float], bool]) -> None:
    with trio.fail_after(5):
        while not true((await gateway.metrics())[name]):  # noqa: ASYNC110 - it wakes nobody
            await trio.sleep(0.02)


async def test_drain_leaves_a_second_for_it() -> None:
    engine = vllm(lingering(1000))
    async with running_gateway(engine, engine={"reclaim_seconds": 100}) as gateway:
        await leave_after_a_token(gateway, engine)
        await gateway.live(0)
        begun = trio.current_time()
        gateway.service.drain()
        await gateway.ended.wait()
        assert 0.9 <= trio.current_time() - begun < 3
        assert [record["reclaimed_by"] for record in gateway.records] == [None], "it isn't known"


async def test_stop_and_clock_are_reclaimed_too() -> None:
    engine = vllm(honest)
    engine.plan = [lingering(), Stream(tokens=2, pause_after=2, until=trio.Event(), goes_on_for=GOES_ON)]
    async with running_gateway(engine, stream={"idle_seconds": 0.2}) as gateway:
        async with http1(gateway.url) as client:
            await client.post(CHAT.path, CHAT.payload(stream=True))
            await (await engine.call()).made(2)
            (live,) = await gateway.requests()
            await gateway.admin(f"/admin/requests/{live['id']}", "DELETE")
            await client.eof()
        async with http1(gateway.url) as client:
            await client.post(CHAT.path, CHAT.payload(stream=True))
            await client.head()
            await client.eof()
        for outcome in ("cancelled", "engine_timeout"):
            assert (await gateway.record(outcome=outcome))["reclaimed_by"] == "engine_idle"


# Aborts by id.


async def test_vllm_is_told_by_id_where_it_has_a_page_for_it() -> None:
    engine = vllm(never_answers, slots=2)
    engine.pages = {
        "/openapi.json": Whole(body=b'{"paths":{"/inference/v1/abort_requests":{},"/abort_requests":{}}}'),
        "/inference/v1/abort_requests": Status(403),
        "/abort_requests": Whole(body=b"{}"),
    }
    async with running_gateway(engine, engine={"slots": 2}) as gateway:
        await engine.until(lambda: "/openapi.json" in engine.probes)
        async with http1(gateway.url) as stays:
            await stays.post(CHAT.path, CHAT.payload(stream=True), headers={"X-Request-Id": "abc"})
            await engine.call(0)
            async with http1(gateway.url) as leaves:
                await leaves.post(
                    COMPLETIONS.path, COMPLETIONS.payload(stream=True), headers={"X-Request-Id": "abcd"}
                )
                left = await engine.call(1)
            await engine.until(lambda: "/abort_requests" in engine.probes)
            told = [call for call in engine.asked if call.path == "/abort_requests"]
            assert [call.json for call in told] == [
                {"request_ids": [f"cmpl-{left.header('x-request-id')}-0"]}
            ]
            assert engine.calls[0].closed_at is None


async def test_sglang_runs_requests_under_our_id_and_is_told_it() -> None:
    engine = ScriptedEngine(never_answers, slots=2, kind="sglang")
    engine.pages = {"/abort_request": Whole(body=b"{}"), "/metrics": hangs}
    async with running_gateway(engine, engine={"reclaim": "off"}) as gateway, http1(gateway.url) as stays:
        await stays.post(CHAT.path, CHAT.payload(stream=True, rid="abc"))
        first = await engine.call(0)
        async with http1(gateway.url) as leaves:
            await leaves.post(CHAT.path, CHAT.payload(stream=True, rid="abcd"))
            second = await engine.call(1)
        await engine.until(lambda: "/abort_request" in engine.probes)
        (told,) = [call for call in engine.asked if call.path == "/abort_request"]
        assert told.json == {"rid": second.json["rid"]}
        assert second.json["rid"] == second.header("x-request-id")
        assert not first.json["rid"].startswith(second.json["rid"])
        assert {**second.json, "rid": "abcd"} == CHAT.payload(stream=True, rid="abcd")
        assert trio.current_time() - told.arrived < 5
        assert first.closed_at is None


async def test_ollama_has_its_grace() -> None:
    """It can't be asked, and stops in a moment or not at all."""
    engine = ScriptedEngine(Whole(takes=trio.Event(), goes_on_for=0.3), slots=1, kind="ollama")
    payload = {"model": "model", "messages": [], "stream": False}
    async with running_gateway(engine, engine={"reclaim_seconds": 1}) as gateway:
        async with http1(gateway.url) as client:
            await client.post("/api/chat", payload)
            call = await engine.call()
        await call.closed()
        record = await gateway.record(outcome="client_gone")
        assert (record["reclaimed_by"], record["reclaim_ms"]) == ("bound", pytest.approx(1000, abs=500))
