"""Frames on HTTP/2 that no honest client sends, with prior knowledge and over TLS.

What is a stream's fault ends that stream, and another stream of the same connection comes whole; what is the
connection's fault ends it with a GOAWAY. Nobody on another connection notices either.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import pytest
import trio

from tests.conftest import Tls
from tests.support.routes import CHAT
from tests.wire import frames as f
from tests.wire.around import TRANSPORTS, Scene, scene
from tests.wire.raw2 import Raw2, raw2

BYSTANDER = json.dumps(CHAT.payload(stream=True, user="bystander")).encode()
MODELS = f.head(b"/v1/models", b"GET")
OPEN = f.headers(3, f.head(), end=False)
BAD = f.PROTOCOL_ERROR


def get(*more: tuple[bytes, bytes]) -> bytes:
    return f.headers(3, [*MODELS, *more])


def without(name: bytes) -> bytes:
    return f.headers(3, [field for field in MODELS if field[0] != name])


def instead(name: bytes, value: bytes) -> bytes:
    return f.headers(3, [(name, value) if field[0] == name else field for field in MODELS])


def body(length: bytes, *pieces: bytes) -> bytes:
    """A request whose body isn't as long as it says."""
    return f.headers(3, f.head(more=[(b"content-length", length)]), end=False) + b"".join(pieces)


def fragments(head: f.Fields, count: int, *, size: int) -> bytes:
    """A head, and so many CONTINUATIONs of it at least."""
    fields = f.block(head)
    rest = [fields[at : at + size] for at in range(size, len(fields), size)]
    rest = [*rest, *[b""] * (count - len(rest))]
    first = f.frame(f.HEADERS, f.END_STREAM, 3, fields[:size])
    return first + b"".join(
        f.frame(f.CONTINUATION, f.END_HEADERS if n + 1 == len(rest) else 0, 3, piece)
        for n, piece in enumerate(rest)
    )


