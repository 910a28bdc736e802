"""What comes to a TLS port and isn't TLS, or is and stops: forgotten without a word; nobody else notices."""

from __future__ import annotations

import ssl
from contextlib import suppress
from typing import Any

import pytest
import trio

from gateway.server import plane
from gateway.server.connection import Connection
from tests.conftest import Tls
from tests.support.http1 import GONE, Http1, connect
from tests.wire import frames as f
from tests.wire.around import Scene, scene
from tests.wire.raw2 import Raw2


def record(kind: int, payload: bytes, version: bytes = b"\x03\x01", length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return bytes([kind]) + version + size.to_bytes(2, "big") + payload


def hello(trusted: ssl.SSLContext) -> bytes:
    """A client's first flight, as the library makes it."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    secure = trusted.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with suppress(ssl.SSLWantReadError):
        secure.do_handshake()
    return outgoing.read()


GARBAGE = {
    "nothing": b"",
    "noise": b"\x00\xff\xfe\x01" * 300,
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/2 with prior knowledge": f.PREFACE + f.settings(),
    "SSL 2": b"\x80\x2e\x01\x00\x02\x00\x15\x00\x00\x00\x10" + b"\x00" * 37,
    "SSL 3": record(22, b"\x01\x00\x00\x2c\x03\x00" + b"\x00" * 42, b"\x03\x00"),
    "TLS 1.0": record(22, b"\x01\x00\x00\x2d\x03\x01" + b"\x00" * 32 + b"\x00\x00\x02\x00\x2f\x01\x00"),
    "a record of nothing": record(22, b""),
    "a thousand records of nothing": record(22, b"") * 1000,
    "a record longer than allowed": record(22, b"\x01" * 100, length=65_535),
    "a record of nobody's kind": record(99, b"x" * 50),
    "data before any handshake": record(23, b"x" * 50),
    "an alert": record(21, b"\x02\x28"),
    "a warning, a hundred times": record(21, b"\x01\x00") * 100,
    "a heartbeat that bleeds": record(24, b"\x01\xff\xff"),
    "a hello longer than it is": record(22, b"\x01\xff\xff\xff\x03\x03" + b"\x00" * 32),
    "a hello without ciphers": record(
        22, b"\x01\x00\x00\x29\x03\x03" + b"\x00" * 32 + b"\x00\x00\x00\x01\x00"
    ),
    "another handshake message": record(22, b"\x14\x00\x00\x0c" + b"\x00" * 12),
    "65 KB of a handshake": record(22, b"\x01\x00\xff\xff\x03\x03" + b"\x00" * 16_000)
    + record(22, b"\x00" * 16_000) * 3,
}


@pytest.mark.parametrize("ending", ["fin", "rst", "half-close"])
async def test_garbage(ending: str, tls: Tls) -> None:
    async with scene(tls, seconds=60) as here:
        for data in GARBAGE.values():
            for cut in {len(data), len(data) // 2, 1}:
                client = await plainly(here)
                with suppress(*GONE):
                    await client.send(data[:cut])
                    if ending == "half-close":
                        await client.half_close()
                with trio.move_on_after(0.005):
                    await client.eof()
                await (client.reset() if ending == "rst" else client.close())
            await here.still_there()


async def plainly(here: Scene) -> Http1:
    return Http1(await connect(here.url.replace("https", "http")))


@pytest.mark.parametrize("ending", ["fin", "rst", "half-close"])
async def test_handshakes_that_stop_anywhere(ending: str, tls: Tls) -> None:
    flight = hello(tls.trusted)
    async with scene(tls, seconds=60) as here:
        for at in [*range(1, len(flight), 40), len(flight)]:
            client = await plainly(here)
            await client.send(flight[:at])
            if at == len(flight):
                assert await client.stream.receive_some(10) != b""  # the server's flight
            if ending == "half-close":
                await client.half_close()
                await client.eof()
            await (client.reset() if ending == "rst" else client.close())
        await here.still_there()


async def test_many_handshakes_that_stop_keep_nobody_waiting(tls: Tls) -> None:
    flight = hello(tls.trusted)
    async with scene(tls, seconds=60) as here:
        clients = [await plainly(here) for _ in range(100)]
        for number, client in enumerate(clients):
            await client.send(flight[: number * 5])
        await here.still_there()
        client = Http1(await connect(here.url, tls=here.trusted))
        assert (await client.ask("/v1/models")).status == 200
        for each in [client, *clients]:
            await each.close()


async def test_a_handshake_and_nothing_more(tls: Tls) -> None:
    async with scene(tls) as here:
        for ending in ("close", "reset"):
            for alpn in (["h2"], ["http/1.1"], ["spdy/3"], ["h2", "http/1.1"]):
                client = Http1(await connect(here.url, tls=here.trusted, alpn=alpn))
                await (client.close() if ending == "close" else client.reset())
        await here.still_there()


@pytest.mark.parametrize("alpn", [["http/1.1"], ["spdy/3"]])
async def test_without_http2_agreed_upon_http1_is_spoken(alpn: list[str], tls: Tls) -> None:
    async with scene(tls) as here:
        client = Http1(await connect(here.url, tls=here.trusted, alpn=alpn))
        assert (await client.ask("/v1/models")).status == 200
        await client.close()


async def test_http1_where_http2_was_agreed_upon_ends_its_connection(tls: Tls) -> None:
    async with scene(tls) as here:
        client = Http1(await connect(here.url, tls=here.trusted, alpn=["h2"]))
        await client.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP/1.1" not in await client.eof()
        await client.close()


async def test_http2_where_http1_was_agreed_upon_is_served(tls: Tls) -> None:
    async with scene(tls) as here, trio.open_nursery() as nursery:
        connection = Raw2(await connect(here.url, tls=here.trusted, alpn=["http/1.1"]))
        nursery.start_soon(connection.read)
        await connection.send(f.PREFACE, f.settings(), f.headers(1, f.head(b"/v1/models", b"GET")))
        await connection.over(1)
        assert connection.status(1) == 200
        await trio.aclose_forcefully(connection.stream)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("place", ["at once", "in a request", "behind a request"])
async def test_a_record_that_was_tampered_with(place: str, tls: Tls) -> None:
    async with scene(tls) as here:
        client = Http1(await connect(here.url, tls=here.trusted))
        assert isinstance(client.stream, trio.SSLStream)
        if place == "in a request":
            await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
        elif place == "behind a request":
            assert (await client.ask("/v1/models")).status == 200
        await client.stream.transport_stream.send_all(record(23, b"x" * 100, b"\x03\x03"))
        await client.eof()
        await client.close()
        await here.still_there()


async def test_older_versions_are_refused(tls: Tls) -> None:
    trusted = tls.trusted
    trusted.minimum_version = ssl.TLSVersion.TLSv1_2
    trusted.maximum_version = ssl.TLSVersion.TLSv1_2
    async with scene(tls) as here:
        client = Http1(await connect(here.url, tls=trusted))
        assert (await client.ask("/v1/models")).status == 200
        await client.close()
        weak = tls.trusted
        weak.maximum_version = ssl.TLSVersion.TLSv1_2
        weak.set_ciphers("AES128-SHA")  # no forward secrecy
        with pytest.raises(trio.BrokenResourceError):
            await connect(here.url, tls=weak)


async def test_who_is_cut_off_within_the_handshake_is_no_fault_of_ours(
    tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Connection] = []

    class Noted(Connection):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(plane, "Connection", Noted)
    async with scene(tls) as here:
        client = await plainly(here)
        await client.send(hello(tls.trusted)[:20])
        await trio.testing.wait_all_tasks_blocked(0.01)
        made[-1].abort()
        with suppress(*GONE):
            await client.eof()
        await client.close()
