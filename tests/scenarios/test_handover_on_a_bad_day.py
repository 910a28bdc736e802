"""Handovers that go wrong or meet what else happens: a death at each step, three at once, other files."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from gateway import config
from gateway.config import ConfigError
from gateway.handover import HandoverError, take_over
from gateway.handover.line import Line
from gateway.server import Plane
from tests.scenarios.test_handover import Successive, ask, successive, until
from tests.support.http1 import Http1, connect, http1
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Stream, Whole, honest
from tests.wire import frames as f
from tests.wire.raw2 import raw2


def stuck() -> Stream:
    """It streams for as long as its client stays."""
    return Stream(tokens=5, pause_after=1, until=trio.Event())


async def begin(gateways: Successive, clients: contextlib.AsyncExitStack, **more: Any) -> Http1:
    client = await clients.enter_async_context(http1(gateways.url))
    await client.post(CHAT.path, CHAT.payload(stream=True) | more)
    return client


async def test_one_that_says_it_serves_and_is_gone_takes_nothing(tmp_path: Path) -> None:
    async with successive(tmp_path, ScriptedEngine(honest)) as gateways:
        dead = await take_over(str(gateways.path))
        assert dead is not None
        await dead._line.say({"serves": []})
        dead.close()
        assert await ask(gateways.url) == 200


async def test_a_new_one_that_dies_is_followed_by_another_and_no_connection_is_lost(tmp_path: Path) -> None:
    engine = ScriptedEngine(stuck(), slots=4)
    async with successive(tmp_path, engine) as gateways, contextlib.AsyncExitStack() as clients:
        for _ in range(3):
            await (await begin(gateways, clients)).head()
        dying = await take_over(str(gateways.path))
        assert dying is not None
        await dying.serves(["127.0.0.1:0"])
        waiting = await begin(gateways, clients)  # Accepted by nobody yet.
        dying.close()
        await until(lambda: _listens(gateways.path))
        await gateways.start()
        await waiting.head()
        assert engine.peak == 4
        assert gateways.usable() == [3, 1]


def _listens(path: Path) -> bool:
    import socket

    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
        return True


async def test_three_at_once_never_exceed_the_slots_together(tmp_path: Path) -> None:
    engine = ScriptedEngine(stuck(), slots=4)
    async with successive(tmp_path, engine) as gateways, contextlib.AsyncExitStack() as clients:
        for _ in range(3):
            await (await begin(gateways, clients)).head()
        await gateways.start()
        await until(lambda: gateways.usable() == [3, 1])
        await gateways.start()
        await until(lambda: gateways.usable() == [3, 0, 1])
        for _ in range(4):
            await begin(gateways, clients)
        await engine.until(lambda: engine.running == 4)
        await until(lambda: gateways.services[2].gateway.admission.waiting == 3)
        assert gateways.held() == [3, 0, 1]
        await clients.aclose()
        await until(lambda: gateways.usable()[2] == 4)
        assert engine.peak == 4


async def test_a_reload_gives_the_old_one_nothing_back(tmp_path: Path) -> None:
    engine = ScriptedEngine(stuck(), slots=4)
    async with successive(tmp_path, engine) as gateways, contextlib.AsyncExitStack() as clients:
        await (await begin(gateways, clients)).head()
        await gateways.start()
        await until(lambda: gateways.usable() == [1, 3])
        for service in gateways.services:
            service.reloader._load = lambda: gateways.config
        with pytest.raises(ConfigError, match="another process has taken over"):
            await gateways.services[0].reloader.reload()
        await gateways.services[1].reloader.reload()
        assert gateways.usable() == [1, 3]


async def test_one_that_drains_hands_over_all_the_same(tmp_path: Path) -> None:
    engine = ScriptedEngine(honest)
    engine.plan = [stuck()]
    async with successive(tmp_path, engine) as gateways, http1(gateways.url) as client:
        await client.post(CHAT.path, CHAT.payload(stream=True))
        await client.head()
        gateways.services[0].drain()
        await until(lambda: gateways.services[0].gateway.draining)
        await gateways.start()
        assert {await ask(gateways.url) for _ in range(20)} == {200}


async def test_who_waits_for_several_slots_gets_them(tmp_path: Path) -> None:
    go = trio.Event()
    engine = ScriptedEngine(honest, slots=2)
    engine.plan = [Whole(takes=go), Whole(takes=go)]
    async with successive(tmp_path, engine) as gateways, contextlib.AsyncExitStack() as clients:
        for _ in range(2):
            await begin(gateways, clients, stream=False)
        await engine.until(lambda: engine.running == 2)
        waiting = await begin(gateways, clients, stream=False, n=2)
        await until(lambda: gateways.services[0].gateway.admission.waiting == 1)
        await gateways.start()
        go.set()
        assert (await waiting.answer()).status == 200


async def test_a_request_for_several_over_an_old_connection_is_served(tmp_path: Path) -> None:
    """As many as the largest one of late took: the old one keeps them while somebody is connected."""
    several = CHAT.payload(stream=False) | {"n": 3}
    async with (
        successive(tmp_path, ScriptedEngine(honest, slots=4)) as gateways,
        http1(gateways.url) as client,
    ):
        assert (await client.ask(CHAT.path, several)).status == 200
        await gateways.start()
        await until(lambda: gateways.usable() == [3, 1])
        with trio.fail_after(10):
            assert (await client.ask(CHAT.path, several)).status == 200
        await gateways.ended[0].wait()
        await until(lambda: gateways.usable()[1] == 4)


async def test_engines_are_known_by_where_they_are(tmp_path: Path) -> None:
    engine = ScriptedEngine(stuck(), slots=2)
    async with successive(tmp_path, engine) as gateways, contextlib.AsyncExitStack() as clients:
        await (await begin(gateways, clients)).head()
        text = config.show(gateways.config)
        await gateways.start(config.parse(text.replace('name = "engine"', 'name = "renamed"')))
        await until(lambda: gateways.usable() == [1, 1])


async def test_an_engine_that_a_reload_brings_is_shared_too(tmp_path: Path) -> None:
    engine, other = ScriptedEngine(stuck(), slots=2), ScriptedEngine(honest, name="other")
    async with successive(tmp_path, engine, other) as gateways, contextlib.AsyncExitStack() as clients:
        await (await begin(gateways, clients)).head()
        whole = config.show(gateways.config)
        first, second, third = whole.partition("[[engine]]")[0], *whole.split("[[engine]]")[1:]
        without = config.parse(first + "[[engine]]" + third)
        assert "other" in third
        assert second
        after = await gateways.start(without)
        after.reloader._load = lambda: gateways.config
        await after.reloader.reload()
        await until(lambda: gateways.usable() == [1, 1])


async def test_an_address_that_is_not_wanted_any_more_refuses(tmp_path: Path) -> None:
    async with successive(tmp_path, ScriptedEngine(honest), admin="127.0.0.3:0") as gateways:
        before = gateways.url
        text = config.show(gateways.config).replace('listen = ["127.0.0.1:0"]', 'listen = ["127.0.0.2:0"]')
        await gateways.start(config.parse(text))
        await gateways.ended[0].wait()
        assert await ask(gateways.url) == 200
        with pytest.raises(OSError, match=r"refused|connect"):
            await connect(before)


async def test_a_successor_that_hangs_keeps_nobody_out(tmp_path: Path) -> None:
    async with successive(tmp_path, ScriptedEngine(honest)) as gateways:
        hangs = await take_over(str(gateways.path))
        assert hangs is not None
        await gateways.start()
        await gateways.ended[0].wait()
        assert await ask(gateways.url) == 200
        hangs.close()


async def test_an_http2_connection_that_is_never_idle(tmp_path: Path) -> None:
    """Streams that overlap on one connection, of a client that takes nothing behind a GOAWAY: none fails."""
    engine = ScriptedEngine(Stream(tokens=10, gap=0.02), slots=8)
    seen: Counter[Any] = Counter()
    over = trio.Event()

    async def client(gateways: Successive, asking: httpx.AsyncClient) -> None:
        while not over.is_set():
            answer = await asking.post(gateways.url + CHAT.path, json=CHAT.payload(stream=True))
            seen[answer.status_code, CHAT.parts is not None and answer.content == CHAT.parts.all(10)] += 1

    async with (
        successive(tmp_path, engine, drain_seconds=12) as gateways,
        httpx.AsyncClient(http1=False, http2=True, timeout=30, trust_env=False) as asking,
        trio.open_nursery() as clients,
    ):
        for number in range(12):
            clients.start_soon(client, gateways, asking)
            if number < 3:
                await (await engine.call(number)).made(3)  # The next one begins in the midst of it.
        await until(lambda: seen.total() > 20)
        await gateways.start()
        with trio.fail_after(9):  # After a fourth of the time nothing more begins there.
            await gateways.ended[0].wait()
        now = seen.total()
        await until(lambda: seen.total() > now + 20)
        over.set()
    assert set(seen) == {(200, True)}, seen
    assert all(len(records) > 15 for records in gateways.records)


async def test_a_long_stream_over_http2_ends_after_the_goaway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, held = trio.Event(), trio.Event()
    hold = Plane.hold
    monkeypatch.setattr(Plane, "hold", lambda self: (hold(self), held.set()))
    engine = ScriptedEngine(Stream(tokens=5, pause_after=2, until=go))
    body = json.dumps(CHAT.payload(stream=True)).encode()
    async with successive(tmp_path, engine, drain_seconds=4) as gateways, raw2(gateways.url) as client:
        await client.send(f.post(1, body))
        await client.until(lambda: bool(client.body(1)))
        await gateways.start()
        await held.wait()
        said: tuple[int | None, int | None] = (client.goaway, client.last)
        assert said == (None, None)
        await client.send(f.post(3, body), f.post(5, body), f.reset(5))
        await client.answered()
        await client.until(lambda: client.goaway is not None)
        said = (client.goaway, client.last)
        assert said == (f.NO_ERROR, 1)
        await client.send(f.post(7, body))
        await client.answered()
        go.set()
        assert CHAT.parts is not None
        await client.until(lambda: client.gone)
        assert client.body(1) == CHAT.parts.all(5)
        assert (client.ended, client.resets, set(client.heads)) == ({1}, {}, {1})
        assert len(engine.calls) == 1
        await gateways.ended[0].wait()
    assert [record["outcome"] for record in gateways.records[0]] == ["completed"]


async def test_a_door_that_can_not_be_opened_is_known_before_it_serves(tmp_path: Path) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with successive(tmp_path / "missing", ScriptedEngine(honest)):
            pass
    assert caught.group_contains(ConfigError, match=r"server\.handover: .*missing doesn't exist")


async def test_another_user_s_process_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with successive(tmp_path, ScriptedEngine(honest)) as gateways:
        assert stat.S_IMODE(gateways.path.stat().st_mode) == 0o600
        monkeypatch.setattr(Line, "trusted", False)
        with pytest.raises(HandoverError, match="another user"):
            await take_over(str(gateways.path))