RESET: dict[str, tuple[int, bytes]] = {
    "a path outside ASCII": (BAD, instead(b":path", b"/\xff")),
    "a path with a space": (BAD, instead(b":path", b"/v1/models HTTP/1.1")),
    "a path with line ends": (BAD, instead(b":path", b"/v1/models HTTP/1.1\r\nEvil: 1")),
    "a path with NUL": (BAD, instead(b":path", b"/\x00")),
    "a query with DEL": (BAD, instead(b":path", b"/v1/models?\x7f")),
    "an empty path": (BAD, instead(b":path", b"")),
    "no path": (BAD, without(b":path")),
    "two paths": (BAD, f.headers(3, [*MODELS[:2], (b":path", b"/b"), *MODELS[2:]])),
    "a method outside ASCII": (BAD, instead(b":method", b"G\xff")),
    "a method with a space": (BAD, instead(b":method", b"GET /x")),
    "an empty method": (BAD, instead(b":method", b"")),
    "no method": (BAD, without(b":method")),
    "no scheme": (BAD, without(b":scheme")),
    "no authority": (BAD, without(b":authority")),
    "an authority with line ends": (BAD, instead(b":authority", b"x\r\nEvil: 1")),
    "another host than authority": (BAD, get((b"host", b"evil.test"))),
    "a pseudo field nobody knows": (BAD, f.headers(3, [(b":evil", b"1"), *MODELS])),
    "a response's pseudo field": (BAD, f.headers(3, [(b":status", b"200"), *MODELS])),
    "a pseudo field behind others": (BAD, f.headers(3, [MODELS[0], (b"a", b"b"), *MODELS[1:]])),
    "nothing at all": (BAD, f.headers(3, [])),
    "CONNECT without a path": (BAD, f.headers(3, [(b":method", b"CONNECT"), (b":authority", b"x:1")])),
    "CONNECT with a path": (BAD, instead(b":method", b"CONNECT")),
    "a name in capitals": (BAD, get((b"A", b"b"))),
    "an empty name": (BAD, get((b"", b"b"))),
    "a name with a space": (BAD, get((b"a b", b"c"))),
    "a name with a colon": (BAD, get((b"a:b", b"c"))),
    "a name with line ends": (BAD, get((b"a\r\nevil", b"c"))),
    "a name with NUL": (BAD, get((b"a\x00", b"c"))),
    "a name outside ASCII": (BAD, get((b"a\xff", b"c"))),
    "a value with NUL": (BAD, get((b"a", b"\x00"))),
    "a value with a line feed": (BAD, get((b"a", b"b\nevil: 1"))),
    "a value with a carriage return": (BAD, get((b"a", b"b\revil: 1"))),
    "a value with line ends": (BAD, get((b"a", b"b\r\nevil: 1"))),
    "a value with a space before it": (BAD, get((b"a", b" b"))),
    "a Connection field": (BAD, get((b"connection", b"close"))),
    "a Keep-Alive field": (BAD, get((b"keep-alive", b"timeout=5"))),
    "a Proxy-Connection field": (BAD, get((b"proxy-connection", b"close"))),
    "a Transfer-Encoding field": (BAD, get((b"transfer-encoding", b"chunked"))),
    "an Upgrade field": (BAD, get((b"upgrade", b"websocket"))),
    "TE with gzip": (BAD, get((b"te", b"gzip"))),
    "257 fields": (BAD, get(*[(b"a", b"b")] * 257)),
    "two different lengths": (BAD, get((b"content-length", b"5"), (b"content-length", b"6"))),
    "an empty length": (BAD, body(b"")),
    "a negative length": (BAD, body(b"-5")),
    "a length with a plus": (BAD, body(b"+5")),
    "two lengths in one": (BAD, body(b"5, 5")),
    "a length in letters": (BAD, body(b"five")),
    "a length beyond all measure": (BAD, body(b"9" * 5000)),
    "a body longer than it says": (BAD, body(b"3", f.data(3, b"hello"))),
    "a body longer than it says, bit by bit": (BAD, body(b"3", *[f.data(3, b"h")] * 4)),
    "a body shorter than it says": (BAD, body(b"300", f.data(3, b"hello", end=True))),
    "trailers that don't end the stream": (
        BAD,
        OPEN + f.data(3, b"{}") + f.headers(3, [(b"a", b"b")], end=False),
    ),
    "trailers with a pseudo field": (BAD, OPEN + f.data(3, b"{}") + f.headers(3, [(b":path", b"/")])),
    "trailers with a capital": (BAD, OPEN + f.data(3, b"{}") + f.headers(3, [(b"A", b"b")])),
    "a head that depends on itself": (
        BAD,
        f.frame(f.HEADERS, 0x25, 3, b"\x00\x00\x00\x03\x10" + f.block(MODELS)),
    ),
    "a window beyond all measure": (f.FLOW_CONTROL_ERROR, OPEN + f.window(3, 0x7FFFFFFF)),
}

