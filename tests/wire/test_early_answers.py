"""Answers that are out before the request has arrived: their clients see them, while they are still sending.

What can be used afterwards is used: an HTTP/2 connection always, one of HTTP/1.1 when little is left to come.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from tests.conftest import Tls
from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import Http1, connect, http1, request_bytes
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Stream, honest
from tests.wire import frames as f
from tests.wire.around import BODY, TRANSPORTS
from tests.wire.raw2 import Raw2, raw2

LIMIT = 100_000
MIB = 1 << 20
transports = pytest.mark.parametrize("transport", TRANSPORTS)

REFUSED = {
    "no such path": (404, "/no-such", {}),
    "multipart": (501, CHAT.path, {"Content-Type": "multipart/form-data; boundary=x"}),
    "too large": (413, CHAT.path, {}),
}
"""Refused from their heads alone, if the body's length is announced."""
refused = pytest.mark.parametrize("reason", REFUSED)


@asynccontextmanager
async def serving(transport: str, tls: Tls, **more: Any) -> AsyncIterator[tuple[Gateway, Any]]:
    secure = transport == "tls"
    server = {"max_body_bytes": LIMIT, **({"tls": tls.section} if secure else {}), **more}
    async with running_gateway(ScriptedEngine(honest), server=server) as gateway:
        yield gateway, tls.trusted if secure else None


@asynccontextmanager
async def talking(transport: str, tls: Tls, **more: Any) -> AsyncIterator[tuple[Http1, Gateway]]:
    async with (
        serving(transport, tls, **more) as (gateway, trusted),
        http1(gateway.url, tls=trusted) as client,
    ):
        yield client, gateway


@asynccontextmanager
async def connected(transport: str, tls: Tls) -> AsyncIterator[Raw2]:
    async with serving(transport, tls) as (gateway, trusted), raw2(gateway.url, tls=trusted) as connection:
        yield connection


def head(reason: str, length: int | None, more: dict[str, str] | None = None) -> bytes:
    _, path, headers = REFUSED[reason]
    framing = {"Transfer-Encoding": "chunked"} if length is None else {"Content-Length": str(length)}
    return request_bytes(path, headers={**headers, **framing, **(more or {})})


