"""What GOAWAY names when a gateway ends, and what a client's own says then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from gateway.handover import take_over
from gateway.server import Plane, abuse
from tests.scenarios.test_handover import successive
from tests.support.gateway import running_gateway
from tests.support.http1 import http1
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Stream
from tests.wire import frames as f
from tests.wire.raw2 import Raw2, raw2

BODY = json.dumps(CHAT.payload(stream=True)).encode()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> trio.Event:
    """New streams are kept back from here on."""
    event, hold = trio.Event(), Plane.hold
    monkeypatch.setattr(Plane, "hold", lambda self: (hold(self), event.set()))
    return event


async def begin(client: Raw2) -> None:
    """A stream of which something has come."""
    await client.send(f.post(1, BODY))
    await client.until(lambda: bool(client.body(1)))


async def test_it_doesnt_name_what_was_never_begun() -> None:
    """A client that leaves its one stream and asks again in the same breath may ask elsewhere."""
    engine = ScriptedEngine(Stream(tokens=5, pause_after=2, until=trio.Event()))
    async with running_gateway(engine, server={"drain_seconds": 5}) as gateway, raw2(gateway.url) as client:
        await begin(client)
        gateway.service.drain()
        await client.answered()
        await client.send(f.reset(1) + f.post(3, BODY))
        await client.until(lambda: client.gone)
        assert (client.goaway, client.last) == (f.NO_ERROR, 1)
        assert (set(client.heads), client.resets) == ({1}, {})
        await gateway.ended.wait()
    assert len(engine.calls) == 1


async def test_a_connections_fault_doesnt_name_it_either(tmp_path: Path, held: trio.Event) -> None:
    engine = ScriptedEngine(Stream(tokens=5, pause_after=2, until=trio.Event()))
    async with successive(tmp_path, engine, drain_seconds=4) as gateways, raw2(gateways.url) as client:
        await begin(client)
        await gateways.start()
        await held.wait()
        await client.send(f.post(3, BODY) + f.frame(f.PING, 0, 0, b"too short"))
        await client.until(lambda: client.gone)
        assert (client.goaway, client.last) == (f.FRAME_SIZE_ERROR, 1)


async def test_who_answers_our_goaway_with_his_own_keeps_his_streams(tmp_path: Path) -> None:
    """So does Node's client; one that says it by itself counts as gone."""
    go = trio.Event()
    engine = ScriptedEngine(Stream(tokens=5, pause_after=2, until=go))
    async with successive(tmp_path, engine, drain_seconds=2) as gateways, raw2(gateways.url) as client:
        await begin(client)
        await gateways.start()
        await client.until(lambda: client.goaway is not None)
        await client.send(f.goaway())
        with trio.fail_after(5):
            await client.answered()
            go.set()
            await client.until(lambda: 1 in client.ended)
        assert CHAT.parts is not None
        assert client.body(1) == CHAT.parts.all(5)
        await gateways.ended[0].wait()
    assert [record["outcome"] for record in gateways.records[0]] == ["completed"]


async def test_answers_to_our_own_pings_are_no_flood(
    tmp_path: Path, held: trio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abuse, "BURST", 20.0)
    go = trio.Event()
    engine = ScriptedEngine(Stream(tokens=5, pause_after=2, until=go))
    async with successive(tmp_path, engine, drain_seconds=4) as gateways, raw2(gateways.url) as client:
        await begin(client)
        await gateways.start()
        await held.wait()
        await client.send(b"".join(f.post(number, BODY) for number in range(3, 123, 2)))
        await client.answered()
        go.set()
        await client.until(lambda: client.gone)
        assert (client.goaway, client.last, client.ended) == (f.NO_ERROR, 1, {1})


async def test_one_that_has_no_sockets_left_offers_none_and_goes_on(tmp_path: Path) -> None:
    """Its successor wanted none of its addresses, and has died."""
    go = trio.Event()
    engine = ScriptedEngine(Stream(tokens=5, pause_after=2, until=go), slots=2)
    async with successive(tmp_path, engine) as gateways, http1(gateways.url) as client:
        await client.post(CHAT.path, CHAT.payload(stream=True))
        await client.head()
        dying = await take_over(str(gateways.path))
        assert dying is not None
        await dying.serves(["127.0.0.5:0"])
        dying.close()
        third = None
        while third is None:  # Until it has noticed.
            third = await take_over(str(gateways.path))
        assert third.sockets == []
        third.close()
        go.set()
        assert CHAT.parts is not None
        assert await client.rest() == CHAT.parts.all(5)