ANSWERED: dict[str, tuple[int, bytes]] = {
    "a value outside ASCII": (200, get((b"a", b"\xff\xfe"))),
    "an authority outside ASCII": (200, instead(b":authority", b"\xff")),
    "an authority of somebody else": (200, instead(b":authority", b"169.254.169.254")),
    "another scheme": (200, instead(b":scheme", b"ftp")),
    "a host beside the authority": (200, get((b"host", b"gateway.test"))),
    "an empty value": (200, get((b"a", b""))),
    "TE with trailers": (200, get((b"te", b"trailers"))),
    "two hundred fields": (200, get(*[(b"a", b"b")] * 200)),
    "sixty cookies": (200, get(*[(b"cookie", b"a=b")] * 60)),
    "the path of OPTIONS": (404, instead(b":path", b"*")),
    "a path without a slash": (404, instead(b":path", b"v1/models")),
    "a path with a host": (404, instead(b":path", b"http://evil.test/v1/models")),
    "a path with a fragment": (404, instead(b":path", b"/#/v1/models")),
    "escapes that aren't UTF-8": (404, instead(b":path", b"/%ff%fe%00%zz")),
    "dots": (404, instead(b":path", b"/v1/../admin/ledger")),
    "a path of 30 KB": (404, fragments(f.head(b"/" + b"x" * 30_000, b"GET"), 2, size=16_000)),
    "a method of its own": (404, instead(b":method", b"PURGE")),
    "WebSocket over HTTP/2": (
        501,
        f.headers(3, [(b":method", b"CONNECT"), (b":protocol", b"websocket"), *MODELS[1:]]),
    ),
    "a head in ten pieces": (200, fragments(MODELS, 10, size=8)),
    "a head in empty pieces": (200, fragments(MODELS, 30, size=30)),
    "a padded head": (200, f.frame(f.HEADERS, 0xD, 3, b"\x05" + f.block(MODELS) + b"\x00" * 5)),
    "a head that depends on another stream": (
        200,
        f.frame(f.HEADERS, 0x25, 3, b"\x80\x00\x00\x01\xff" + f.block(MODELS)),
    ),
    "a body where none is expected": (200, f.headers(3, MODELS, end=False) + f.data(3, b"hello", end=True)),
    "a padded body": (400, OPEN + f.frame(f.DATA, 9, 3, b"\x05[]" + b"\x00" * 5)),
    "a body of padding": (400, OPEN + f.frame(f.DATA, 9, 3, b"\x05" + b"\x00" * 5)),
    "a body and trailers": (400, OPEN + f.data(3, b"[]") + f.headers(3, [(b"a", b"b")])),
    "a body in empty pieces": (
        400,
        OPEN + f.data(3) * 20 + f.data(3, b"[]") + f.data(3) * 20 + f.data(3, end=True),
    ),
    "no body where one was announced": (400, f.headers(3, f.head(more=[(b"content-length", b"5")]))),
}

IGNORED: dict[str, bytes] = {
    "PRIORITY of an idle stream": f.frame(f.PRIORITY, 0, 9, b"\x00\x00\x00\x01\x10"),
    "PRIORITY of itself": f.frame(f.PRIORITY, 0, 3, b"\x00\x00\x00\x03\x10"),
    "PRIORITY of the bystander": f.frame(f.PRIORITY, 0, 1, b"\x80\x00\x00\x03\x00"),
    "a hundred PRIORITYs in a circle": b"".join(
        f.frame(f.PRIORITY, 0, n, (n % 200 + 2 | 1).to_bytes(4, "big") + b"\xff") for n in range(3, 203, 2)
    ),
    "a frame nobody knows": f.frame(0xFA, 0xFF, 0, b"x" * 1000),
    "a frame nobody knows, of an idle stream": f.frame(0xFA, 0xFF, 99, b"x"),
    "ALTSVC": f.frame(0xA, 0, 0, b"\x00\x04evilh2=x"),
    "ORIGIN": f.frame(0xC, 0, 0, b"\x00\x04evil"),
    "a setting nobody knows": f.settings((0x99, 1), (0xFFFF, 0xFFFFFFFF)),
    "the largest settings": f.settings(
        (1, 0xFFFFFFFF), (3, 0xFFFFFFFF), (4, 0x7FFFFFFF), (5, 0xFFFFFF), (6, 0xFFFFFFFF)
    ),
    "the smallest settings": f.settings((1, 0), (2, 0), (3, 0), (5, 16384), (6, 0)),
    "a setting many times": f.settings(*[(4, 65535 + n) for n in range(100)]),
    "an acknowledgement of nothing": f.frame(f.SETTINGS, f.ACK) * 3,
    "a ping's answer without a ping": f.frame(f.PING, f.ACK, 0, b"12345678"),
    "a window for a closed stream": get() + f.reset(3) + f.window(3, 1000),
    "a reset of a closed stream": get() + f.reset(3) * 3,
    "a reset with a code nobody knows": get() + f.reset(3, 0xDEADBEEF),
    "data for a stream it has reset": OPEN + f.reset(3) + f.data(3, b"late") * 3,
}