@transports
@refused
@pytest.mark.parametrize("length", [LIMIT + 1, 500_000, MIB])
async def test_what_is_left_of_a_small_body_is_dropped_and_the_connection_goes_on(
    length: int, reason: str, transport: str, tls: Tls
) -> None:
    async with talking(transport, tls) as (client, _):
        for _ in range(2):
            await client.send(head(reason, length))
            answer = await client.answer()
            assert answer.status == REFUSED[reason][0]
            assert "connection" not in answer.head
            for _ in range(length // 50_000):
                await client.send(b"x" * 50_000)
            await client.send(b"x" * (length % 50_000) + b"\r\n")
        assert (await client.ask(CHAT.path, CHAT.payload(stream=False))).status == 200


@transports
@refused
async def test_a_large_body_s_connection_lingers_and_closes(reason: str, transport: str, tls: Tls) -> None:
    """The client sends it all, as many do, and only then reads."""
    async with talking(transport, tls) as (client, _):
        await client.send(head(reason, 4_000_000))
        for _ in range(80):
            await client.send(b"x" * 50_000)
        assert (await client.answer()).status == REFUSED[reason][0]
        assert await client.eof() == b""


@transports
async def test_chunks_are_refused_once_there_are_too_many_and_the_client_sees_it(
    transport: str, tls: Tls
) -> None:
    async with talking(transport, tls) as (client, gateway):
        await client.send(head("too large", None))
        for _ in range(80):
            await client.send(b"c350\r\n" + b"x" * 50_000 + b"\r\n")
        await client.send(b"0\r\n\r\n")
        assert (await client.answer()).status == 413
        assert await client.eof() == b""
        await gateway.record(outcome="rejected", status=413, code="body_too_large")


@pytest.mark.parametrize("reason", ["no such path", "multipart"])
async def test_chunks_refused_from_their_head(reason: str) -> None:
    async with running_gateway(ScriptedEngine(honest)) as gateway, http1(gateway.url) as client:
        await client.send(head(reason, None) + b"5\r\nhello\r\n")
        assert (await client.answer()).status == REFUSED[reason][0]
        await client.send(b"5\r\nhello\r\n0\r\n\r\n")
        assert await client.eof() == b""


@transports
@refused
async def test_a_refused_body_is_not_asked_for(reason: str, transport: str, tls: Tls) -> None:
    """Whether the client sends it all the same nobody knows; so this connection takes no other request."""
    async with talking(transport, tls) as (client, _):
        await client.send(head(reason, 500_000, {"Expect": "100-continue"}))
        answer = await client.answer()
        assert answer.status == REFUSED[reason][0]
        assert answer.head["connection"] == "close"
        await client.send(request_bytes("/v1/models", method="GET"))
        assert await client.eof() == b""


async def test_an_expected_body_is_asked_for_when_it_is_wanted() -> None:
    async with running_gateway(ScriptedEngine(honest)) as gateway, http1(gateway.url) as client:
        for _ in range(2):
            length = {"Content-Length": str(len(BODY)), "Expect": "100-continue"}
            await client.send(request_bytes(CHAT.path, headers=length))
            assert (await client.head(bodyless=True)).status == 100
            await client.send(BODY)
            assert (await client.answer()).status == 200


async def test_an_expected_body_that_comes_unasked_is_taken() -> None:
    async with running_gateway(ScriptedEngine(honest)) as gateway, http1(gateway.url) as client:
        length = {"Content-Length": str(len(BODY)), "Expect": "100-continue"}
        await client.send(request_bytes(CHAT.path, headers=length) + BODY)
        answer = await client.answer()
        if answer.status == 100:
            answer = await client.answer()
        assert answer.status == 200
        assert (await client.ask("/v1/models")).status == 200


async def test_chunks_may_be_expected_too(tls: Tls) -> None:
    async with talking("plain", tls) as (client, _):
        await client.send(head("too large", None, {"Expect": "100-continue"}))
        assert (await client.head(bodyless=True)).status == 100
        for _ in range(4):
            await client.send(b"c350\r\n" + b"x" * 50_000 + b"\r\n")
        assert (await client.answer()).status == 413
        assert await client.eof() == b""


async def test_a_body_that_doesn_t_come_is_not_waited_for_without_end(tls: Tls) -> None:
    async with talking("plain", tls, body_seconds=0.2) as (client, _):
        await client.send(request_bytes(CHAT.path, headers={"Content-Length": "1000"}) + b"{")
        answer = await client.answer()
        assert (answer.status, answer.json["error"]["code"]) == (408, "body_timeout")
        await client.send(b"x" * 999)
        assert (await client.ask("/v1/models")).status == 200


async def draining(gateway: Gateway, engine: ScriptedEngine) -> Http1:
    """A gateway that still serves one client."""
    client = Http1(await connect(gateway.url))
    await client.post(CHAT.path, CHAT.payload(stream=True))
    await engine.call()
    gateway.service.drain()
    return client


@pytest.mark.parametrize("length", [None, 50_000, 4_000_000])
async def test_while_it_drains_a_body_s_client_sees_the_503(length: int | None) -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(Stream(pause_after=1, until=go_on))
    async with running_gateway(engine) as gateway:
        first = await draining(gateway, engine)
        async with http1(gateway.url) as client:
            framing = {"Transfer-Encoding": "chunked"} if length is None else {"Content-Length": str(length)}
            await client.send(request_bytes(CHAT.path, headers=framing))
            piece = b"c350\r\n" + b"x" * 50_000 + b"\r\n" if length is None else b"x" * 50_000
            for _ in range((length or 1_000_000) // 50_000):
                await client.send(piece)
            answer = await client.answer()
            assert (answer.status, answer.json["error"]["code"]) == (503, "draining")
            assert answer.head["connection"] == "close"
            assert await client.eof() == b""
        go_on.set()
        assert (await first.answer()).status == 200
        await first.close()
        await gateway.ended.wait()


# HTTP/2.


@transports
@refused
async def test_http2_stream_is_answered_and_reset_without_fault(
    reason: str, transport: str, tls: Tls
) -> None:
    status, path, more = REFUSED[reason]
    fields = [(name.lower().encode(), value.encode()) for name, value in more.items()]
    fields.append((b"content-length", b"500000"))
    async with connected(transport, tls) as connection:
        await connection.send(f.headers(1, f.head(path.encode(), more=fields), end=False))
        await connection.over(1)
        assert connection.status(1) == status
        await connection.until(lambda: 1 in connection.resets)
        assert connection.resets == {1: f.NO_ERROR}
        await connection.send(f.data(1, b"x" * 16_000) * 3, f.data(1, b"x", end=True))
        await connection.send(f.post(3, BODY))
        await connection.over(3)
        assert connection.status(3) == 200


@transports
async def test_late_data_of_many_answered_streams_leaves_the_connection_s_window_whole(
    transport: str, tls: Tls
) -> None:
    """Six megabytes for streams that were answered long ago: were they not given back, uploads would stop."""
    async with connected(transport, tls) as connection:
        length = [(b"content-length", b"500000")]
        for number in range(1, 201, 2):
            await connection.send(f.headers(number, f.head(more=length), end=False))
            await connection.over(number)
            await connection.send(f.data(number, b"x" * 16_000) * 4)
            await connection.answered()
        assert connection.windows[0] > 100 * 64_000
        await connection.send(f.headers(201, f.head(), end=False))
        await connection.upload(201, BODY.ljust(90_000))
        await connection.over(201)
        assert connection.status(201) == 200


@transports
async def test_an_undeclared_http2_body_is_refused_once_it_is_too_large(transport: str, tls: Tls) -> None:
    async with connected(transport, tls) as connection:
        await connection.send(f.headers(1, f.head(), end=False))
        for sent in range(10_000, 1_000_000, 10_000):
            await connection.send(f.data(1, b"x" * 10_000))
            await connection.until(
                lambda: sent - connection.windows.get(1, 0) < 50_000 or 1 in connection.heads  # noqa: B023
            )
            if 1 in connection.heads:
                break
        await connection.over(1)
        assert connection.status(1) == 413
        assert connection.resets in ({}, {1: f.NO_ERROR})
        await connection.send(f.data(1, b"x" * 10_000), f.post(3, BODY))
        await connection.over(3)
        assert connection.status(3) == 200


async def test_data_that_comes_with_its_own_refusal_leaves_the_window_whole(tls: Tls) -> None:
    """Head and body in one segment: the head is refused when the body has been taken in already."""
    async with connected("plain", tls) as connection:
        bad = f.head(b"/\xff")
        for number in range(1, 801, 2):
            await connection.send(f.headers(number, bad, end=False) + f.data(number, b"x" * 3500))
        await connection.answered()
        await connection.send(f.headers(801, f.head(), end=False))
        await connection.upload(801, BODY.ljust(90_000))
        await connection.over(801)
        assert connection.status(801) == 200
