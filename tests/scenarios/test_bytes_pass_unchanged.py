"""Bytes out are bytes in: whatever the chunks, the characters, the comments, the status or the encoding."""

from __future__ import annotations

import gzip
import json

import pytest
import trio

from tests.support.gateway import running_gateway
from tests.support.http1 import http1
from tests.support.routes import CHAT, DONE, EMBEDDINGS, OLLAMA_CHAT, ROUTES, STREAMING, Route
from tests.support.scripted import Call, ScriptedEngine
from tests.support.scripts import Raw, Sse, Status, Stream, Whole, honest
from tests.support.visitors import visit

protocols = pytest.mark.parametrize("way", ["fin", "h2_reset"], ids=["http1", "http2"])
every_stream = pytest.mark.parametrize("route", STREAMING, ids=str)


@protocols
async def test_characters_split_over_segments_stay_whole(way: str) -> None:
    text = "東京 🗼 ñ — \u200d𝄞"
    event = f'data: {{"choices":[{{"delta":{{"content":"{text}"}}}}]}}\n\n'.encode()

    async def bytewise(call: Call) -> None:
        await call.head(200, [("Content-Type", "text/event-stream")])
        for at in range(len(event)):
            await call.send(event[at : at + 1])
            await trio.sleep(0.001)
        await call.send_bytewise(event, 0.001)
        await call.send(DONE)
        await call.end()

    engine = ScriptedEngine(bytewise, slots=1)
    async with running_gateway(engine) as gateway:
        async with visit(way, gateway.url, CHAT.path, CHAT.payload(stream=True)) as visitor:
            await visitor.head()
            assert await visitor.rest() == event + event + DONE
        await gateway.record(outcome="completed")


@every_stream
async def test_one_byte_a_segment(route: Route) -> None:
    engine = ScriptedEngine(Stream(tokens=2, bytewise=0.0), slots=1, kind=route.kind)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await client.post(route.path, route.payload(stream=True))
        await client.head()
        assert route.parts is not None
        assert await client.rest() == route.parts.all(2)
        await gateway.record(outcome="completed")


@every_stream
async def test_no_event_waits_for_the_next(route: Route) -> None:
    steps = [trio.Event() for _ in range(3)]
    assert route.parts is not None
    pieces: list[bytes | float | trio.Event] = []
    for i, step in enumerate(steps):
        pieces += [route.parts.token(i), step]
    engine = ScriptedEngine(Sse([*pieces, *route.parts.closing], media=route.media), slots=1, kind=route.kind)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await client.post(route.path, route.payload(stream=True))
        await client.head()
        for i, step in enumerate(steps):
            await client.until(route.parts.token(i))
            step.set()
        await client.rest()


@protocols
async def test_comment_stays_a_comment(way: str) -> None:
    pieces: list[bytes | float | trio.Event] = [b": PROCESSING\n\n", b":\n\n", CHAT_TOKEN, b": 50%\n\n", DONE]
    engine = ScriptedEngine(Sse(pieces), slots=1)
    async with running_gateway(engine) as gateway:
        async with visit(way, gateway.url, CHAT.path, CHAT.payload(stream=True)) as visitor:
            await visitor.head()
            assert await visitor.rest() == b": PROCESSING\n\n:\n\n" + CHAT_TOKEN + b": 50%\n\n" + DONE
        await gateway.record(outcome="completed")


CHAT_TOKEN = CHAT.parts.token(0) if CHAT.parts is not None else b""


@pytest.mark.parametrize("newline", [b"\r\n", b"\n", b"\r"], ids=["crlf", "lf", "cr"])
async def test_line_ends_of_every_kind(newline: bytes) -> None:
    body = (CHAT_TOKEN * 3 + DONE).replace(b"\n", newline)
    engine = ScriptedEngine(Sse([body[:40], body[40:]]), slots=1)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        answer = await client.ask(CHAT.path, CHAT.payload(stream=True))
        assert answer.body == body
        await gateway.record(outcome="completed")


@protocols
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503])
async def test_an_engine_s_error_answer_passes_as_it_is(way: str, status: int, stream: bool) -> None:
    body = b'{"detail": "the engine says no", "weird":   [1,2]}'
    headers = [("Content-Type", "application/problem+json"), ("Retry-After", "17")]
    engine = ScriptedEngine(Status(status, body, headers), slots=1)
    async with running_gateway(engine) as gateway:
        async with visit(way, gateway.url, CHAT.path, CHAT.payload(stream=stream)) as visitor:
            head = await visitor.head()
            assert head.status == status
            assert head["content-type"] == "application/problem+json"
            assert head["retry-after"] == "17"
            assert await visitor.rest() == body
        record = await gateway.record(status=status)
        assert record["engine"] == "engine"
        assert record["code"] is None
    assert len(engine.calls) == 1