FATAL: dict[str, tuple[set[int], bytes]] = {
    "noise": ({f.FRAME_SIZE_ERROR}, b"\xff" * 500),
    "a frame of 16 KB and one": ({f.FRAME_SIZE_ERROR}, OPEN + f.data(3, b"x" * 16385)),
    "a frame announced with 16 MB": ({f.FRAME_SIZE_ERROR}, b"\xff\xff\xff\x00\x00\x00\x00\x00\x03x"),
    "data of stream 0": ({BAD}, f.data(0, b"x")),
    "data of an idle stream": ({BAD, f.STREAM_CLOSED}, f.data(5, b"x")),
    "a head of stream 0": ({BAD}, f.headers(0, MODELS)),
    "a head of an even stream": ({BAD}, f.headers(2, MODELS)),
    "a head of an older stream": ({BAD, f.STREAM_CLOSED}, f.headers(9, MODELS) + f.headers(5, MODELS)),
    "a reset of stream 0": ({BAD}, f.reset(0)),
    "a reset too short": ({f.FRAME_SIZE_ERROR, BAD}, get() + f.frame(f.RST_STREAM, 0, 3, b"\x00")),
    "a window of nothing": ({BAD}, f.window(0, 0)),
    "a window beyond all measure": ({f.FLOW_CONTROL_ERROR}, f.window(0, 0x7FFFFFFF)),
    "a window too short": ({f.FRAME_SIZE_ERROR, BAD}, f.frame(f.WINDOW_UPDATE, 0, 0, b"\x00")),
    "a window of an idle stream": ({BAD}, f.window(99, 1)),
    "settings of a stream": ({BAD}, f.frame(f.SETTINGS, 0, 1, b"")),
    "settings of five bytes": ({f.FRAME_SIZE_ERROR}, f.frame(f.SETTINGS, 0, 0, b"\x00" * 5)),
    "an acknowledgement with settings": (
        {f.FRAME_SIZE_ERROR, BAD},
        f.frame(f.SETTINGS, f.ACK, 0, b"\x00" * 6),
    ),
    "a push that is neither on nor off": ({BAD}, f.settings((2, 2))),
    "a first window beyond all measure": ({f.FLOW_CONTROL_ERROR}, f.settings((4, 0x80000000))),
    "frames of a byte": ({BAD}, f.settings((5, 1))),
    "frames beyond all measure": ({BAD}, f.settings((5, 0x1000000))),
    "a ping of seven bytes": ({f.FRAME_SIZE_ERROR, BAD}, f.ping(b"1234567")),
    "a ping of a stream": ({BAD}, f.frame(f.PING, 0, 1, b"12345678")),
    "a push from the client": ({BAD}, f.frame(f.PUSH_PROMISE, 4, 1, b"\x00\x00\x00\x02" + f.block(MODELS))),
    "a push for a stream of the client": (
        {BAD},
        get() + f.frame(f.PUSH_PROMISE, 4, 3, b"\x00\x00\x00\x05" + f.block(MODELS)),
    ),
    "PRIORITY of stream 0": ({BAD}, f.frame(f.PRIORITY, 0, 0, b"\x00\x00\x00\x01\x10")),
    "PRIORITY too short": ({f.FRAME_SIZE_ERROR, BAD}, f.frame(f.PRIORITY, 0, 3, b"\x00\x00\x00\x01")),
    "a continuation of nothing": ({BAD}, f.frame(f.CONTINUATION, 4, 3, b"")),
    "a continuation of another stream": (
        {BAD},
        f.frame(f.HEADERS, 1, 3, b"") + f.frame(f.CONTINUATION, 4, 5, f.block(MODELS)),
    ),
    "a ping inside a head": ({BAD}, f.frame(f.HEADERS, 1, 3, b"") + f.ping()),
    "data inside a head": ({BAD}, f.frame(f.HEADERS, 1, 3, b"") + f.data(3, b"x")),
    "endless continuations": (
        {BAD, f.ENHANCE_YOUR_CALM},
        f.frame(f.HEADERS, 1, 3, b"") + f.frame(f.CONTINUATION, 0, 3, b"") * 70,
    ),
    "a megabyte of continuations": (
        {BAD, f.ENHANCE_YOUR_CALM},
        f.frame(f.HEADERS, 1, 3, b"") + f.frame(f.CONTINUATION, 0, 3, b"\x00" * 16000) * 70,
    ),
    "a head longer than allowed": (
        {f.ENHANCE_YOUR_CALM, BAD},
        f.frame(f.HEADERS, 1, 3, f.block([*MODELS, (b"a", b"x" * 70_000)])[:16000])
        + b"".join(f.frame(f.CONTINUATION, 4 if n == 4 else 0, 3, b"x" * 16000) for n in range(5)),
    ),
    "a bomb of references": (
        {f.ENHANCE_YOUR_CALM, BAD},
        f.frame(
            f.HEADERS, 5, 3, f.block(MODELS) + b"\x40" + f.text(b"a") + f.text(b"x" * 4000) + b"\xbe" * 10_000
        ),
    ),
    "an index nobody has": ({BAD, f.COMPRESSION_ERROR}, f.frame(f.HEADERS, 5, 3, b"\xff\x80\x01")),
    "index 0": ({BAD, f.COMPRESSION_ERROR}, f.frame(f.HEADERS, 5, 3, b"\x80")),
    "a number without end": ({BAD, f.COMPRESSION_ERROR}, f.frame(f.HEADERS, 5, 3, b"\xff" * 100)),
    "a string cut": ({BAD, f.COMPRESSION_ERROR}, f.frame(f.HEADERS, 5, 3, b"\x00\x05ab")),
    "a broken Huffman code": ({BAD, f.COMPRESSION_ERROR}, f.frame(f.HEADERS, 5, 3, b"\x00\x81\xff\x81\xff")),
    "a table larger than allowed": (
        {BAD, f.COMPRESSION_ERROR},
        f.frame(f.HEADERS, 5, 3, b"\x3f\xff\xff\xff\x07" + f.block(MODELS)),
    ),
    "a table resized inside a head": (
        {BAD, f.COMPRESSION_ERROR},
        f.frame(f.HEADERS, 5, 3, f.block(MODELS) + b"\x20"),
    ),
    "HPACK broken in the trailers": ({BAD, f.COMPRESSION_ERROR}, OPEN + f.frame(f.HEADERS, 5, 3, b"\x80")),
    "more padding than frame": ({BAD}, OPEN + f.frame(f.DATA, 8, 3, b"\xffx")),
    "more padding than head": ({BAD}, f.frame(f.HEADERS, 0xD, 3, b"\xff" + f.block(MODELS[:1]))),
    "a padded frame without room for its length": (
        {BAD, f.FRAME_SIZE_ERROR},
        OPEN + f.frame(f.DATA, 8, 3, b""),
    ),
    "a head with priority, cut": ({BAD, f.FRAME_SIZE_ERROR}, f.frame(f.HEADERS, 0x25, 3, b"\x00")),
    "GOAWAY of a stream": ({BAD}, f.frame(f.GOAWAY, 0, 1, b"\x00" * 8)),
    "GOAWAY too short": ({BAD, f.FRAME_SIZE_ERROR}, f.frame(f.GOAWAY, 0, 0, b"\x00" * 4)),
}

