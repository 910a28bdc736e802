"""Who waits while engines fail, come back, shrink or learn: where they go, what they are told."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import trio

from gateway.tenants import digest_of
from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import Answer, Truncated, http1
from tests.support.routes import CHAT, DONE
from tests.support.scripted import Call, ScriptedEngine
from tests.support.scripts import End, Raw, Sse, Status, Stream, Whole, honest

ERROR = b'data: {"error":{"message":"out of memory","code":500}}\n\n'
CHAT_FALLS_BACK = {"model": "chat", "to": [{"model": "ma"}], "fallbacks": ["mb"]}


async def ask(gateway: Gateway, stream: bool = False, model: str = "model", **more: Any) -> Answer:
    headers = more.pop("headers", None)
    async with http1(gateway.url) as client:
        payload = {**CHAT.payload(stream=stream, **more), "model": model}
        return await client.ask(CHAT.path, payload, headers=headers)


class Crowd:
    """Clients that ask at the same time."""

    def __init__(self, gateway: Gateway, nursery: trio.Nursery) -> None:
        self.gateway, self.nursery = gateway, nursery
        self.answers: list[Answer] = []

    def come(self, count: int = 1, **asked: Any) -> None:
        for _ in range(count):
            self.nursery.start_soon(self._one, asked)

    async def _one(self, asked: dict[str, Any]) -> None:
        with suppress(Truncated, trio.BrokenResourceError):  # Its engine has died in the middle.
            self.answers.append(await ask(self.gateway, **asked))

    @property
    def statuses(self) -> Counter[int]:
        return Counter(answer.status for answer in self.answers)


async def admin(gateway: Gateway, name: str, verb: str) -> None:
    assert (await gateway.admin(f"/admin/engines/{name}/{verb}", "POST")).status == 200


async def state(gateway: Gateway, name: str) -> Any:
    return (await gateway.admin("/admin/engines")).json["engines"][name]["state"]


def two(a: Any = honest, b: Any = honest, **more: Any) -> tuple[ScriptedEngine, ScriptedEngine]:
    slots = more.pop("slots", (4, 4))
    models = more.pop("models", ("model", "model"))
    first = ScriptedEngine(a, name="a", slots=slots[0], models=(models[0],), **more)
    return first, ScriptedEngine(b, name="b", slots=slots[1], models=(models[1],), **more)


# ------------------------------------------------------------------ who waits goes elsewhere


@pytest.mark.parametrize("floor", [0, 50])
async def test_who_waits_for_an_engine_that_dies_goes_to_the_fallback(floor: int) -> None:
    hold = trio.Event()
    a, b = two(Stream(tokens=2, pause_after=1, until=hold), slots=(1, 4), models=("ma", "mb"))
    health, retry = {"backoff_seconds": 30}, {"floor": floor}
    async with (
        running_gateway(a, b, routes=[CHAT_FALLS_BACK], health=health, retry=retry) as gateway,
        trio.open_nursery() as nursery,
    ):
        crowd = Crowd(gateway, nursery)
        crowd.come(model="chat", stream=True)
        await (await a.call(0)).made(1)
        crowd.come(100, model="chat")
        await gateway.queued(100)
        await a.stop()
    assert crowd.statuses == {200: 100}


async def test_who_waits_for_the_fallback_goes_to_the_first_choice_when_it_is_back() -> None:
    go = trio.Event()
    a, b = two(Status(503), Whole(takes=go), slots=(1, 1), models=("ma", "mb"))
    health = {"failures": 1, "backoff_seconds": 0.2}
    async with (
        running_gateway(a, b, routes=[CHAT_FALLS_BACK], health=health) as gateway,
        trio.open_nursery() as nursery,
    ):
        crowd = Crowd(gateway, nursery)
        crowd.come(model="chat")
        await b.call(0)
        a.script = honest
        crowd.come(model="chat")
        await a.call(1)
        await gateway.recorded(1, engine="a")
        go.set()
    assert crowd.statuses == {200: 2}


async def test_models_that_are_learnt_are_for_who_waits_too() -> None:
    go = trio.Event()
    a, b = two(Whole(takes=go), slots=(1, 1), models=("model", "other"))
    async with running_gateway(a, b, engine={"models": ["auto"]}) as gateway, trio.open_nursery() as nursery:
        crowd = Crowd(gateway, nursery)
        crowd.come()
        await a.call(0)
        crowd.come()
        await gateway.queued(1)
        b.models = ("model",)
        fleet = gateway.service.reloader._fleet
        await fleet.learn(gateway.service.gateway.engines[1])
        await b.call(0)
        go.set()


async def test_an_engine_that_is_late_is_asked_for_its_models_once_it_is_there() -> None:
    a = ScriptedEngine(honest, name="a")
    listed = a.pages["/v1/models"] = Status(503)
    async with running_gateway(a, engine={"models": ["auto"]}, health={"probe_seconds": 0.05}) as gateway:
        assert (await ask(gateway)).status == 404
        assert listed is a.pages.pop("/v1/models")
        await gateway.engine("a", lambda each: each["models"] == ["model"])
        assert (await ask(gateway)).status == 200


# ------------------------------------------------------------------ what became smaller meanwhile


async def test_a_retry_does_not_wait_for_an_engine_that_has_become_too_small() -> None:
    go = trio.Event()
    a, b = two(Status(503, takes=go), slots=(2, 2))
    async with running_gateway(a, b) as gateway, trio.open_nursery() as nursery:
        crowd = Crowd(gateway, nursery)
        crowd.come(n=2)
        await a.call(0)
        gateway.engines[1]["slots"] = 1
        assert (await gateway.reload()).status == 200
        await admin(gateway, "a", "drain")
        go.set()
        await gateway.recorded(1)
        assert (await ask(gateway)).status == 200
    assert crowd.statuses == {503: 1}, "the engine's own answer"


@pytest.mark.parametrize("which", ["engine", "tenant"])
async def test_who_waits_and_can_never_be_held_any_more_is_told_why(which: str) -> None:
    go = trio.Event()
    engine = ScriptedEngine(Whole(takes=go), slots=2, name="a")
    tenant = {"name": "t", "keys": [digest_of("sk-t")], "slots": 2}
    mine = {"x-api-key": "sk-t"}
    async with running_gateway(engine, tenants=[tenant]) as gateway, trio.open_nursery() as nursery:
        crowd = Crowd(gateway, nursery)
        crowd.come(headers=mine)
        await engine.call(0)
        crowd.come(n=2, headers=mine)
        await gateway.queued(1)
        if which == "engine":
            gateway.engines[0]["slots"] = 1
        else:
            gateway.tenants = [{**tenant, "slots": 1}]
        assert (await gateway.reload()).status == 200
        await gateway.recorded(1, code="invalid_request", status=400)
        go.set()
    assert crowd.statuses == {200: 1, 400: 1}


async def test_who_stands_behind_one_that_may_not_be_held_yet_goes_on_when_that_one_leaves() -> None:
    go = trio.Event()
    engine = ScriptedEngine(honest, slots=4)
    engine.plan = [Whole(takes=go)]
    tenant, mine = {"name": "t", "keys": [digest_of("sk-t")], "slots": 2}, {"x-api-key": "sk-t"}
    async with running_gateway(engine, tenants=[tenant]) as gateway, trio.open_nursery() as nursery:
        crowd = Crowd(gateway, nursery)
        crowd.come(headers=mine)
        await engine.call(0)
        async with http1(gateway.url) as leaver:
            await leaver.post(CHAT.path, CHAT.payload(stream=False, n=2), mine)
            await gateway.queued(1)
            crowd.come(headers=mine)
            await gateway.queued(2)
        await engine.call(1)
        go.set()
    assert crowd.statuses == {200: 2}


# ------------------------------------------------------------------ what clients are told


async def test_an_engine_s_own_answer_says_more_than_that_there_is_no_other() -> None:
    go = trio.Event()
    a, b = two(Status(429, b'{"x":1}', [("Retry-After", "7")]), Whole(takes=go), slots=(1, 1))
    async with running_gateway(a, b) as gateway, trio.open_nursery() as nursery:
        await admin(gateway, "a", "drain")
        crowd = Crowd(gateway, nursery)
        crowd.come()
        await b.call(0)
        await admin(gateway, "a", "resume")
        crowd.come()
        await gateway.queued(1)
        await admin(gateway, "b", "drain")
        await gateway.recorded(1, status=429, engine="a")
        go.set()


async def test_a_429_is_told_whoever_answered_last_and_the_record_names_its_engine() -> None:
    a, b = two(Status(429, b'{"x":1}', [("Retry-After", "7")]), Status(503), models=("ma", "mb"))
    async with running_gateway(a, b, routes=[CHAT_FALLS_BACK]) as gateway:
        answer = await ask(gateway, model="chat")
        assert (answer.status, answer.head["retry-after"], answer.head["x-gateway-model"]) == (429, "7", "ma")
        await gateway.record(status=429, engine="a", served_model="ma", attempts=2)


@pytest.mark.parametrize("size", [1000, 200_000])
async def test_of_an_error_that_is_kept_nothing_is_cut_off(size: int) -> None:
    body = b'{"error":"' + b"x" * size + b'"}'
    a, b = two(Status(503, body), Raw([End.FIN]))
    async with running_gateway(a, b) as gateway:
        answer = await ask(gateway)
        assert answer.json, "whole JSON, the engine's or the gateway's"
        assert answer.status == (503 if size < 64 * 1024 else 502)


@pytest.mark.parametrize("kind", ["openai", "vllm", "sglang", "llamacpp"])
async def test_which_model_served_is_said_whatever_the_engine(kind: str) -> None:
    engine = ScriptedEngine(honest, models=("ma",), kind=kind)
    async with running_gateway(engine, routes=[{"model": "chat", "to": [{"model": "ma"}]}]) as gateway:
        assert (await ask(gateway, model="chat")).head.all("x-gateway-model") == ["ma"]


# ------------------------------------------------------------------ what counts against an engine


@pytest.mark.parametrize("status", [400, 404, 422, 501])
async def test_what_a_request_did_neither_heals_nor_harms(status: int) -> None:
    engine = ScriptedEngine(Status(503), name="a")
    async with running_gateway(engine, health={"backoff_seconds": 0.05}) as gateway:
        for _ in range(2):
            await ask(gateway)
            engine.plan = [Status(status)] * 3
            for _ in range(3):
                await ask(gateway)
        assert await state(gateway, "a") == "healthy", "two failures in a row so far"
        await ask(gateway)
        assert await state(gateway, "a") in ("ejected", "probation")
        await gateway.engine("a", lambda each: each["state"] == "probation")
        engine.plan = [Status(status)]
        await ask(gateway)
        assert await state(gateway, "a") == "probation"


async def _error_if_streamed(call: Call) -> None:
    await (Sse([ERROR, DONE]) if call.json.get("stream") else Status(500))(call)


@pytest.mark.parametrize(
    ("script", "kind", "stream"),
    [
        (Sse([ERROR[:9], 0.05, ERROR[9:], DONE]), "openai", True),
        (Sse([ERROR[:1], 0.02, ERROR[1:30], 0.02, ERROR[30:], DONE]), "openai", True),
        (Sse([]), "openai", True),
        (Sse([ERROR[:9]]), "openai", True),
        (_error_if_streamed, "llamacpp", False),
    ],
)
async def test_an_error_in_a_stream_is_one_however_it_comes(script: Any, kind: str, stream: bool) -> None:
    a, b = two(script, kind=kind)
    async with running_gateway(a, b, health={"backoff_seconds": 60}) as gateway:
        for _ in range(10):
            assert (await ask(gateway, stream=stream)).status == 200
        assert len(a.calls) <= 3
        assert await state(gateway, "a") == "ejected"


async def test_what_is_no_error_is_not_waited_for() -> None:
    half, go_on = b'data: {"choices":[{"index":0,"del', trio.Event()
    engine = ScriptedEngine(Sse([half, go_on, b'ta":{}}]}\n\n', DONE]))
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await client.post(CHAT.path, CHAT.payload(stream=True))
        await client.head()
        await client.until(half)
        go_on.set()


@pytest.mark.parametrize("value", ["9" * 12, "9" * 400])
async def test_a_very_long_retry_after_is_as_long_as_may_be(value: str) -> None:
    a, b = two(Status(503, headers=[("Retry-After", value)]))
    async with running_gateway(a, b, health={"backoff_most_seconds": 40}) as gateway:
        assert (await ask(gateway)).status == 200
        engine = (await gateway.admin("/admin/engines")).json["engines"]["a"]
        assert 38 < engine["resting_seconds"] <= 40


async def test_a_stale_connection_is_no_try() -> None:
    a, b = two()

    def weight(key: str, name: bytes) -> bytes:
        return hashlib.blake2b(key.encode() + b"\0" + name, digest_size=8).digest()

    session = next(key for key in map(str, range(100)) if weight(key, b"a") > weight(key, b"b"))
    route = {"model": "model", "policy": "session"}
    async with running_gateway(a, b, retry={"attempts": 2}, routes=[route]) as gateway:
        await ask(gateway, headers={"X-Session-Id": session})
        a.plan = [Raw([End.FIN]), Status(503)]
        assert (await ask(gateway, headers={"X-Session-Id": session})).status == 200


# ------------------------------------------------------------------ weights


async def test_weights_count_the_route_s_own_requests() -> None:
    """Not those of routes that fall back to it, nor those that were refused, and a reload forgets no turn."""
    a, b = two(models=("ma", "mb"))
    split = {"model": "split", "to": [{"model": "ma", "weight": 3}, {"model": "mb"}]}
    other = {"model": "other", "to": [{"model": "ma"}], "fallbacks": ["split"]}
    tenants = [
        {"name": "all", "keys": [digest_of("sk-all")]},
        {"name": "few", "keys": [digest_of("sk-few")], "models": ["ma"]},
    ]
    async with running_gateway(a, b, routes=[split, other], tenants=tenants) as gateway:
        answers = []
        for number in range(40):
            answers.append(await ask(gateway, model="split", headers={"x-api-key": "sk-all"}))
            assert (await ask(gateway, model="split", headers={"x-api-key": "sk-few"})).status == 403
            assert (await ask(gateway, model="other", headers={"x-api-key": "sk-all"})).status == 200
            if number % 3 == 0:
                assert (await gateway.reload()).status == 200
    assert Counter(answer.head["x-gateway-model"] for answer in answers) == {"ma": 30, "mb": 10}


async def test_fallbacks_that_meet_again_are_tried_once() -> None:
    engine = ScriptedEngine(honest, models=("m",))
    names = [f"r{number}" for number in range(18)]
    routes: list[dict[str, Any]] = [
        {"model": name, "to": [{"model": "m"}], "fallbacks": list(names[at + 1 : at + 3])}
        for at, name in enumerate(names)
    ]
    async with running_gateway(engine, routes=routes) as gateway:
        stages = gateway.service.gateway.routing.stages(CHAT.path, "r0")
        assert len(stages) == len(names)
        assert (await ask(gateway, model="r0")).status == 200
