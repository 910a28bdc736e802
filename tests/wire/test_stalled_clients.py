"""Clients that ask and don't read: cut off by the stall clock, and only they.

Where nothing is read at all the time is virtual: nothing that the kernel does is waited for.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.conftest import Tls
from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import GONE, Truncated, http1
from tests.support.routes import CHAT
from tests.support.scripted import Call, ScriptedEngine
from tests.support.scripts import Stream
from tests.wire import frames as f
from tests.wire.around import BODY, quiet_log, whole
from tests.wire.raw2 import Raw2, raw2

STALL_SECONDS = 30
LONG = 1000
"""Virtual seconds for a test. Each costs the gateway two looks at its clients."""
EVENT = b"data: " + b"x" * 16_000 + b"\n\n"
WIDE = f.PREFACE + f.settings((4, 0x7FFFFFFF)) + f.window(0, 0x7FFF0000 - 65535)
"""HTTP/2 without any flow control of the client's: only its socket fills up."""

OPENINGS = {
    "full": WIDE,
    "closed stream": f.PREFACE + f.settings((4, 0)),
    "closed connection": f.PREFACE + f.settings((4, 0x7FFFFFFF)),
}
KINDS = ["http1", "full", "closed stream", "closed connection"]

kinds = pytest.mark.parametrize("kind", [*KINDS, *[f"{kind}, tls" for kind in KINDS]])


@pytest.fixture
def clock(autojump_clock: MockClock) -> MockClock:
    return autojump_clock


async def endless(call: Call) -> None:
    """As much as is taken. A bystander gets a short answer."""
    if call.json.get("user") == "bystander":
        await Stream()(call)
        return
    await call.head(200, [("Content-Type", CHAT.media)])
    while True:
        await call.send(EVENT)
        call.token()


@asynccontextmanager
async def stuck(kind: str, url: str, trusted: Any) -> AsyncIterator[Any]:
    """A client that has asked and reads nothing more."""
    async with AsyncExitStack() as stack:
        if kind.startswith("http1"):
            client = await stack.enter_async_context(http1(url, tls=trusted))
            await client.post(CHAT.path, CHAT.payload(stream=True))
            yield client.stream
            return
        opening = OPENINGS[kind.partition(",")[0]]
        connection = await stack.enter_async_context(raw2(url, tls=trusted, opening=opening, credit=False))
        await connection.answered()
        if kind.startswith("full"):
            await connection.stop_reading()
        await connection.send(f.post(1, BODY))
        yield connection if kind.startswith("closed") else connection.stream


@asynccontextmanager
async def serving(kind: str, tls: Tls, **more: Any) -> AsyncIterator[tuple[Gateway, ScriptedEngine, Any]]:
    engine = ScriptedEngine(endless, slots=4)
    secure = kind.endswith("tls")
    server = {**more.pop("server", {}), **({"tls": tls.section} if secure else {})}
    stream = {"stall_seconds": STALL_SECONDS, **more.pop("stream", {})}
    with quiet_log():
        async with running_gateway(engine, server=server, stream=stream, seconds=LONG, **more) as gateway:
            yield gateway, engine, tls.trusted if secure else None


@kinds
async def test_client_that_never_reads_is_cut_off(kind: str, tls: Tls, clock: MockClock) -> None:
    async with serving(kind, tls) as (gateway, engine, trusted), stuck(kind, gateway.url, trusted) as client:
        call = await engine.call()
        since = trio.current_time()
        await call.closed()
        assert STALL_SECONDS <= trio.current_time() - since <= STALL_SECONDS + 2
        record = await gateway.record(outcome="client_stalled")
        assert (record["status"], record["phase"]) == (499, "streaming")
        assert engine.running == 0
        if isinstance(client, Raw2):
            await client.over(1)
            assert client.resets[1] == f.CANCEL
            assert not client.gone
        else:
            with pytest.raises(GONE):
                await read_all(client)


async def read_all(stream: Any) -> None:
    """Until the end; a reset is an exception."""
    while await stream.receive_some(65536):
        pass


@kinds
async def test_without_the_clock_nobody_is_cut_off_until_the_end(
    kind: str, tls: Tls, clock: MockClock
) -> None:
    async with (
        serving(
            kind,
            tls,
            server={"drain_seconds": 2},
            stream={"stall_seconds": 0, "total_seconds": 0, "idle_seconds": 0},
        ) as (gateway, engine, trusted),
        stuck(kind, gateway.url, trusted),
    ):
        await engine.call()
        await trio.sleep(500)
        assert gateway.records == []
        since = trio.current_time()
        gateway.service.drain()
        await gateway.ended.wait()
        assert trio.current_time() - since < 2 + 3
        assert [record["outcome"] for record in gateway.records] == ["drained"]


@kinds
async def test_drain_ends_in_time_with_clients_that_never_read(kind: str, tls: Tls, clock: MockClock) -> None:
    async with (
        serving(kind, tls, server={"drain_seconds": 2}) as (gateway, engine, trusted),
        stuck(kind, gateway.url, trusted),
        stuck(kind, gateway.url, trusted),
    ):
        await engine.call(1)
        await trio.sleep(5)
        since = trio.current_time()
        gateway.service.drain()
        await gateway.ended.wait()
        assert trio.current_time() - since < 2 + 3
        assert [record["outcome"] for record in gateway.records] == ["drained"] * 2


