"""Connections are bounded in number, and each in the time it may be idle or slow: then its clock closes it.

The time is virtual, but where the operating system's limits are under test.
"""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from gateway.server.clocks import KEEP_ALIVE_SECONDS, TLS_HANDSHAKE_SECONDS
from tests.conftest import Tls
from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import GONE, Http1, connect, http1, request_bytes
from tests.support.process import gateway_process
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import honest
from tests.wire import frames as f
from tests.wire.around import BODY, TRANSPORTS, quiet_log, scene
from tests.wire.raw2 import raw2

REFUSED = "connection refused"
VIRTUAL_SECONDS = 2000
MODELS = request_bytes("/v1/models", method="GET")


@pytest.fixture
def clock(autojump_clock: MockClock) -> MockClock:
    return autojump_clock


@asynccontextmanager
async def talking() -> AsyncIterator[tuple[Http1, Gateway]]:
    async with (
        running_gateway(ScriptedEngine(honest), seconds=VIRTUAL_SECONDS) as gateway,
        http1(gateway.url) as client,
    ):
        yield client, gateway


async def closed_after(client: Http1, since: float) -> float:
    assert await client.eof() == b""
    return trio.current_time() - since


def about(seconds: float) -> object:
    return pytest.approx(seconds, abs=2)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_more_connections_than_allowed_are_closed_as_they_come(transport: str, tls: Tls) -> None:
    async with (
        scene(
            tls if transport == "tls" else None, allowed=(REFUSED,), server={"max_connections": 12}
        ) as here,
        AsyncExitStack() as stack,
    ):
        idle = [await stack.enter_async_context(http1(here.url, tls=here.trusted)) for _ in range(10)]
        for client in idle:
            assert (await client.ask("/v1/models")).status == 200
        for _ in range(20):
            with suppress(*GONE):  # a handshake doesn't even begin
                async with http1(here.url, tls=here.trusted) as late:
                    await late.send(MODELS)
                    assert await late.stream.receive_some(100) == b""
        await here.still_there()
        assert (await idle[0].ask("/v1/models")).status == 200
        for client in idle[1:4]:
            await client.close()
        async with http1(here.url, tls=here.trusted) as client:
            assert (await client.ask("/v1/models")).status == 200


async def test_thousands_of_idle_connections_are_held_and_let_go(clock: MockClock) -> None:
    with quiet_log():
        async with running_gateway(ScriptedEngine(honest), seconds=VIRTUAL_SECONDS) as gateway:
            clients = [Http1(await connect(gateway.url)) for _ in range(300)]
            since = trio.current_time()
            async with http1(gateway.url) as client:
                assert (await client.ask("/v1/models")).status == 200
            for client in clients:
                assert await client.eof() == b""
            assert trio.current_time() - since == about(KEEP_ALIVE_SECONDS)
            for client in clients:
                await client.close()


@pytest.mark.parametrize("start", [b"", b"GET /", MODELS[:-2]])
async def test_a_head_that_doesn_t_come(start: bytes, clock: MockClock) -> None:
    async with talking() as (client, _):
        since = trio.current_time()
        await client.send(start)
        assert await closed_after(client, since) == about(KEEP_ALIVE_SECONDS)


async def test_a_head_that_comes_a_byte_a_second(clock: MockClock) -> None:
    async with talking() as (client, _), trio.open_nursery() as nursery:

        async def drip() -> None:
            with suppress(*GONE):
                await client.send(MODELS[:-2] + b"A: ")
                while True:
                    await trio.sleep(1)
                    await client.send(b"x")

        since = trio.current_time()
        nursery.start_soon(drip)
        assert await closed_after(client, since) == about(KEEP_ALIVE_SECONDS)
        nursery.cancel_scope.cancel()


async def test_a_body_that_comes_a_byte_a_second(clock: MockClock) -> None:
    async with talking() as (client, gateway):
        since = trio.current_time()
        await client.send(request_bytes(CHAT.path, headers={"Content-Length": "10000"}))
        for _ in range(35):
            await client.send(b" ")
            await trio.sleep(1)
        answer = await client.answer()
        assert (answer.status, answer.json["error"]["code"]) == (408, "body_timeout")
        record = await gateway.record(code="body_timeout")
        assert record["duration_ms"] == pytest.approx(30_000, abs=100)
        assert await closed_after(client, since) < 35 + KEEP_ALIVE_SECONDS + 2


