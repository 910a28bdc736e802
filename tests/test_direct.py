"""What our own transport refuses of an engine, beyond what both transports have in common."""

from __future__ import annotations

import pytest

from gateway.errors import Code, EngineError
from tests.support.scripts import End, Raw
from tests.test_transport import WHOLE, call, far, hello

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_bytes_behind_a_response_are_no_part_of_it_and_end_its_connection() -> None:
    behind = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad"
    async with far(Raw([WHOLE + behind])) as there:
        assert await there.ask(call()) == b"hi"
        assert await there.ask(call()) == b"hi"
        assert there.scripted.accepted == 2


async def test_trailers_are_dropped() -> None:
    script = Raw([CHUNKED + b"2\r\nhi\r\n0\r\nSet-Cookie: evil\r\n\r\n"])
    async with far(script) as there, there.open(call()) as answer:
        assert await answer.receive() == b"hi"
        assert await answer.receive() == b""
        assert [name.lower() for name, _ in answer.headers] == [b"transfer-encoding"]


async def test_another_transfer_encoding_is_a_failure() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"
    async with far(Raw([head + b"2\r\nhi\r\n0\r\n\r\n"])) as there:
        with pytest.raises(EngineError) as caught:
            await there.ask(call())
        assert caught.value.code is Code.ENGINE_FAILED
        assert "transfer encoding" in str(caught.value.detail)


async def test_half_a_head_on_a_kept_connection_is_no_stale_connection() -> None:
    async with far(Raw([b"HTTP/1.1 200 OK\r\nContent-", 0.02, End.RST]), hello) as there:
        await there.ask(call())
        with pytest.raises(EngineError) as caught:
            await there.ask(call())
        assert (caught.value.code, caught.value.stale) == (Code.ENGINE_FAILED, False)


async def test_white_space_around_a_value_is_no_part_of_it() -> None:
    """RFC 9112, 5.1. On HTTP/2 it would make the whole head one that isn't allowed."""
    head = b"HTTP/1.1 200 OK\r\nX-A: \t a b \t \r\nX-B:\r\nContent-Length: 2 \r\n\r\n"
    async with far(Raw([head + b"hi"])) as there, there.open(call()) as answer:
        assert answer.headers == [(b"X-A", b"a b"), (b"X-B", b""), (b"Content-Length", b"2")]
        assert await answer.receive() == b"hi"
