"""How a stream ends: the terminal marker, or something else. Success is never made up."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.support.gateway import running_gateway
from tests.support.http1 import Truncated, http1
from tests.support.http2 import http2
from tests.support.routes import CHAT, DONE, EMBEDDINGS, MESSAGES, RESPONSES, STREAMING, Parts, Route
from tests.support.scripted import Script, ScriptedEngine
from tests.support.scripts import End, Ending, Raw, Sse, Stream, Whole, honest
from tests.support.visitors import visit

every_stream = pytest.mark.parametrize("route", STREAMING, ids=str)
protocols = pytest.mark.parametrize("way", ["fin", "h2_reset"], ids=["http1", "http2"])


def parts_of(route: Route) -> Parts:
    assert route.parts is not None
    return route.parts


def error_in(route: Route, event: bytes) -> dict[str, Any]:
    """The object of an in-band error, checked to be one whole event of the route's dialect."""
    if route.media == "application/x-ndjson":
        assert event.endswith(b"\n")
        assert event.count(b"\n") == 1
        error: dict[str, Any] = json.loads(event)
        assert isinstance(error["error"], str)
        return error
    assert event.endswith(b"\n\n")
    assert event.count(b"\n\n") == 1
    name, _, data = event.rpartition(b"data: ")
    assert name == (b"event: error\n" if route in (MESSAGES, RESPONSES) else b"")
    shape: dict[str, Any] = json.loads(data)
    if route is RESPONSES:
        assert shape["type"] == "error"
        return shape
    if route is MESSAGES:
        assert shape["type"] == "error"
    inner: dict[str, Any] = shape["error"]
    return inner


@protocols
@every_stream
async def test_complete_stream_arrives_byte_for_byte(way: str, route: Route) -> None:
    engine = ScriptedEngine(honest, slots=1, kind=route.kind)
    async with running_gateway(engine) as gateway:
        async with visit(way, gateway.url, route.path, route.payload(stream=True)) as visitor:
            head = await visitor.head()
            assert (head.status, head["content-type"]) == (200, route.media)
            assert await visitor.rest() == parts_of(route).all(5)
        record = await gateway.record(outcome="completed")
        assert (record["status"], record["code"]) == (200, None)
        assert record["bytes"] == len(parts_of(route).all(5))
        assert record.get("teardown_ms") is None


@protocols
@every_stream
async def test_marker_ends_the_stream_though_the_engine_holds_its_socket(way: str, route: Route) -> None:
    engine = ScriptedEngine(honest, slots=1, kind=route.kind)
    engine.plan = [Stream(ending=Ending.HELD)]
    async with (
        running_gateway(engine) as gateway,
        visit(way, gateway.url, route.path, route.payload(stream=True)) as visitor,
    ):
        since = trio.current_time()
        await visitor.head()
        assert await visitor.rest() == parts_of(route).all(5)
        await gateway.record(outcome="completed", status=200)
        async with http1(gateway.url) as second:
            assert (await second.ask(route.path, route.payload(stream=False))).status == 200
        assert trio.current_time() - since < 2
        assert await engine.calls[0].closed() - since < 3
    held, another = (call.connection for call in engine.calls[:2])
    assert another is not held, "a held connection must not be used again"


@protocols
@every_stream
@pytest.mark.parametrize("ending", [Ending.RST, Ending.FIN, Ending.NO_MARKER])
async def test_stream_without_its_marker_ends_with_an_error_and_abnormally(
    way: str, route: Route, ending: Ending
) -> None:
    engine = ScriptedEngine(Stream(tokens=3, ending=ending), slots=1, kind=route.kind)
    async with running_gateway(engine) as gateway:
        async with visit(way, gateway.url, route.path, route.payload(stream=True)) as visitor:
            assert (await visitor.head()).status == 200
            await visitor.until(b" tk2")
            with pytest.raises(Truncated) as cut:
                await visitor.rest()
            await visitor.still_served()
        parts = parts_of(route)
        expected = parts.all(3)
        sent = expected[: -len(b"".join(parts.closing))]
        if ending is Ending.NO_MARKER:
            sent += b"".join(parts.closing[:-1])
        assert cut.value.got.startswith(sent)
        error = error_in(route, cut.value.got[len(sent) :])
        assert error["code"] == "engine_failed"
        record = await gateway.record(outcome="engine_failed")
        assert (record["status"], record["code"]) == (502, "engine_failed")
        assert record["phase"] in ("streaming", "draining")
    assert len(engine.calls) == 1


@protocols
@pytest.mark.parametrize("end", End)
async def test_engine_that_dies_within_an_event_leaves_it_cut_without_another(way: str, end: End) -> None:
    half = b'data: {"choices":[{"index":0,"delta":{"content":" t'
    go_on = trio.Event()
    steps: list[bytes | float | trio.Event | End] = [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"%x\r\n%b\r\n" % (len(half), half),
        go_on,
        end,
    ]
    engine = ScriptedEngine(Raw(steps), slots=1)
    async with running_gateway(engine) as gateway:
        async with visit(way, gateway.url, CHAT.path, CHAT.payload(stream=True)) as visitor:
            await visitor.head()
            await visitor.until(half)
            go_on.set()
            with pytest.raises(Truncated) as cut:
                await visitor.rest()
        assert cut.value.got == half
        await gateway.record(outcome="engine_failed", status=502)


