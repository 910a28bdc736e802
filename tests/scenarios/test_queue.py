"""More requests than slots: who waits, in which order, for how long, and what the refused are told."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import Answer, Http1, connect, http1
from tests.support.routes import CHAT, COMPLETIONS, EMBEDDINGS
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Stream, Whole, honest


@asynccontextmanager
async def waiting(gateway: Gateway, *users: str, **more: object) -> AsyncIterator[list[Http1]]:
    """Clients that queue one after the other."""
    clients: list[Http1] = []
    before = (await gateway.admin("/admin/requests")).json["queued"]
    try:
        for count, user in enumerate(users, before + 1):
            client = Http1(await connect(gateway.url))
            clients.append(client)
            await client.post(CHAT.path, CHAT.payload(stream=False, user=user, **more))
            await gateway.queued(count)
        yield clients
    finally:
        for client in clients:
            await client.close()


async def test_first_come_first_served() -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(honest, slots=1)
    engine.plan = [Whole(takes=go_on)]
    async with running_gateway(engine) as gateway, http1(gateway.url) as first:
        await first.post(CHAT.path, CHAT.payload(stream=False, user="a"))
        await engine.call()
        async with waiting(gateway, "b", "c", "d", "e") as clients:
            go_on.set()
            for client in [first, *clients]:
                assert (await client.answer()).status == 200
        await gateway.recorded(5, outcome="completed")
    assert [call.json["user"] for call in engine.calls] == ["a", "b", "c", "d", "e"]
    assert engine.peak == 1


async def test_queue_wait_is_in_the_record() -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(honest, slots=1)
    engine.plan = [Whole(takes=go_on)]
    async with running_gateway(engine) as gateway, http1(gateway.url) as first:
        await first.post(CHAT.path, CHAT.payload(stream=False, user="a"))
        await engine.call()
        async with waiting(gateway, "b") as (second,):
            since = trio.current_time()
            go_on.set()
            await second.answer()
            waited = (trio.current_time() - since) * 1000
        await gateway.recorded(2, outcome="completed")
        first_record, second_record = gateway.records
        assert second_record["queue_ms"] > 0
        assert first_record["queue_ms"] < 100
        assert second_record["duration_ms"] >= second_record["queue_ms"]
        assert waited < 1000


@pytest.mark.parametrize("length", [0, 1])
async def test_full_queue_refuses_at_once(length: int) -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(honest, slots=1)
    engine.plan = [Whole(takes=go_on)]
    async with running_gateway(engine, admission={"queue": length}) as gateway, http1(gateway.url) as first:
        await first.post(CHAT.path, CHAT.payload(stream=False))
        await engine.call()
        async with waiting(gateway, *["b"][:length]) as clients, http1(gateway.url) as late:
            answer = await late.ask(CHAT.path, CHAT.payload(stream=False))
            assert (answer.status, answer.json["error"]["code"]) == (429, "queue_full")
            assert int(answer.head["retry-after"]) > 0
            await gateway.record(outcome="shed", status=429, code="queue_full", engine=None)
            go_on.set()
            for client in [first, *clients]:
                assert (await client.answer()).status == 200
            again = await late.ask(CHAT.path, CHAT.payload(stream=False))
            assert again.status == 200
        metrics = await gateway.metrics()
        shed = [
            name
            for name, value in metrics.items()
            if "requests_total" in name and 'outcome="shed"' in name and value
        ]
        assert len(shed) == 1
    assert len(engine.calls) == length + 2


async def test_who_waits_too_long_is_told() -> None:
    engine = ScriptedEngine(Stream(pause_after=1, until=trio.Event()), slots=1)
    async with (
        running_gateway(engine, admission={"queue_seconds": 0.2}) as gateway,
        http1(gateway.url) as first,
    ):
        await first.post(CHAT.path, CHAT.payload(stream=True))
        await engine.call()
        async with http1(gateway.url) as second:
            since = trio.current_time()
            answer = await second.ask(CHAT.path, CHAT.payload(stream=True))
            assert 0.2 <= trio.current_time() - since < 2
        assert (answer.status, answer.json["error"]["code"]) == (503, "queue_timeout")
        assert int(answer.head["retry-after"]) > 0
        await gateway.record(outcome="shed", status=503, code="queue_timeout", phase="queued")
        assert (await gateway.metrics())["gateway_queue_depth"] == 0
    assert len(engine.calls) == 1


async def test_a_freed_slot_starts_exactly_one() -> None:
    engine = ScriptedEngine(honest, slots=2)
    steps = [trio.Event() for _ in range(6)]
    engine.plan = [Whole(takes=step) for step in steps]
    async with running_gateway(engine) as gateway, trio.open_nursery() as nursery:
        for i in range(6):
            nursery.start_soon(_ask, gateway, f"{i}")
        await gateway.queued(4)
        for done, step in enumerate(steps, 1):
            assert engine.running == 2 if done <= 5 else 1
            step.set()
            await gateway.recorded(done, outcome="completed")
            if done <= 4:
                await engine.call(done + 1)
                assert len(engine.calls) == done + 2
    assert engine.peak == 2


async def _ask(gateway: Gateway, user: str) -> Answer:
    async with http1(gateway.url) as client:
        return await client.ask(CHAT.path, CHAT.payload(stream=False, user=user))


async def test_capacity_is_exact_after_a_thousand_short_requests_with_random_departures() -> None:
    """A hundred clients, ten slots; each leaves at a random moment or stays."""
    dice = random.Random(7)
    engine = ScriptedEngine(Stream(tokens=3, gap=0.001), slots=10)

    async def visitor() -> None:
        for _ in range(10):
            async with http1(gateway.url) as client:
                await client.post(CHAT.path, CHAT.payload(stream=True))
                with trio.move_on_after(dice.choice([0.0, 0.01, 0.05, 0.2, 10.0])):
                    await client.answer()

    async with running_gateway(engine, seconds=60) as gateway:
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(visitor)
        await gateway.live(0)
        assert len(engine.calls) > 100
        assert {record["outcome"] for record in gateway.records} <= {"completed", "client_gone"}
        assert engine.peak <= 10
        # And now all ten at once, none waiting.
        go_on = trio.Event()
        engine.script = Whole(takes=go_on)
        before = len(engine.calls)
        async with trio.open_nursery() as nursery:
            for _ in range(11):
                nursery.start_soon(_ask, gateway, "after")
            await engine.call(before + 9)
            await gateway.queued(1)
            assert engine.running == 10
            go_on.set()


async def test_a_request_takes_as_many_slots_as_it_makes_sequences() -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(honest, slots=4)
    engine.plan = [Whole(takes=go_on), Whole(takes=go_on)]
    async with running_gateway(engine) as gateway, http1(gateway.url) as one, http1(gateway.url) as two:
        await one.post(CHAT.path, CHAT.payload(stream=False, n=2))
        await engine.call()
        assert (await gateway.ledger())["engines"]["engine"]["running"] == 2
        await two.post(COMPLETIONS.path, {"model": "model", "prompt": ["a", "b"]})
        await engine.call(1)
        assert (await gateway.ledger())["engines"]["engine"]["free"] == 0
        async with waiting(gateway, "big", n=3) as (big,), waiting(gateway, "small") as (small,):
            go_on.set()
            for client in (one, two, big, small):
                assert (await client.answer()).status == 200
    assert [call.weight for call in engine.calls[:2]] == [2, 2]
    assert engine.peak == 4


async def test_a_small_request_does_not_overtake_a_big_one_that_waits() -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(honest, slots=2)
    engine.plan = [Whole(takes=go_on)]
    async with running_gateway(engine) as gateway, http1(gateway.url) as first:
        await first.post(CHAT.path, CHAT.payload(stream=False, user="first"))
        await engine.call()
        async with waiting(gateway, "big", n=2) as (big,), waiting(gateway, "small") as (small,):
            go_on.set()
            for client in (first, big, small):
                assert (await client.answer()).status == 200
    assert [call.json["user"] for call in engine.calls] == ["first", "big", "small"]
    assert engine.peak == 2


@pytest.mark.parametrize(
    "asked", [{"n": 5}, {"best_of": 5}, {"prompt": ["x"] * 5}, {"n": 2, "prompt": ["x"] * 3}]
)
async def test_a_request_that_could_never_fit_is_refused(asked: dict[str, object]) -> None:
    engine = ScriptedEngine(honest, slots=4)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        answer = await client.ask(COMPLETIONS.path, {**COMPLETIONS.payload(stream=False), **asked})
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request")
        await gateway.record(outcome="rejected", status=400, code="invalid_request")
    assert engine.calls == []


async def test_a_free_engine_with_the_fewest_running_is_picked() -> None:
    go_on = trio.Event()
    engines = [ScriptedEngine(Whole(takes=go_on), slots=2, name=name) for name in ("left", "right")]
    async with running_gateway(*engines) as gateway:
        async with trio.open_nursery() as nursery:
            for count in range(1, 5):
                nursery.start_soon(_ask, gateway, str(count))
                await _running(engines, count)
                assert abs(engines[0].running - engines[1].running) <= 1
            go_on.set()
        await gateway.recorded(4, outcome="completed")
    assert [engine.peak for engine in engines] == [2, 2]


async def _running(engines: list[ScriptedEngine], count: int) -> None:
    async with trio.open_nursery() as nursery:

        async def watch(engine: ScriptedEngine) -> None:
            await engine.until(lambda: sum(e.running for e in engines) >= count)
            nursery.cancel_scope.cancel()

        for engine in engines:
            nursery.start_soon(watch, engine)


async def test_only_engines_that_serve_the_model_are_asked() -> None:
    small = ScriptedEngine(honest, name="small", models=("small",))
    large = ScriptedEngine(honest, name="large", models=("large", "embedder"))
    async with running_gateway(small, large) as gateway, http1(gateway.url) as client:
        await client.ask(CHAT.path, {**CHAT.payload(stream=False), "model": "large"})
        await client.ask(EMBEDDINGS.path, {**EMBEDDINGS.payload(stream=False), "model": "embedder"})
        answer = await client.ask(CHAT.path, {**CHAT.payload(stream=False), "model": "other"})
        assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")
        models = await client.ask("/v1/models")
        assert {entry["id"] for entry in models.json["data"]} == {"small", "large", "embedder"}
        one = await client.ask("/v1/models/large")
        assert one.json["id"] == "large"
        assert (await client.ask("/v1/models/other")).status == 404
        tags = await client.ask("/api/tags")
        assert {entry["name"] for entry in tags.json["models"]} >= {"small", "large"}
    assert (len(small.calls), len(large.calls)) == (0, 2)
