"""Bytes on HTTP/1.1 that no honest client sends, over TCP and over TLS: each is refused, answered or waited
for, by its own connection alone; nothing of it reaches an engine, and the bystanders' answers come whole.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import pytest
import trio

from tests.conftest import Tls
from tests.support.http1 import GONE, Http1, Truncated, connect, http1
from tests.wire.around import BODY, TRANSPORTS, Scene, scene
from tests.wire.frames import PREFACE

GET = b"GET /v1/models HTTP/1.1\r\n"
HOST = b"Host: x\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
SMUGGLED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: smuggled\r\nContent-Length: 2\r\n\r\n{}"


def get(line: bytes) -> bytes:
    return line + b"\r\n" + HOST + b"\r\n"


def field(line: bytes) -> bytes:
    return GET + HOST + line + b"\r\n\r\n"


def length(*values: bytes) -> bytes:
    return (
        POST + b"".join(b"Content-Length: " + value + b"\r\n" for value in values) + b"\r\nhello" + SMUGGLED
    )


def encoding(value: bytes, more: bytes = b"", version: bytes = b"1.1") -> bytes:
    line = b"POST /v1/chat/completions HTTP/" + version + b"\r\n" + HOST
    return line + b"Transfer-Encoding:" + value + b"\r\n" + more + b"\r\n0\r\n\r\n" + SMUGGLED


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings"
WEBSOCKET = field(
    b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
)

REFUSED: dict[str, tuple[int, bytes]] = {
    # Request lines.
    "noise": (400, b"\x00\xff\xfe\x01" * 300),
    "a TLS hello, cut": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    "another protocol's greeting": (400, b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    "no version": (400, b"GET /\r\n\r\n"),
    "no target": (400, get(b"GET HTTP/1.1")),
    "an empty target": (400, get(b"GET  HTTP/1.1")),
    "no method": (400, get(b" / HTTP/1.1")),
    "a method alone": (400, b"GET\r\n\r\n"),
    "a method that is no token": (400, get(b"G@T / HTTP/1.1")),
    "a method outside ASCII": (400, get(b"G\xc3\x89T / HTTP/1.1")),
    "a path outside ASCII": (400, get(b"GET /\xff\xfe HTTP/1.1")),
    "a path with NUL": (400, get(b"GET /\x00 HTTP/1.1")),
    "a path with DEL": (400, get(b"GET /\x7f HTTP/1.1")),
    "a path with a space": (400, get(b"GET /v1/ models HTTP/1.1")),
    "a path with a bare CR": (400, get(b"GET /v1\r/models HTTP/1.1")),
    "tabs between the words": (400, get(b"GET\t/\tHTTP/1.1")),
    "two spaces between the words": (400, get(b"GET  /  HTTP/1.1")),
    "a space behind the version": (400, get(b"GET / HTTP/1.1 ")),
    "a version in lower case": (400, get(b"GET / http/1.1")),
    "half a version": (400, get(b"GET / HTTP/1")),
    "a long version": (400, get(b"GET / HTTP/1.11")),
    "a version of another protocol": (400, get(b"GET / ICAP/1.0")),
    "version 0.9": (505, get(b"GET / HTTP/0.9")),
    "version 1.2": (505, get(b"GET / HTTP/1.2")),
    "version 2.0": (505, get(b"GET / HTTP/2.0")),
    "version 9.9": (505, get(b"GET / HTTP/9.9")),
    "half the preface of HTTP/2, then a head": (505, b"PRI / HTTP/2.0\r\n\r\n"),
    # Fields.
    "no host": (400, GET + b"\r\n"),
    "two hosts": (400, GET + HOST + b"Host: y\r\n\r\n"),
    "a field without a colon": (400, field(b"nonsense")),
    "a field without a name": (400, field(b": x")),
    "a space before the colon": (400, field(b"A : x")),
    "a tab before the colon": (400, field(b"A\t: x")),
    "a space in a name": (400, field(b"A b: x")),
    "a name outside ASCII": (400, field(b"\xc3\xa4: x")),
    "a no-break space before a name": (400, field(b"\xa0Content-Length: 5")),
    "a name with NUL": (400, field(b"A\x00: x")),
    "a name with a bracket": (400, field(b"A[]: x")),
    "a value with NUL": (400, field(b"A: \x00")),
    "a value with a bare CR": (400, field(b"A: x\ry")),
    "a bare CR between two fields": (400, GET + b"Host: x\rContent-Length: 5\r\n\r\n"),
    "a value with a vertical tab": (400, field(b"A: \x0bx")),
    "a folded value": (400, field(b"A: x\r\n y")),
    "a value folded by a tab": (400, field(b"A: x\r\n\ty")),
    "a fold before the first field": (400, GET + b" Host: x\r\n\r\n"),
    "a folded length": (400, POST + b"Content-Length:\r\n 5\r\n\r\nhello" + SMUGGLED),
    # Lengths.
    "a negative length": (400, length(b"-1")),
    "a length with a plus": (400, length(b"+5")),
    "an empty length": (400, length(b"")),
    "a blank length": (400, length(b"  ")),
    "a hexadecimal length": (400, length(b"0x5")),
    "a length with a point": (400, length(b"5.0")),
    "a length with an exponent": (400, length(b"1e1")),
    "a length with an underscore": (400, length(b"1_0")),
    "a length in quotes": (400, length(b'"5"')),
    "a length in other digits": (400, length("٥".encode())),
    "a length with a space inside": (400, length(b"1 0")),
    "a length with a parameter": (400, length(b"5;x=1")),
    "a length beyond all measure": (400, length(b"9" * 30)),
    "two lengths in one": (400, length(b"5, 5")),
    "two different lengths in one": (400, length(b"5,42")),
    "a length and a comma": (400, length(b"5,")),
    "two equal lengths": (400, length(b"5", b"5")),
    "two different lengths": (400, length(b"5", b"42")),
    "an empty length and a length": (400, length(b"", b"5")),
    "a length whose name has a space": (400, POST + b"Content-Length : 5\r\n\r\nhello" + SMUGGLED),
    # Encodings.
    "a length and chunks": (
        400,
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    ),
    "chunks and a length": (400, encoding(b" chunked", b"Content-Length: 5\r\n")),
    "chunks and a length, bare line feeds": (400, encoding(b" chunked\nContent-Length: 5")),
    "chunks and a length in capitals": (400, encoding(b" chunked", b"CONTENT-LENGTH: 5\r\n")),
    "chunks in HTTP/1.0": (400, encoding(b" chunked", version=b"1.0")),
    "a vertical tab before chunks": (400, encoding(b"\x0bchunked")),
    "folded chunks": (400, encoding(b"\r\n chunked")),
    "a space behind the encoding's name": (
        400,
        POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    ),
    "chunks twice in one": (501, encoding(b" chunked, chunked")),
    "chunks twice": (501, encoding(b" chunked", b"Transfer-Encoding: chunked\r\n")),
    "chunks and another encoding": (501, encoding(b" chunked", b"Transfer-Encoding: gzip\r\n")),
    "gzip as encoding": (501, encoding(b" gzip")),
    "gzip in chunks": (501, encoding(b" gzip, chunked")),
    "chunks in gzip": (501, encoding(b" chunked, gzip")),
    "identity": (501, encoding(b" identity")),
    "identity and a length": (400, encoding(b" identity", b"Content-Length: 5\r\n")),
    "almost chunks": (501, encoding(b" xchunked")),
    "chunks with a parameter": (501, encoding(b" chunked;q=1")),
    "chunks in quotes": (501, encoding(b' "chunked"')),
    "an empty encoding": (501, encoding(b"")),
    "a list with nothing in it": (501, encoding(b" ,chunked")),
    # Chunks.
    "a chunk size in other letters": (400, CHUNKED + b"zz\r\n"),
    "a negative chunk": (400, CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n"),
    "a chunk size with 0x": (400, CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n"),
    "a chunk size with an underscore": (400, CHUNKED + b"1_0\r\nhello\r\n0\r\n\r\n"),
    "a space before a chunk size": (400, CHUNKED + b" 5\r\nhello\r\n0\r\n\r\n"),
    "an empty chunk size": (400, CHUNKED + b"\r\nhello\r\n0\r\n\r\n"),
    "a chunk size of 31 digits": (400, CHUNKED + b"0" * 30 + b"5\r\nhello\r\n0\r\n\r\n"),
    "a line feed in a chunk's extension": (400, CHUNKED + b'5;a="\n"\r\nhello\r\n0\r\n\r\n' + SMUGGLED),
    "a chunk longer than it says": (400, CHUNKED + b"5\r\nhelloworld\r\n0\r\n\r\n"),
    "a chunk shorter than it says": (400, CHUNKED + b"5\r\nhi\r\n0\r\n\r\n" + SMUGGLED),
    "no line end behind a chunk": (400, CHUNKED + b"5\r\nhelloXX0\r\n\r\n"),
    "an endless chunk extension": (431, CHUNKED + b"5;" + b"x" * 200_000),
    "a trailer without a colon": (400, CHUNKED + b"0\r\nnonsense\r\n\r\n"),
    "endless trailers": (431, CHUNKED + b"0\r\n" + b"a: b\r\n" * 40_000),
    # Sizes.
    "an endless request line": (431, b"GET /" + b"x" * 200_000),
    "an endless head": (431, GET + HOST + b"A: " + b"x" * 200_000),
    "a head of 100 KB": (431, field(b"A: " + b"x" * 100_000)),
    "a head of 65 KB, well ended": (431, field(b"A: " + b"x" * 65_600)),
    "a thousand fields": (431, GET + HOST + b"a: b\r\n" * 1000 + b"\r\n"),
    "twenty thousand empty fields": (431, GET + HOST + b"a:\n" * 20_000 + b"\n"),
}

ANSWERED: dict[str, tuple[int, bytes]] = {
    "CONNECT": (501, b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n"),
    "CONNECT to a path": (501, get(b"CONNECT /v1/models HTTP/1.1")),
    "OPTIONS *": (404, get(b"OPTIONS * HTTP/1.1")),
    "TRACE": (404, get(b"TRACE / HTTP/1.1")),
    "a method of its own": (404, get(b"PURGE /v1/chat/completions HTTP/1.1")),
    "PRI as if it were HTTP/1.1": (404, get(b"PRI * HTTP/1.1")),
    "an absolute target": (404, get(b"GET http://169.254.169.254/latest/meta-data HTTP/1.1")),
    "an absolute target with an inference path": (
        404,
        get(b"POST http://evil.test/v1/chat/completions HTTP/1.1"),
    ),
    "a broken absolute target": (404, get(b"GET http://[::1 HTTP/1.1")),
    "a target with a host's slashes": (404, get(b"GET //evil.test/v1/models HTTP/1.1")),
    "a target without a slash": (404, get(b"GET v1/models HTTP/1.1")),
    "escapes that aren't UTF-8": (404, get(b"GET /%ff%fe%00 HTTP/1.1")),
    "broken escapes": (404, get(b"GET /%zz%%% HTTP/1.1")),
    "escaped dots": (404, get(b"GET /v1/%2e%2e/admin/ledger HTTP/1.1")),
    "dots": (404, get(b"GET /v1/../admin/ledger HTTP/1.1")),
    "escaped line ends": (404, get(b"GET /v1/%0d%0aHost:%20evil HTTP/1.1")),
    "a model named NUL": (404, get(b"GET /v1/models/%00 HTTP/1.1")),
    "a target of 60 KB": (404, get(b"GET /" + b"x" * 60_000 + b" HTTP/1.1")),
    "a fragment": (404, get(b"GET /#/v1/models HTTP/1.1")),
    "a query of odd characters": (200, get(b"GET /v1/models?%00&=&&\x7e[]{}|^`<>\"' HTTP/1.1")),
    "empty lines before the request": (200, b"\r\n\n\r\n\r\n" + get(GET[:-2])),
    "ten thousand empty lines": (200, b"\r\n" * 10_000 + get(GET[:-2])),
    "line feeds alone": (200, b"GET /v1/models HTTP/1.1\nHost: x\n\n"),
    "a value outside ASCII": (200, field(b"A: \xff\xfe")),
    "a value with ESC": (200, field(b"A: \x1b[0m")),
    "an empty host": (200, GET + b"Host:\r\n\r\n"),
    "a host that is none": (200, GET + b"Host: a b/c@d:e\r\n\r\n"),
    "a blank value": (200, field(b"A:   ")),
    "two hundred fields": (200, GET + HOST + b"a: b\r\n" * 200 + b"\r\n"),
    "a length with zeros in front": (400, POST + b"Content-Length: 0002\r\n\r\n[]"),
    "a body where none is expected": (200, GET + HOST + b"Content-Length: 5\r\n\r\nhello"),
    "chunks in capitals": (400, POST + b"Transfer-Encoding: CHUNKED\r\n\r\n2\r\n[]\r\n0\r\n\r\n"),
    "a length among the trailers": (400, CHUNKED + b"2\r\n[]\r\n0\r\nContent-Length: 5\r\n\r\n"),
    "a chunk with extensions": (400, CHUNKED + b"2;a=b;c\r\n[]\r\n0;d\r\n\r\n"),
    "a head as trailers": (400, CHUNKED + b"2\r\n[]\r\n0\r\nHost: evil\r\nA: b\r\n\r\n"),
    "Connection names what frames the body": (
        400,
        POST + b"Connection: content-length\r\nContent-Length: 2\r\n\r\n[]",
    ),
    "Connection names the host": (200, field(b"Connection: host, keep-alive")),
    "expects what nobody knows": (200, field(b"Expect: 200-please")),
    "upgrades to h2c": (200, field(H2C + b": AAMAAABkAAQAAP__")),
    "upgrades to h2c, settings cut": (200, field(H2C + b": AAM")),
    "upgrades to h2c, settings broken": (200, field(H2C + b": !!!!")),
    "upgrades to h2c without settings": (200, field(b"Connection: Upgrade\r\nUpgrade: h2c")),
    "upgrades to h2c with two settings": (200, field(H2C + b": AA\r\nHTTP2-Settings: AAMAAABk")),
    "upgrades to h2c with a body": (400, POST + H2C + b": AAM\r\nContent-Length: 2\r\n\r\n[]"),
    "upgrades to what nobody knows": (200, field(b"Connection: Upgrade\r\nUpgrade: foo/2, bar")),
    "upgrades to nothing": (200, field(b"Connection: Upgrade")),
    "a WebSocket": (501, WEBSOCKET),
    "a WebSocket of a wrong version": (501, WEBSOCKET.replace(b"13", b"99")),
    "a WebSocket without a key": (501, field(b"Connection: Upgrade\r\nUpgrade: websocket")),
    "multipart": (
        501,
        POST + b"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 2\r\n\r\n{}",
    ),
    "a body that says it is gzip": (
        400,
        POST + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00",
    ),
}

UNFINISHED: dict[str, bytes] = {
    "nothing": b"",
    "a line of HTTP/0.9": b"GET /\r\n",
    "half a method": b"GE",
    "half a head": GET + b"Host: x",
    "carriage returns for line ends": b"GET / HTTP/1.1\rHost: x\r\r",
    "half a body": POST + b"Content-Length: 100\r\n\r\n{",
    "half a chunk": CHUNKED + b"64\r\n{",
    "half a chunk size": CHUNKED + b"6",
    "chunks that end their lines with line feeds": CHUNKED + b"5\nhello\n0\n\n",
    "a chunk of 2^80 bytes": CHUNKED + b"F" * 20 + b"\r\nhello",
    "half the preface of HTTP/2": PREFACE[:10],
    "empty lines": b"\r\n" * 1000,
    "an expectation without a body": POST + b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n",
}

transports = pytest.mark.parametrize("transport", TRANSPORTS)


async def send(client: Http1, data: bytes) -> None:
    with suppress(*GONE):  # it may be cut off meanwhile
        await client.send(data)


async def refused(client: Http1, name: str) -> str:
    answer = await client.answer()
    rest = await client.eof()
    bare = answer.body == b"" and answer.head["connection"] == "close" and rest == b""
    return "" if bare and answer.status == REFUSED[name][0] else f"{answer} and {rest!r}"


async def answered(client: Http1, name: str) -> str:
    answer = await client.answer()
    again = await client.ask("/v1/models")
    return "" if (answer.status, again.status) == (ANSWERED[name][0], 200) else f"{answer} and {again}"


async def waited_for(client: Http1, name: str) -> str:
    with trio.move_on_after(0.03):
        return f"not waited for: {await client.eof()!r}"
    expected = b"HTTP/1.1 100 \r\n\r\n" if "expectation" in name else b""
    return "" if client.buffer == expected else f"early {client.buffer!r}"


async def play_all(
    here: Scene, table: Mapping[str, bytes], check: Callable[[Http1, str], Awaitable[str]]
) -> None:
    """Each case on a connection of its own, all of them before anything is said about any."""
    wrong = {}
    for number, (name, data) in enumerate(table.items()):
        client = Http1(await connect(here.url, tls=here.trusted))
        await send(client, data)
        with trio.move_on_after(5) as limit:
            try:
                fault = await check(client, name)
            except (Truncated, ValueError) as error:
                fault = repr(error)
        if limit.cancelled_caught:
            fault = f"no answer, but {bytes(client.buffer[:80])!r}"
        if fault:
            wrong[name] = fault
        await (client.reset() if number % 2 else client.close())
        await here.still_there()
    assert not wrong, "\n".join(f"{name}: {fault}" for name, fault in wrong.items())
    assert here.strangers() == []


@transports
async def test_what_can_t_be_understood_is_refused_and_its_connection_closed(
    transport: str, tls: Tls
) -> None:
    async with scene(tls if transport == "tls" else None, seconds=60) as here:
        await play_all(here, {name: data for name, (_, data) in REFUSED.items()}, refused)


@transports
async def test_what_is_odd_but_well_formed_is_answered_and_its_connection_goes_on(
    transport: str, tls: Tls
) -> None:
    async with scene(tls if transport == "tls" else None, seconds=60) as here:
        await play_all(here, {name: data for name, (_, data) in ANSWERED.items()}, answered)


@transports
async def test_what_is_never_finished_is_waited_for_and_forgotten(transport: str, tls: Tls) -> None:
    async with scene(tls if transport == "tls" else None, seconds=60) as here:
        await play_all(here, UNFINISHED, waited_for)
        await play_all(here, dict(reversed(UNFINISHED.items())), waited_for)  # what closed resets


@transports
async def test_bytes_behind_a_websocket_s_head_harm_nobody(transport: str, tls: Tls) -> None:
    frames = b"\x82\x05hello\x88\x02\x03\xe8"
    async with (
        scene(tls if transport == "tls" else None) as here,
        http1(here.url, tls=here.trusted) as client,
    ):
        await send(client, WEBSOCKET + frames)
        assert (await client.answer()).status == 501
        await send(client, b"\r\n")
        await send(client, b"\r\n\r\n")
        assert (await client.answer()).status == 400
        assert await client.eof() == b""


@transports
async def test_http2_s_preface_behind_a_request_is_refused(transport: str, tls: Tls) -> None:
    async with (
        scene(tls if transport == "tls" else None) as here,
        http1(here.url, tls=here.trusted) as client,
    ):
        await send(client, get(GET[:-2]) + PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        assert (await client.answer()).status == 200
        assert (await client.answer()).status == 505
        assert await client.eof() == b""


@transports
async def test_http_1_0_is_answered_and_closed(transport: str, tls: Tls) -> None:
    async with (
        scene(tls if transport == "tls" else None) as here,
        http1(here.url, tls=here.trusted) as client,
    ):
        await send(client, b"GET /v1/models HTTP/1.0\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.json["object"]) == (200, "list")
        assert "transfer-encoding" not in answer.head


async def test_a_head_that_comes_in_crumbs_is_answered() -> None:
    async with scene() as here, http1(here.url) as client:
        await client.send(b"GET /")
        for _ in range(3000):
            await client.send(b"x" * 20)
            await trio.lowlevel.checkpoint()
        await client.send(b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.answer()).status == 404