@protocols
async def test_engine_that_dies_within_a_plain_body_leaves_it_cut(way: str) -> None:
    body = EMBEDDINGS.whole_bytes()
    go_on = trio.Event()
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    )
    engine = ScriptedEngine(Raw([head, body[:20], go_on, End.RST]), slots=1)
    async with running_gateway(engine) as gateway:
        async with visit(way, gateway.url, EMBEDDINGS.path, EMBEDDINGS.payload(stream=False)) as visitor:
            await visitor.head()
            await visitor.until(body[:20])
            go_on.set()
            with pytest.raises(Truncated) as cut:
                await visitor.rest()
        assert cut.value.got == body[:20]
        await gateway.record(outcome="engine_failed", status=502)


async def test_last_event_without_its_blank_line_arrives() -> None:
    body = parts_of(CHAT).token(0) + parts_of(CHAT).closing[0] + b"data: [DONE]\n"
    engine = ScriptedEngine(Sse([body]), slots=1)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        answer = await client.ask(CHAT.path, CHAT.payload(stream=True))
        assert answer.body == body
        await gateway.record(outcome="completed", status=200)


@protocols
@pytest.mark.parametrize(
    "error",
    [
        b'data: {"error":{"message":"slow down","type":"rate_limit","code":429}}\n\n',
        b'data: {"object":"error","message":"boom","type":"InternalServerError","code":500}\n\n',
    ],
)
@pytest.mark.parametrize("before", [0, 2])
async def test_error_inside_a_stream_passes_as_it_is(way: str, error: bytes, before: int) -> None:
    pieces: list[bytes | float | trio.Event] = [
        *(parts_of(CHAT).token(i) for i in range(before)),
        error,
        DONE,
    ]
    engine = ScriptedEngine(Sse(pieces), slots=1)
    async with running_gateway(engine) as gateway:
        async with visit(way, gateway.url, CHAT.path, CHAT.payload(stream=True)) as visitor:
            assert (await visitor.head()).status == 200
            assert await visitor.rest() == b"".join(piece for piece in pieces if isinstance(piece, bytes))
        await gateway.recorded(1)


@pytest.mark.parametrize(
    "script",
    [
        Raw([End.FIN]),
        Raw([End.RST]),
        Raw([b"HTTP/1.1 200 OK\r\nContent-", End.FIN]),
        Raw([b"220 smtp.example.org ESMTP\r\n", End.FIN]),
        Raw([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", End.FIN]),
    ],
    ids=["fin", "rst", "half a head", "another protocol", "bad chunk"],
)
async def test_engine_that_fails_before_the_first_byte_is_a_502_and_not_asked_again(script: Script) -> None:
    engine = ScriptedEngine(script, slots=1)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        answer = await client.ask(CHAT.path, CHAT.payload(stream=True))
        assert (answer.status, answer.json["error"]["code"]) == (502, "engine_failed")
        record = await gateway.record(outcome="engine_failed")
        assert (record["status"], record["phase"]) == (502, "prefill")
        assert (await client.ask("/v1/models")).status == 200
    assert len(engine.calls) == 1


async def test_garbage_between_chunks_ends_with_an_error() -> None:
    token = parts_of(CHAT).token(0)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    go_on = trio.Event()
    script = Raw(
        [
            head + b"%x\r\n%b\r\n" % (len(token), token),
            go_on,
            b"zz\r\nthis is no chunk\r\n\x00\xff",
            trio.Event(),
        ]
    )
    engine = ScriptedEngine(script, slots=1)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await client.post(CHAT.path, CHAT.payload(stream=True))
        await client.head()
        await client.until(token)
        go_on.set()
        with pytest.raises(Truncated) as cut:
            await client.rest()
        assert error_in(CHAT, cut.value.got.removeprefix(token))["code"] == "engine_failed"
        await gateway.record(outcome="engine_failed")
        await engine.calls[0].closed()


async def test_close_delimited_stream_arrives_whole() -> None:
    """An HTTP/1.0-like engine: the body ends with the connection, the marker tells that it is whole."""
    engine = ScriptedEngine(Stream(framing="close"), slots=1)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        answer = await client.ask(CHAT.path, CHAT.payload(stream=True))
        assert answer.body == parts_of(CHAT).all(5)
        await gateway.record(outcome="completed")


async def test_the_connection_of_a_whole_stream_is_used_again() -> None:
    engine = ScriptedEngine(honest, slots=1)
    async with running_gateway(engine) as gateway, http2(gateway.url) as connection:
        for _ in range(3):
            assert (await connection.ask(CHAT.path, CHAT.payload(stream=True))).status == 200
        engine.script = Whole()
        assert (await connection.ask(CHAT.path, CHAT.payload(stream=False))).status == 200
    assert [call.nth for call in engine.calls] == [0, 1, 2, 3]
