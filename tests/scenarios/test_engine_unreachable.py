"""The way to an engine: dead, refused, or a kept-alive connection that the engine has closed meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.support.gateway import running_gateway
from tests.support.http1 import http1
from tests.support.routes import CHAT, ROUTES, Route
from tests.support.scripted import Call, ScriptedEngine
from tests.support.scripts import End, Stale, Stream, honest


@pytest.mark.parametrize("route", ROUTES, ids=str)
async def test_dead_engine_is_a_503(route: Route) -> None:
    engine = ScriptedEngine(honest, kind=route.kind)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await engine.stop()
        answer = await client.ask(route.path, route.payload(stream=True))
        assert answer.status == 503
        assert b"no_engine" in answer.body
        assert int(answer.head["retry-after"]) > 0
        await gateway.record(status=503, code="no_engine", phase="connecting")


async def test_dead_engine_holds_nobody_s_slot() -> None:
    engine = ScriptedEngine(honest, slots=1)
    async with running_gateway(engine) as gateway:
        await engine.stop()
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                async with http1(gateway.url) as client:
                    assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).status == 503

            for _ in range(20):
                nursery.start_soon(ask)
        await gateway.recorded(20, status=503)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("end", End)
async def test_stale_connection_is_tried_once_more_on_a_fresh_one(end: End, stream: bool) -> None:
    engine = ScriptedEngine(Stale(honest, end), slots=1)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        for _ in range(2):
            assert (await client.ask(CHAT.path, CHAT.payload(stream=stream))).status == 200
        await gateway.recorded(2, outcome="completed", status=200)
    assert [call.nth for call in engine.calls] == [0, 1, 0]
    assert engine.calls[1].body == engine.calls[2].body


async def test_the_try_on_a_fresh_connection_is_the_only_one() -> None:
    async def dies(call: Call) -> None:
        await call.fin()

    engine = ScriptedEngine(dies, slots=1)
    engine.plan = [honest]
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).status == 200
        answer = await client.ask(CHAT.path, CHAT.payload(stream=True))
        assert (answer.status, answer.json["error"]["code"]) == (502, "engine_failed")
        await gateway.record(outcome="engine_failed")
    assert [call.nth for call in engine.calls] == [0, 1, 0]


async def test_reused_connection_that_dies_after_its_head_is_not_tried_again() -> None:
    async def half(call: Call) -> None:
        await call.head(200, [("Content-Type", "text/event-stream")])
        await call.fin()

    engine = ScriptedEngine(half, slots=1)
    engine.plan = [honest]
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).status == 200
        assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).status == 502
    assert [call.nth for call in engine.calls] == [0, 1]


async def test_connections_the_engine_closes_while_idle_do_no_harm() -> None:
    async def once(call: Call) -> None:
        await honest(call)
        await call.fin()

    engine = ScriptedEngine(once, slots=1)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        for _ in range(5):
            assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).status == 200
            await engine.until(lambda: not engine.connections)
        await gateway.recorded(5, outcome="completed")
    assert {call.nth for call in engine.calls} == {0}


async def test_who_leaves_during_the_second_try_is_not_tried_for_again() -> None:
    async def silent(call: Call) -> None:
        await call.closed()

    engine = ScriptedEngine(Stale(silent), slots=1)
    engine.plan = [honest]
    async with running_gateway(engine) as gateway:
        async with http1(gateway.url) as client:
            assert (await client.ask(CHAT.path, CHAT.payload(stream=False))).status == 200
            await client.post(CHAT.path, CHAT.payload(stream=False))
            call = await engine.call(2)
        await call.closed()
        await gateway.record(outcome="client_gone", status=499)
    assert len(engine.calls) == 3


async def test_engine_behind_a_unix_socket(tmp_path: Path) -> None:
    engine = ScriptedEngine(honest, unix=str(tmp_path / "engine.sock"))
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).status == 200
        engine.script = Stream(pause_after=1, until=trio.Event())
        await client.post(CHAT.path, CHAT.payload(stream=True))
        await client.head()
        await client.close()
        await engine.calls[1].closed()
        await gateway.record(outcome="client_gone")


async def test_redirects_are_passed_on_and_never_followed() -> None:
    elsewhere = ScriptedEngine(honest, name="elsewhere")

    async def redirects(call: Call) -> None:
        call.done()
        await call.head(302, [("Location", elsewhere.url + CHAT.path)], framing="length", length=0)

    engine = ScriptedEngine(redirects, models=("mine",))
    async with running_gateway(engine, elsewhere) as gateway, http1(gateway.url) as client:
        answer = await client.ask(CHAT.path, {**CHAT.payload(stream=False), "model": "mine"})
        assert answer.status in (302, 502)
    assert elsewhere.calls == []


async def test_path_prefix_of_the_engine_s_url() -> None:
    seen: list[str] = []

    async def prefixed(call: Call) -> None:
        seen.append(call.target)
        call.target = call.target.removeprefix("/engines/a")
        await honest(call)

    engine = ScriptedEngine(prefixed)
    engine.url += "/engines/a"
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        assert (await client.ask(CHAT.path + "?trace=1&x=%20", CHAT.payload(stream=True))).status == 200
    assert seen[0].startswith("/engines/a/v1/chat/completions")
