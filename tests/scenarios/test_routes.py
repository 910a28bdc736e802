"""What a model's name stands for: aliases, weights, fallbacks, policies, and lists that engines keep."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from gateway.tenants import digest_of
from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import Answer, http1, request_bytes
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Status, honest


def engines(*names: str, **more: Any) -> list[ScriptedEngine]:
    return [ScriptedEngine(honest, name=name, models=(f"model-{name}",), **more) for name in names]


async def ask(
    gateway: Gateway, model: str = "chat", headers: dict[str, str] | None = None, **more: Any
) -> Answer:
    async with http1(gateway.url) as client:
        payload = {**CHAT.payload(stream=False, **more), "model": model}
        return await client.ask(CHAT.path, payload, headers=headers)


@pytest.mark.parametrize(
    "body",
    [
        rb"""{"model":*,"messages":[]}""",
        rb""" {"messages":[{"role":"user","content":"\"model\":\"chat\""}],  "model"  :* } """,
        rb"""{"temperature":0.70000000000000007,"model":*,"x":[1e400,{"model":"chat"}]}""",
    ],
)
@pytest.mark.parametrize("written", [b'"chat"', b'"ch\\u0061t"'])
async def test_an_alias_changes_the_one_field_and_no_other_byte(body: bytes, written: bytes) -> None:
    (engine,) = engines("a")
    route = {"model": "chat", "to": [{"model": "model-a"}]}
    async with running_gateway(engine, routes=[route]) as gateway, http1(gateway.url) as client:
        await client.send(request_bytes(CHAT.path, body.replace(b"*", written)))
        answer = await client.answer()
        assert (answer.status, answer.head["x-gateway-model"]) == (200, "model-a")
        assert engine.calls[0].body == body.replace(b"*", b'"model-a"')
        record = await gateway.record(model="chat", served_model="model-a")
        assert record["engine"] == "a"
        metrics = await gateway.metrics()
        assert any('model="chat"' in line for line in metrics if line.startswith("gateway_requests_total"))


async def test_weights_are_kept_exactly() -> None:
    a, b = engines("a", "b")
    route = {"model": "chat", "to": [{"model": "model-a", "weight": 3}, {"model": "model-b", "weight": 1}]}
    async with running_gateway(a, b, routes=[route]) as gateway:
        for _ in range(40):
            assert (await ask(gateway)).status == 200
    assert (len(a.calls), len(b.calls)) == (30, 10)


async def test_a_canary_that_fails_is_stood_in_for() -> None:
    a, b = engines("a", "b")
    b.script = Status(503)
    route = {"model": "chat", "to": [{"model": "model-a"}, {"model": "model-b"}]}
    async with running_gateway(a, b, routes=[route]) as gateway:
        for _ in range(10):
            answer = await ask(gateway)
            assert (answer.status, answer.head["x-gateway-model"]) == (200, "model-a")
    assert len(b.calls) <= 3


async def test_fallbacks_are_tried_in_their_order_when_the_engines_are_gone() -> None:
    a, b, c = engines("a", "b", "c")
    routes = [
        {"model": "chat", "to": [{"model": "model-a"}], "fallbacks": ["second"]},
        {"model": "second", "to": [{"model": "model-b"}], "fallbacks": ["model-c"]},
    ]
    async with running_gateway(a, b, c, routes=routes) as gateway:
        assert (await ask(gateway)).head["x-gateway-model"] == "model-a"
        await a.stop()
        assert (await ask(gateway)).head["x-gateway-model"] == "model-b"
        await gateway.record(served_model="model-b", engine="b", attempts=2)
        assert (await ask(gateway)).head["x-gateway-model"] == "model-b"
        await gateway.recorded(1, served_model="model-b", attempts=1)
        await gateway.admin("/admin/engines/b/drain", "POST")
        assert (await ask(gateway)).head["x-gateway-model"] == "model-c"


async def test_only_the_engines_named_are_used() -> None:
    a, b = (ScriptedEngine(honest, name=name, models=("m",)) for name in "ab")
    async with running_gateway(
        a, b, routes=[{"model": "m", "to": [{"model": "m", "engines": ["b"]}]}]
    ) as gateway:
        for _ in range(4):
            answer = await ask(gateway, "m")
            assert "x-gateway-model" not in answer.head
    assert (len(a.calls), len(b.calls)) == (0, 4)


async def test_names_are_listed_and_tenants_see_what_they_may_use() -> None:
    a, b = engines("a", "b")
    tenants = [
        {"name": "all", "keys": [digest_of("sk-all")]},
        {"name": "chatter", "keys": [digest_of("sk-chat")], "models": ["chat"]},
    ]
    route = {"model": "chat", "to": [{"model": "model-b"}]}
    async with (
        running_gateway(a, b, routes=[route], tenants=tenants) as gateway,
        http1(gateway.url) as client,
    ):
        for key, names in (("sk-all", ["chat", "model-a", "model-b"]), ("sk-chat", ["chat"])):
            headers = {"x-api-key": key}
            await client.send(request_bytes("/v1/models", method="GET", headers=headers))
            listed = json.loads((await client.answer()).body)["data"]
            assert [model["id"] for model in listed] == names
            await client.send(request_bytes("/api/tags", method="GET", headers=headers))
            assert [tag["name"] for tag in json.loads((await client.answer()).body)["models"]] == names
        headers = {"x-api-key": "sk-chat"}
        assert (await ask(gateway, "chat", headers)).status == 200
        assert (await ask(gateway, "model-b", headers)).status == 403


async def test_models_are_learnt_from_the_engine_and_learnt_anew() -> None:
    engine = ScriptedEngine(honest, models=("one",))
    async with running_gateway(
        engine,
        engine={"models": ["auto"]},
        health={"probe_seconds": 0.05},
        routes=[{"model": "chat", "to": [{"model": "two"}]}],
    ) as gateway:
        assert (await ask(gateway, "one")).status == 200
        assert (await ask(gateway, "two")).status == 404
        assert (await ask(gateway, "chat")).status == 404
        engine.models = ("two",)
        await engine.stop()
        await gateway.engine("engine", lambda one: one["state"] == "ejected")
        assert (await gateway.admin("/admin/engines")).json["engines"]["engine"]["models"] == ["one"]


async def test_a_session_stays_at_its_engine() -> None:
    two = [ScriptedEngine(honest, name=name, models=("m",)) for name in "ab"]
    routes = [{"model": "m", "policy": "session", "session_header": "X-Chat"}]
    served: dict[str, Counter[str]] = {}
    async with running_gateway(*two, routes=routes) as gateway:
        for number in range(40):
            chat = f"chat {number % 10}"
            assert (await ask(gateway, "m", {"X-Chat": chat})).status == 200
        for engine in two:
            for call in engine.calls:
                served.setdefault(call.header("X-Chat") or "", Counter())[engine.name] += 1
    assert len(served) == 10
    assert all(len(engines) == 1 for engines in served.values())
    assert {name for engines in served.values() for name in engines} == {"a", "b"}


async def test_a_conversation_goes_on_where_it_began() -> None:
    two = [ScriptedEngine(honest, name=name, models=("m",)) for name in "ab"]
    async with running_gateway(*two, routes=[{"model": "m", "policy": "prefix"}]) as gateway:
        for turn in range(1, 6):
            for user in range(6):
                messages = [
                    {"role": "user", "content": f"user {user} turn {number} " * 60} for number in range(turn)
                ]
                assert (await ask(gateway, "m", messages=messages)).status == 200
    owners: dict[str, set[str]] = {}
    for engine in two:
        for call in engine.calls:
            owners.setdefault(call.json["messages"][0]["content"][:6], set()).add(engine.name)
    assert all(len(names) == 1 for names in owners.values())
