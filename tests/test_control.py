"""The control plane: what is going on, and the end of one request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gateway.control import control_plane
from gateway.telemetry import Telemetry
from tests.fakes import END, EVENT, LAST, OPENING, FakeClient, Rig, make_rig


class Operator:
    """Asks the control plane of a rig."""

    def __init__(self, rig: Rig) -> None:
        telemetry = Telemetry()
        telemetry.watch(rig.gateway)
        self._client = control_plane(rig.gateway, telemetry).test_client()

    async def ask(self, path: str, method: str = "GET") -> tuple[int, Any]:
        client: Any = self._client
        response = await client.open(path, method=method)
        data = await response.get_data(as_text=True)
        is_json = response.content_type == "application/json"
        return response.status_code, json.loads(data) if is_json else data


@asynccontextmanager
async def streaming(**settings: Any) -> AsyncIterator[tuple[Rig, Operator, FakeClient]]:
    """One request that streams for a minute."""
    rig = make_rig([*OPENING, EVENT, 60.0, LAST, END], **settings)
    async with trio.open_nursery() as nursery:
        client = await rig.come(nursery)
        yield rig, Operator(rig), client
        nursery.cancel_scope.cancel()


async def test_health_and_readiness() -> None:
    rig = make_rig()
    operator = Operator(rig)
    assert await operator.ask("/healthz") == (200, {"status": "ok"})
    assert await operator.ask("/readyz") == (200, {"status": "ready"})
    rig.gateway.drain()
    assert await operator.ask("/healthz") == (200, {"status": "ok"})
    assert await operator.ask("/readyz") == (503, {"status": "draining"})


async def test_metrics_in_prometheus_format() -> None:
    rig = make_rig(slots=3)
    status, text = await Operator(rig).ask("/metrics")
    assert status == 200
    assert 'gateway_slots{engine="e0",state="free"} 3.0\n' in text


async def test_live_requests_are_listed(autojump_clock: MockClock) -> None:
    async with streaming() as (rig, operator, client):
        await trio.sleep(5)
        async with trio.open_nursery() as nursery:
            waiting = await rig.come(nursery)
            status, said = await operator.ask("/admin/requests")
            waiting.leave()
    assert (status, said["queued"]) == (200, 1)
    first, second = said["requests"]
    assert first == {
        "id": client.request.id,
        "caller_id": None,
        "tenant": None,
        "route": "/v1/chat/completions",
        "model": "m",
        "engine": "e0",
        "stream": True,
        "phase": "streaming",
        "age_seconds": 5.0,
        "bytes": len(EVENT),
        "events": 1,
        "spooled_bytes": 0,
    }
    assert (second["phase"], second["engine"], second["bytes"]) == ("queued", None, 0)
    assert await operator.ask("/admin/requests") == (200, {"requests": [], "queued": 0})


async def test_ending_one_request_ends_that_one(autojump_clock: MockClock) -> None:
    async with streaming(slots=2) as (rig, operator, client):
        async with trio.open_nursery() as nursery:
            other = await rig.come(nursery)
            status, said = await operator.ask(f"/admin/requests/{client.request.id}", "DELETE")
            assert (status, said) == (200, {"cancelled": client.request.id})
            await client.ended.wait()
            assert trio.current_time() == 0
            assert b'"code":"cancelled"' in client.got
            assert not other.ended.is_set()
            assert (await operator.ask(f"/admin/requests/{client.request.id}", "DELETE"))[0] == 404
        assert other.finished


@pytest.mark.parametrize("name", ["nothing", "..%2f..", "%00", "a" * 1000])
async def test_ending_what_is_not_there(name: str) -> None:
    status, said = await Operator(make_rig()).ask(f"/admin/requests/{name}", "DELETE")
    assert status == 404
    assert len(str(said)) < 500


async def test_ledger_of_each_engine() -> None:
    async with streaming(slots=2, engines=2) as (_, operator, _):
        status, said = await operator.ask("/admin/ledger")
    assert (status, said["balanced"]) == (200, True)
    idle = {"slots": 2, "running": 0, "reclaiming": 0, "ghosts": 0, "free": 2, "acquired": 0, "released": 0}
    busy = {**idle, "running": 1, "free": 1, "acquired": 1}
    assert said["engines"] == {"e0": {**busy, "balanced": True}, "e1": {**idle, "balanced": True}}


async def test_books_that_do_not_balance_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(engines=2)
    monkeypatch.setattr(rig.gateway.engines[1].ledger, "_released", 7)
    status, said = await Operator(rig).ask("/admin/ledger")
    assert (status, said["balanced"]) == (200, False)
    assert [each["balanced"] for each in said["engines"].values()] == [True, False]


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/v1/models", "GET", 404), ("/admin/requests", "DELETE", 405), ("/metrics", "POST", 405)],
)
async def test_nothing_else_is_here(path: str, method: str, status: int) -> None:
    assert (await Operator(make_rig()).ask(path, method))[0] == status


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/admin/reload", 405), ("PUT", "/", 405)]
)
async def test_what_there_is_not_is_said_in_json(method: str, path: str, status: int) -> None:
    told, said = await Operator(make_rig()).ask(path, method)
    assert told == status
    assert f"{method} {path}" in said["error"]