async def test_the_engine_s_slot_is_free_as_soon_as_the_engine_has_finished(clock: MockClock) -> None:
    """What the client doesn't take waits in the spool and in the kernel, not in the engine."""
    engine = ScriptedEngine(Stream(tokens=1000), slots=1)
    async with (
        running_gateway(engine, stream={"stall_seconds": STALL_SECONDS}, seconds=LONG) as gateway,
        raw2(gateway.url, opening=f.PREFACE + f.settings((4, 0)), credit=False) as connection,
    ):
        await connection.send(f.post(1, BODY))
        call = await engine.call()
        await call.finished()
        await gateway.in_phase("draining")
        assert (await gateway.ledger())["engines"]["engine"]["free"] == 1
        record = await gateway.record(outcome="client_stalled")
        assert (record["status"], record["phase"]) == (499, "draining")


async def test_one_closed_window_is_the_fault_of_its_own_stream(clock: MockClock) -> None:
    engine = ScriptedEngine(endless, slots=4)
    opening = f.PREFACE + f.settings((4, 0)) + f.window(0, 1 << 20)
    async with (
        running_gateway(engine, stream={"stall_seconds": STALL_SECONDS}, seconds=LONG) as gateway,
        raw2(gateway.url, opening=opening, credit=False) as connection,
    ):
        await connection.send(f.post(1, BODY), f.post(3, BODY))
        for _ in range(40):
            await trio.sleep(1)
            await connection.send(f.window(3, 1000))
        await connection.over(1)
        assert 3 not in connection.resets
        await gateway.record(outcome="client_stalled")
        assert engine.running == 1
        received = len(connection.body(3))
        await connection.send(f.window(3, 10_000))
        await connection.until(lambda: len(connection.body(3)) > received)
        bystander = json.dumps(CHAT.payload(stream=True, user="bystander")).encode()
        await connection.send(f.post(5, bystander), f.window(5, 100_000))
        await connection.over(5)
        assert connection.body(5) == whole()
        await connection.send(f.reset(3))
        await gateway.record(outcome="client_gone")


async def test_a_connection_whose_only_stream_stalled_is_idle_and_closed_as_such(clock: MockClock) -> None:
    engine = ScriptedEngine(endless)
    async with (
        running_gateway(engine, stream={"stall_seconds": STALL_SECONDS}, seconds=LONG) as gateway,
        raw2(gateway.url, opening=f.PREFACE + f.settings((4, 0)), credit=False) as connection,
    ):
        await connection.send(f.post(1, BODY))
        await connection.over(1)
        since = trio.current_time()
        await connection.until(lambda: connection.gone)
        assert connection.goaway == f.NO_ERROR
        assert 70 < trio.current_time() - since < 80


async def test_resets_are_seen_while_their_connection_is_full(clock: MockClock) -> None:
    engine = ScriptedEngine(endless, slots=4)
    async with (
        running_gateway(engine, stream={"stall_seconds": STALL_SECONDS}, seconds=LONG) as gateway,
        raw2(gateway.url, opening=WIDE, credit=False) as connection,
    ):
        await connection.answered()
        await connection.stop_reading()
        theirs = BODY.replace(b"{", b'{"user":"3",', 1)
        await connection.send(f.post(1, BODY), f.post(3, theirs), f.post(5, BODY))
        await engine.call(2)
        (third,) = [call for call in engine.calls if call.json.get("user") == "3"]
        await trio.sleep(STALL_SECONDS / 2)
        assert gateway.records == []
        await connection.send(f.reset(3))
        since = trio.current_time()
        await third.closed()
        assert trio.current_time() - since < 1
        await gateway.record(outcome="client_gone")
        await engine.calls[0].closed()
        await gateway.recorded(2, outcome="client_stalled")


@pytest.mark.parametrize("kind", ["full", "full, tls"])
async def test_goaway_on_a_full_connection_is_seen_at_once(kind: str, tls: Tls, clock: MockClock) -> None:
    async with (
        serving(kind, tls) as (gateway, engine, trusted),
        raw2(gateway.url, tls=trusted, opening=WIDE, credit=False) as connection,
    ):
        await connection.answered()
        await connection.stop_reading()
        await connection.send(f.post(1, BODY))
        call = await engine.call()
        await trio.sleep(5)
        since = trio.current_time()
        await connection.send(f.goaway())
        await call.closed()
        assert trio.current_time() - since < 0.1
        await gateway.record(outcome="client_gone")


@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_a_stuck_client_that_leaves_has_left_and_not_stalled(leave: str, clock: MockClock) -> None:
    engine = ScriptedEngine(endless)
    async with (
        running_gateway(engine, stream={"stall_seconds": STALL_SECONDS}, seconds=LONG) as gateway,
        http1(gateway.url) as client,
    ):
        await client.post(CHAT.path, CHAT.payload(stream=True))
        call = await engine.call()
        await trio.sleep(5)
        since = trio.current_time()
        await (client.close() if leave == "close" else client.reset())
        await call.closed()
        assert trio.current_time() - since < 0.1
        await gateway.record(outcome="client_gone")


async def test_unix_socket_client_that_never_reads_is_cut_off(tmp_path: Path, clock: MockClock) -> None:
    engine = ScriptedEngine(endless)
    server = {"listen": [f"unix:{tmp_path}/gateway"]}
    async with (
        running_gateway(
            engine, server=server, stream={"stall_seconds": STALL_SECONDS}, seconds=LONG
        ) as gateway,
        http1(gateway.url) as client,
    ):
        await client.post(CHAT.path, CHAT.payload(stream=True))
        await gateway.record(outcome="client_stalled")
        with pytest.raises(Truncated):
            await client.answer()
