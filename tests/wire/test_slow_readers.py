"""Clients that read slowly, and clients that only wait, are alive: the clocks that find the dead let them be.

A reader's pace is that of its socket: small segments, a small buffer, a few hundred bytes at a time.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gateway.server import connection as server_connection
from tests.conftest import Tls
from tests.support.gateway import running_gateway
from tests.support.http1 import Http1, http1, request_bytes
from tests.support.http2 import http2 as http2_client
from tests.support.routes import CHAT, DONE
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Sse, Stream
from tests.wire import frames as f
from tests.wire.around import BODY
from tests.wire.raw2 import Raw2, raw2

BYTES_PER_SECOND = 4000
STALL_SECONDS = 3
PIECES = [b"data: " + b"x" * 990 + b"\n\n"] * 40 + [DONE]
TIMES = 5
"""Over HTTP/2 so many times as much, as fast: more than what waits in the gateway for the socket."""
WIDE = f.PREFACE + f.settings((4, 0x7FFFFFFF)) + f.window(0, 0x7FFF0000 - 65535)


class Paced(trio.abc.Stream):
    """A TCP connection that is read at a pace, until it is to be read no more."""

    def __init__(self, stream: trio.SocketStream, pace: int) -> None:
        self.transport_stream = stream
        self.pace = pace
        self.socket = stream.socket
        self.taken = 0

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        data = bytes(await self.transport_stream.receive_some(self.pace // 10))
        self.taken += len(data)
        await trio.sleep(len(data) / self.pace)
        return data

    async def send_all(self, data: Any) -> None:
        await self.transport_stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.transport_stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self.transport_stream.aclose()


async def paced(url: str, pace: int = BYTES_PER_SECOND, *, buffer: int = 2304) -> Paced:
    host, _, port = url.partition("://")[2].rpartition(":")
    raw = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1460)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    await raw.connect((host, int(port)))
    return Paced(trio.SocketStream(raw), pace)


def secured(stream: Paced, context: ssl.SSLContext) -> Any:
    context.set_alpn_protocols(["http/1.1"])
    return trio.SSLStream(stream, context, server_hostname="127.0.0.1", https_compatible=True)


async def read_http1(stream: Any) -> bytes:
    client = Http1(stream)
    await client.send(request_bytes(CHAT.path, CHAT.payload(stream=True)))
    answer = await client.answer()
    await client.close()
    return answer.body


async def read_http2(stream: Any) -> bytes:
    connection = Raw2(stream, credit=False)
    async with trio.open_nursery() as nursery:
        await connection.send(WIDE, f.post(1, BODY))
        nursery.start_soon(connection.read)
        await connection.over(1)
        assert 1 in connection.ended
        await trio.aclose_forcefully(stream)
        nursery.cancel_scope.cancel()
    return connection.body(1)


@pytest.mark.slow
async def test_slow_readers_get_their_whole_answers(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes them ten seconds, which is longer than any clock here would wait for a dead one."""
    monkeypatch.setattr(server_connection, "PING_AFTER_SECONDS", 1.5)
    more: dict[str, Any] = {"stream": {"stall_seconds": STALL_SECONDS}, "seconds": 60}
    hasty = {**more, "stream": {"stall_seconds": 1}}
    long = [*PIECES[:-1] * TIMES, DONE]
    # In one piece it would be one packet buffer, of which nothing is heard until it is read whole.
    event = [b"data: " + b"x" * 80_000 + b"\n\n", DONE]
    async with (
        running_gateway(ScriptedEngine(Sse(list(PIECES))), **more) as plain,
        running_gateway(ScriptedEngine(Sse(list(PIECES))), server={"tls": tls.section}, **more) as secure,
        running_gateway(ScriptedEngine(Sse(list(long))), **more) as http2,
        running_gateway(ScriptedEngine(Sse(list(event))), **hasty) as large,
        trio.open_nursery() as nursery,
    ):

        async def whole(read: Any, client: Any, pieces: list[bytes]) -> None:
            since = trio.current_time()
            assert await read(client) == b"".join(pieces)
            assert trio.current_time() - since > 2 * STALL_SECONDS

        nursery.start_soon(whole, read_http1, await paced(plain.url), PIECES)
        nursery.start_soon(
            whole, read_http1, await paced(large.url, 2 * BYTES_PER_SECOND, buffer=16_384), event
        )
        nursery.start_soon(whole, read_http1, secured(await paced(secure.url), tls.trusted), PIECES)
        nursery.start_soon(whole, read_http2, await paced(http2.url, TIMES * BYTES_PER_SECOND), long)


async def test_a_slow_reader_that_stops_is_cut_off() -> None:
    engine = ScriptedEngine(Sse(list(PIECES)))
    async with running_gateway(engine, stream={"stall_seconds": 1}) as gateway:
        client = await paced(gateway.url)
        await client.send_all(request_bytes(CHAT.path, CHAT.payload(stream=True)))
        while client.taken < 6000:
            await client.receive_some()
        assert gateway.records == []
        await gateway.record(outcome="client_stalled")
        await client.aclose()


async def test_a_client_that_only_waits_answers_pings_and_lives(autojump_clock: MockClock) -> None:
    engine = ScriptedEngine(Stream(prefill=900.0))
    async with (
        running_gateway(engine, stream={"first_byte_seconds": 0}, seconds=2000) as gateway,
        http2_client(gateway.url) as connection,
    ):
        stream = await connection.post(CHAT.path, CHAT.payload(stream=True))
        assert (await stream.rest()).endswith(DONE)
        assert trio.current_time() >= 900


async def test_a_client_that_answers_no_ping_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its TCP takes everything, but nobody is behind it."""
    monkeypatch.setattr(server_connection, "PING_AFTER_SECONDS", 0.7)
    engine = ScriptedEngine(Stream(prefill=trio.Event()))
    async with running_gateway(engine) as gateway, raw2(gateway.url) as connection:
        await connection.answered()
        await connection.stop_reading()
        await connection.send(f.post(1, BODY))
        since = trio.current_time()
        call = await engine.call()
        await call.closed()
        assert trio.current_time() - since >= 2 * 0.7
        await gateway.record(outcome="client_gone")


async def test_an_http1_client_may_wait_for_an_hour(autojump_clock: MockClock) -> None:
    """No clock of the server's measures a silence that we asked for."""
    engine = ScriptedEngine(Stream(prefill=3000.0))
    never = {"first_byte_seconds": 0, "total_seconds": 0}
    async with running_gateway(engine, stream=never, seconds=4000) as gateway, http1(gateway.url) as client:
        answer = await client.ask(CHAT.path, CHAT.payload(stream=True))
        assert answer.body.endswith(DONE)
        assert trio.current_time() >= 3000