async def test_a_kept_alive_connection_is_closed_when_nothing_more_comes(clock: MockClock) -> None:
    async with talking() as (client, _):
        for _ in range(3):
            assert (await client.ask(CHAT.path, CHAT.payload(stream=False))).status == 200
            await trio.sleep(KEEP_ALIVE_SECONDS - 5)
        assert (await client.ask("/v1/models")).status == 200
        assert await closed_after(client, trio.current_time()) == about(KEEP_ALIVE_SECONDS)


async def test_the_rest_of_a_refused_body_that_doesn_t_come(clock: MockClock) -> None:
    async with talking() as (client, _):
        await client.send(request_bytes("/no-such", headers={"Content-Length": "1000"}))
        assert (await client.answer()).status == 404
        assert await closed_after(client, trio.current_time()) == about(KEEP_ALIVE_SECONDS)


HTTP2_IDLE = {
    "nothing but a greeting": b"",
    "an answered request": f.headers(1, f.head(b"/v1/models", b"GET")),
    "a reset request": f.headers(1, f.head(), end=False) + f.reset(1),
    "a malformed request": f.headers(1, [(b"A", b"b")]),
    "a refused body": f.headers(1, f.head(b"/no-such"), end=False),
}


@pytest.mark.parametrize("what", HTTP2_IDLE)
@pytest.mark.parametrize("pinging", [False, True], ids=["silent", "pinging"])
async def test_an_idle_http2_connection_is_told_to_go(what: str, pinging: bool, clock: MockClock) -> None:
    async with (
        running_gateway(ScriptedEngine(honest), seconds=VIRTUAL_SECONDS) as gateway,
        raw2(gateway.url) as connection,
        trio.open_nursery() as nursery,
    ):

        async def ping() -> None:
            while pinging:
                await trio.sleep(10)
                await connection.send(f.ping())

        await connection.send(HTTP2_IDLE[what])
        await connection.answered()
        if HTTP2_IDLE[what] and "reset" not in what:
            await connection.over(1)
        since = trio.current_time()
        nursery.start_soon(ping)
        await connection.until(lambda: connection.goaway is not None)
        assert trio.current_time() - since == about(KEEP_ALIVE_SECONDS)
        assert connection.goaway == f.NO_ERROR
        nursery.cancel_scope.cancel()


async def test_an_http2_connection_with_a_running_stream_is_not_idle(clock: MockClock) -> None:
    async with (
        running_gateway(ScriptedEngine(honest), seconds=VIRTUAL_SECONDS) as gateway,
        raw2(gateway.url) as connection,
    ):
        await connection.send(f.headers(1, f.head(), end=False))
        for _ in range(4):
            number = len(connection.heads) * 2 + 3
            await connection.send(f.headers(number, f.head(b"/v1/models", b"GET")))
            await connection.over(number)
            await trio.sleep(5)
        await connection.send(f.data(1, BODY, end=True))
        await connection.over(1)
        assert connection.status(1) == 200


@pytest.mark.parametrize("start", [b"", b"\x16\x03\x01\x02\x00", b"\x16\x03\x01"])
async def test_a_tls_handshake_that_stops(start: bytes, tls: Tls, clock: MockClock) -> None:
    with quiet_log():
        async with running_gateway(
            ScriptedEngine(honest), server={"tls": tls.section}, seconds=VIRTUAL_SECONDS
        ) as gateway:
            since = trio.current_time()
            client = Http1(await connect(gateway.url.replace("https", "http")))
            await client.send(start)
            assert await closed_after(client, since) == about(TLS_HANDSHAKE_SECONDS)
            await client.close()


@pytest.mark.slow
async def test_no_descriptor_left_is_waited_out(tmp_path: Path) -> None:
    """The operating system's limit is below our own: whoever can't be accepted waits, and one line tells."""
    engine = ScriptedEngine(honest)
    async with gateway_process(tmp_path, engine) as gateway:
        resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, (40, 40))
        clients = [Http1(await connect(gateway.url)) for _ in range(60)]
        await trio.sleep(1)
        late = clients[-1]
        await late.send(request_bytes(CHAT.path, CHAT.payload(stream=True)))
        for client in clients[:-1]:
            await client.close()
        with trio.fail_after(10):
            assert (await late.answer()).status == 200
        await late.close()
        told = [line for line in gateway.lines if b"accept" in line]
        assert len(told) == 1, told
        assert not gateway.exited.is_set()
