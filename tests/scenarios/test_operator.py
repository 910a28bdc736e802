"""What an operator sees and does: live requests, the ledger, ending one request, metrics, access records."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import Truncated, http1
from tests.support.routes import CHAT, EMBEDDINGS, STREAMING, Route
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Stream, Whole, honest, never_answers
from tests.support.visitors import visit

protocols = pytest.mark.parametrize("way", ["fin", "h2_reset"], ids=["http1", "http2"])
SOON_SECONDS = 0.5


async def only(gateway: Gateway, phase: str) -> dict[str, Any]:
    await gateway.in_phase(phase)
    (request,) = [r for r in await gateway.requests() if r["phase"] == phase]
    return request


@protocols
@pytest.mark.parametrize("route", STREAMING, ids=str)
async def test_ended_by_an_operator_while_it_streams(way: str, route: Route) -> None:
    engine = ScriptedEngine(Stream(tokens=9, pause_after=2, until=trio.Event()), kind=route.kind)
    async with running_gateway(engine) as gateway:
        async with visit(way, gateway.url, route.path, route.payload(stream=True)) as visitor:
            await visitor.head()
            await visitor.until(b" tk1")
            request = await only(gateway, "streaming")
            since = trio.current_time()
            assert (await gateway.admin(f"/admin/requests/{request['id']}", "DELETE")).status in (
                200,
                202,
                204,
            )
            with pytest.raises(Truncated) as cut:
                await visitor.rest()
            assert trio.current_time() - since < SOON_SECONDS
            assert b"cancelled" in cut.value.got
            await visitor.still_served()
        await engine.calls[0].closed()
        await gateway.record(outcome="cancelled", status=503, phase="streaming", id=request["id"])


@protocols
async def test_ended_by_an_operator_before_its_first_byte(way: str) -> None:
    engine = ScriptedEngine(never_answers)
    async with running_gateway(engine) as gateway:
        async with visit(way, gateway.url, CHAT.path, CHAT.payload(stream=True)) as visitor:
            await engine.call()
            request = await only(gateway, "prefill")
            await gateway.admin(f"/admin/requests/{request['id']}", "DELETE")
            assert (await visitor.head()).status == 503
            assert b'"cancelled"' in await visitor.rest()
        await engine.calls[0].closed()
        await gateway.record(outcome="cancelled", status=503, phase="prefill")


@protocols
async def test_ended_by_an_operator_while_it_waits(way: str) -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(Whole(takes=go_on), slots=1)
    async with running_gateway(engine) as gateway, http1(gateway.url) as first:
        await first.post(CHAT.path, CHAT.payload(stream=False))
        await engine.call()
        async with visit(way, gateway.url, CHAT.path, CHAT.payload(stream=True)) as visitor:
            request = await only(gateway, "queued")
            await gateway.admin(f"/admin/requests/{request['id']}", "DELETE")
            assert (await visitor.head()).status == 503
            await visitor.rest()
        await gateway.record(outcome="cancelled", status=503, phase="queued")
        go_on.set()
        assert (await first.answer()).status == 200
    assert len(engine.calls) == 1


async def test_ending_what_is_not_there_is_not_found() -> None:
    async with running_gateway(ScriptedEngine(honest)) as gateway:
        for name in ("nothing", "..%2f..", "%00", "a" * 1000):
            assert (await gateway.admin(f"/admin/requests/{name}", "DELETE")).status == 404


async def test_live_requests_are_listed_with_their_phase() -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(Stream(tokens=4, pause_after=2, until=go_on), slots=1)
    async with running_gateway(engine) as gateway, http1(gateway.url) as one, http1(gateway.url) as two:
        await one.post(CHAT.path, CHAT.payload(stream=True))
        await one.head()
        await one.until(b" tk1")
        await two.post(CHAT.path, CHAT.payload(stream=True))
        await gateway.queued(1)
        streaming, queued = sorted(await gateway.requests(), key=lambda r: -r["age_seconds"])
        assert (streaming["phase"], streaming["engine"], streaming["model"]) == (
            "streaming",
            "engine",
            "model",
        )
        assert (queued["phase"], queued["engine"]) == ("queued", None)
        assert streaming["route"] == queued["route"] == CHAT.path
        assert streaming["bytes"] > 0
        assert queued["bytes"] == queued["events"] == 0
        assert streaming["id"] == engine.calls[0].header("X-Request-Id")
        state = (await gateway.ledger())["engines"]["engine"]
        assert (state["slots"], state["running"], state["free"], state["balanced"]) == (1, 1, 0, True)
        assert state["acquired"] - state["released"] == 1
        go_on.set()
        await one.rest()
        await two.answer()
        await gateway.recorded(2, outcome="completed")
        assert await gateway.requests() == []


async def test_metrics_agree_with_what_happened() -> None:
    engine = ScriptedEngine(honest, slots=3)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        for _ in range(3):
            await client.ask(CHAT.path, CHAT.payload(stream=True))
        await client.ask(EMBEDDINGS.path, EMBEDDINGS.payload(stream=False))
        await client.ask(CHAT.path, {**CHAT.payload(stream=True), "model": "no-such"})
        await gateway.recorded(5)
        metrics = await gateway.metrics()
        totals = {
            name: value for name, value in metrics.items() if name.startswith("gateway_requests_total{")
        }
        assert sum(totals.values()) == 5
        chats = [v for n, v in totals.items() if f'route="{CHAT.path}"' in n and 'outcome="completed"' in n]
        assert chats == [3]
        assert not any("no-such" in name for name in metrics), "a client's words must not make new series"
        assert metrics['gateway_slots_acquired_total{engine="engine"}'] == 4
        assert metrics['gateway_slots_released_total{engine="engine"}'] == 4
        assert metrics['gateway_slots{engine="engine",state="free"}'] == 3
        assert metrics["gateway_streams"] == 0
        ttft = [value for name, value in metrics.items() if name.startswith("gateway_ttft_seconds_count")]
        assert sum(ttft) >= 3


async def test_an_access_record_says_it_all() -> None:
    engine = ScriptedEngine(Stream(tokens=5, prefill=0.05), slots=3)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        answer = await client.ask(CHAT.path, CHAT.payload(stream=True), headers={"X-Request-Id": "mine"})
        record = await gateway.record()
        expected = {
            "caller_id": "mine", "method": "POST", "route": CHAT.path, "model": "model", "engine": "engine",
            "stream": True, "status": 200, "outcome": "completed", "code": None, "bytes": len(answer.body),
        }  # fmt: skip
        assert {name: record[name] for name in expected} == expected
        assert record["time"]
        assert record["id"] == engine.calls[0].header("X-Request-Id")
        assert 50 <= record["ttft_ms"] <= record["duration_ms"]
        assert record["queue_ms"] < 50
        assert record["events"] >= 5
        assert "teardown_ms" not in record or record["teardown_ms"] is None


async def test_planes_are_apart() -> None:
    async with running_gateway(ScriptedEngine(honest)) as gateway, http1(gateway.url) as client:
        for path in ("/healthz", "/readyz", "/metrics", "/admin/requests", "/admin/ledger"):
            assert (await gateway.admin(path)).status == 200
            assert (await client.ask(path)).status == 404
        assert (await gateway.admin(CHAT.path, "POST")).status in (404, 405)