@protocols
@pytest.mark.parametrize("route", ROUTES, ids=str)
async def test_whole_answer_is_framed_exactly(way: str, route: Route) -> None:
    engine = ScriptedEngine(honest, slots=1, kind=route.kind)
    async with running_gateway(engine) as gateway:
        async with visit(way, gateway.url, route.path, route.payload(stream=False)) as visitor:
            head = await visitor.head()
            assert head["content-type"] == "application/json"
            assert int(head["content-length"]) == len(route.whole_bytes())
            assert "transfer-encoding" not in head
            assert await visitor.rest() == route.whole_bytes()
        await gateway.record(outcome="completed", status=200)


async def test_chunked_whole_answer_and_an_empty_one() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    engine = ScriptedEngine(honest, slots=1)
    engine.plan = [
        Raw([head + b"2\r\n{}\r\n0\r\n\r\n"]),
        Whole(body=b""),
        Raw([b"HTTP/1.1 204 No Content\r\n\r\n"]),
    ]
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        assert (await client.ask(EMBEDDINGS.path, EMBEDDINGS.payload(stream=False))).body == b"{}"
        empty = await client.ask(EMBEDDINGS.path, EMBEDDINGS.payload(stream=False))
        assert (empty.status, empty.body) == (200, b"")
        nothing = await client.ask(EMBEDDINGS.path, EMBEDDINGS.payload(stream=False))
        assert (nothing.status, nothing.body) == (204, b"")
        assert (await client.ask(EMBEDDINGS.path, EMBEDDINGS.payload(stream=False))).json == EMBEDDINGS.whole
        await gateway.recorded(4, outcome="completed")
    assert [call.nth for call in engine.calls] == [0, 1, 2, 3]


@protocols
async def test_encoded_answer_keeps_its_bytes_and_its_header(way: str) -> None:
    """The engine is asked not to encode; if it does all the same, header and bytes pass together."""
    body = gzip.compress(CHAT_TOKEN + DONE)
    engine = ScriptedEngine(Sse([body[:10], body[10:]], headers=[("Content-Encoding", "gzip")]), slots=1)
    async with running_gateway(engine) as gateway:
        async with visit(way, gateway.url, CHAT.path, CHAT.payload(stream=True)) as visitor:
            assert (await visitor.head())["content-encoding"] == "gzip"
            assert await visitor.rest() == body
        await gateway.recorded(1)
    assert engine.calls[0].header("Accept-Encoding") == "identity"


async def test_request_body_reaches_the_engine_byte_for_byte() -> None:
    body = (
        '{ "model":"model" ,\n\t"messages": [{"role":"user","content":"\\u00e9 é"}],"stream":false,"x":1e40}'
    )
    engine = ScriptedEngine(honest, slots=1)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        answer = await client.ask(CHAT.path, body.encode(), method="POST")
        assert answer.status == 200
    assert engine.calls[0].body == body.encode()


async def test_chunked_request_body_reaches_the_engine_whole() -> None:
    body = json.dumps(CHAT.payload(stream=False)).encode()
    head = f"POST {CHAT.path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = b"".join(b"%x\r\n%b\r\n" % (1, body[i : i + 1]) for i in range(len(body)))
    engine = ScriptedEngine(honest, slots=1)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await client.send(head.encode() + pieces + b"0\r\n\r\n")
        assert (await client.answer()).status == 200
    assert engine.calls[0].body == body


async def test_large_answer_and_large_question() -> None:
    answer, question = b"x" * 3_000_000, CHAT.payload(stream=False, pad="y" * 2_000_000)
    engine = ScriptedEngine(Whole(body=answer), slots=1)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        got = await client.ask(CHAT.path, question)
        assert got.body == answer
        record = await gateway.record(outcome="completed")
        assert record["bytes"] == len(answer)
    assert len(engine.calls[0].body) == len(json.dumps(question))


async def test_stream_absent_means_what_the_route_means_by_it() -> None:
    openai = ScriptedEngine(honest, name="openai")
    ollama = ScriptedEngine(honest, name="ollama", kind="ollama", models=("llama",))
    async with running_gateway(openai, ollama) as gateway, http1(gateway.url) as client:
        whole = await client.ask(CHAT.path, {"model": "model", **CHAT.content})
        assert whole.json == CHAT.whole
        streamed = await client.ask(OLLAMA_CHAT.path, {"model": "llama", **OLLAMA_CHAT.content})
        assert OLLAMA_CHAT.parts is not None
        assert streamed.body == OLLAMA_CHAT.parts.all(5)
        await gateway.recorded(2)
        assert [record["stream"] for record in gateway.records] == [False, True]