transports = pytest.mark.parametrize("transport", TRANSPORTS)


@asynccontextmanager
async def shared(here: Scene) -> AsyncIterator[Raw2]:
    """A connection with a bystander of its own on stream 1."""
    async with raw2(here.url, tls=here.trusted) as connection:
        await connection.send(f.post(1, BYSTANDER))
        await still_there(here, connection)
        yield connection


async def still_there(here: Scene, connection: Raw2) -> None:
    await here.still_there()
    mark = b' tk%d"' % (here.granted - 1)
    await connection.until(lambda: mark in connection.bodies.get(1, b"") or connection.gone)


async def reset(connection: Raw2, name: str) -> str:
    await connection.over(3)
    return "" if connection.resets.get(3) == RESET[name][0] else f"{connection.resets} {connection.heads}"


async def answered(connection: Raw2, name: str) -> str:
    await connection.over(3)
    right = 3 in connection.ended and connection.status(3) == ANSWERED[name][0]
    return "" if right else f"{connection.resets} {connection.heads}"


async def ignored(connection: Raw2, _: str) -> str:
    return f"reset {connection.resets}" if 1 in connection.resets else ""


async def play_all(
    here: Scene, table: Mapping[str, bytes], check: Callable[[Raw2, str], Awaitable[str]]
) -> None:
    """Each case beside a bystander on the same connection, who gets its next token afterwards."""
    wrong = {}
    for name, data in table.items():
        async with shared(here) as connection:
            with trio.move_on_after(5) as limit:
                await connection.send(data)
                await connection.answered()
                fault = await check(connection, name)
                await still_there(here, connection)
                if connection.gone:
                    fault += f" connection ended, GOAWAY {connection.goaway}"
            if limit.cancelled_caught:
                fault = f"stuck: {connection.resets} {connection.heads}"
            if fault:
                wrong[name] = fault
    assert not wrong, "\n".join(f"{name}: {fault}" for name, fault in wrong.items())
    assert here.strangers() == []


@transports
async def test_a_stream_s_fault_ends_that_stream_and_no_other(transport: str, tls: Tls) -> None:
    async with scene(tls if transport == "tls" else None, seconds=60) as here:
        await play_all(here, {name: data for name, (_, data) in RESET.items()}, reset)


@transports
async def test_what_is_odd_but_well_formed_is_answered(transport: str, tls: Tls) -> None:
    async with scene(tls if transport == "tls" else None, seconds=60) as here:
        await play_all(here, {name: data for name, (_, data) in ANSWERED.items()}, answered)


@transports
async def test_what_means_nothing_to_us_is_passed_over(transport: str, tls: Tls) -> None:
    async with scene(tls if transport == "tls" else None, seconds=60) as here:
        await play_all(here, IGNORED, ignored)


@transports
async def test_a_connection_s_fault_ends_it_and_no_other(transport: str, tls: Tls) -> None:
    wrong = {}
    async with scene(tls if transport == "tls" else None, seconds=60) as here:
        for name, (codes, data) in FATAL.items():
            async with shared(here) as connection:
                with trio.move_on_after(5):
                    await connection.send(data)
                    await connection.until(lambda: connection.gone)
                if not connection.gone or connection.goaway not in codes:
                    wrong[name] = f"gone: {connection.gone}, GOAWAY {connection.goaway}"
            await here.still_there()
        assert not wrong, "\n".join(f"{name}: {fault}" for name, fault in wrong.items())
        assert here.strangers() == []


@pytest.mark.parametrize(
    "rest", [b"", b"SM\r\n", b"GARBAGE!", b"SM\r\n\n\r\n\r\n", b"SM\r\n\r\n" + b"\xff" * 200]
)
async def test_a_preface_that_is_none_ends_its_connection(rest: bytes) -> None:
    async with scene() as here, raw2(here.url, opening=b"PRI * HTTP/2.0\r\n\r\n" + rest) as connection:
        if (rest.startswith(b"SM") and len(rest) < 6) or not rest:
            await connection.send(b"XX" * 10)
        await connection.until(lambda: connection.gone)


async def test_one_stream_too_many_is_refused_and_the_others_go_on() -> None:
    async with scene(slots=400) as here, shared(here) as connection:
        many = range(3, 3 + 2 * 300, 2)
        await connection.send(*[f.post(number, BYSTANDER) for number in many])
        await connection.answered()
        refused = {number for number, code in connection.resets.items() if code == f.REFUSED}
        assert len(refused) == 300 - 255
        assert refused == set(connection.resets)
        await still_there(here, connection)
        for number in set(many) - refused:
            await connection.until(lambda: b" tk0" in connection.body(number))  # noqa: B023
        assert not connection.gone
