"""Answers that are added up: an engine of llama.cpp's kind streams, and its client gets one piece."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.support.gateway import running_gateway
from tests.support.http1 import http1
from tests.support.http2 import http2
from tests.support.routes import CHAT
from tests.support.scripted import Call, Script, ScriptedEngine
from tests.support.scripts import End, Raw, Sse, Status, Whole


def chunk(**more: Any) -> bytes:
    base = {
        "created": 1,
        "id": "c",
        "model": "m",
        "system_fingerprint": "f",
        "object": "chat.completion.chunk",
    }
    return b"data: " + json.dumps({**base, **more}).encode() + b"\n\n"


def delta(content: str | None, finish: str | None = None, **more: Any) -> bytes:
    inside = {} if content is None else {"content": content}
    return chunk(choices=[{"index": 0, "delta": {**inside, **more}, "finish_reason": finish}])


ROLE = chunk(choices=[{"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}])
PROGRESS = chunk(
    choices=[{"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}],
    prompt_progress={"total": 8, "cache": 0, "processed": 4, "time_ms": 1},
)
USAGE = chunk(choices=[], usage={"completion_tokens": 2}, timings={"predicted_n": 2})
DONE = b"data: [DONE]\n\n"
GOOD = [PROGRESS, PROGRESS, ROLE, delta("Hello"), delta(" there"), delta(None, "stop"), USAGE, DONE]


def llama(script: Script, *, slots: int = 1) -> ScriptedEngine:
    return ScriptedEngine(script, slots=slots, kind="llamacpp")


@pytest.mark.parametrize("protocol", ["http1", "http2"])
async def test_who_does_not_stream_gets_it_whole(protocol: str) -> None:
    engine = llama(Sse(list(GOOD), headers=[("X-Engine", "yes"), ("Cache-Control", "no-store")]))
    async with running_gateway(engine) as gateway:
        if protocol == "http1":
            async with http1(gateway.url) as client:
                answer = await client.ask(CHAT.path, CHAT.payload(stream=False))
        else:
            async with http2(gateway.url) as connection:
                answer = await connection.ask(CHAT.path, CHAT.payload(stream=False))
        assert answer.status == 200
        (choice,) = answer.json["choices"]
        assert choice["message"]["content"] == "Hello there"
        assert answer.json["usage"] == {"completion_tokens": 2}
        assert answer.head["content-type"] == "application/json; charset=utf-8"
        assert answer.head["content-length"] == str(len(answer.body))
        assert answer.head["x-engine"] == "yes"
        assert "x-accel-buffering" not in answer.head
        (call,) = engine.calls
        assert call.json == {
            **CHAT.payload(stream=True),
            "stream_options": {"include_usage": True},
            "return_progress": True,
        }
        record = await gateway.record(outcome="completed")
        assert (record["stream"], record["bytes"]) == (False, len(answer.body))


async def test_who_streams_gets_the_stream_without_progress() -> None:
    async with running_gateway(llama(Sse(list(GOOD)))) as gateway, http1(gateway.url) as client:
        answer = await client.ask(CHAT.path, CHAT.payload(stream=True))
        assert answer.body == b"".join(GOOD[2:])
        asked = await client.ask(CHAT.path, CHAT.payload(stream=True, return_progress=True))
        assert asked.body == b"".join(GOOD)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "script",
    [
        Sse([ROLE, delta("Hel")]),
        Sse([ROLE, b"data: {broken\n\n", DONE]),
        Sse([ROLE, DONE]),
        Sse([]),
        Raw([HEAD, b"5\r\ndata:", End.RST]),
        Raw([HEAD, End.FIN]),
        Sse([ROLE, *[delta("x" * 60_000)] * 80, DONE]),
    ],
    ids=["no marker", "no json", "no finish", "empty", "reset", "closed", "too long"],
)
async def test_answer_that_does_not_become_whole_is_the_engine_s_failure(script: Script) -> None:
    async with running_gateway(llama(script), engine={"reclaim": "off"}) as gateway:
        async with http1(gateway.url) as client:
            answer = await client.ask(CHAT.path, CHAT.payload(stream=False))
            assert (answer.status, answer.json["error"]["code"]) == (502, "engine_failed")
            assert answer.head["content-type"] == "application/json"
        await gateway.record(outcome="engine_failed", status=502)


async def test_an_error_within_the_stream_is_the_answer() -> None:
    error = {"code": 503, "message": "no room", "type": "unavailable_error"}
    script = Sse([ROLE, b"data: " + json.dumps({"error": error}).encode() + b"\n\n"])
    async with running_gateway(llama(script)) as gateway, http1(gateway.url) as client:
        answer = await client.ask(CHAT.path, CHAT.payload(stream=False))
        assert (answer.status, answer.json) == (503, {"error": error})
        assert (await gateway.record(outcome="completed"))["status"] == 503


@pytest.mark.parametrize("script", [Status(400), Whole(), Whole(body=b'{"x":1}')])
async def test_what_is_no_stream_passes(script: Script) -> None:
    expected = (
        script.body if isinstance(script, Status) else getattr(script, "body", None) or CHAT.whole_bytes()
    )
    async with running_gateway(llama(script)) as gateway, http1(gateway.url) as client:
        answer = await client.ask(CHAT.path, CHAT.payload(stream=False))
        assert answer.body == expected
        assert answer.status == getattr(script, "status", 200)


async def test_engine_may_take_its_time_for_a_whole_answer_if_it_is_not_silent() -> None:
    """It streams: its silence is between two tokens, not the whole time of the answer."""
    slow: list[bytes | float | trio.Event] = []
    for piece in GOOD:
        slow += [0.1, piece]
    stream = {"first_byte_seconds": 0.3, "idle_seconds": 0.3}
    async with running_gateway(llama(Sse(slow)), stream=stream) as gateway, http1(gateway.url) as client:
        assert (await client.ask(CHAT.path, CHAT.payload(stream=False))).status == 200


async def test_silence_in_a_whole_answer_is_504() -> None:
    script = Sse([ROLE, delta("Hel"), trio.Event()])
    async with running_gateway(
        llama(script), stream={"idle_seconds": 0.2}, engine={"reclaim": "off"}
    ) as gateway:
        async with http1(gateway.url) as client:
            answer = await client.ask(CHAT.path, CHAT.payload(stream=False))
        assert (answer.status, answer.json["error"]["code"]) == (504, "engine_timeout")


async def test_leaving_while_it_is_added_up() -> None:
    engine = llama(Sse([ROLE, delta("Hel"), trio.Event()]))

    async def says(call: Call) -> None:
        await Whole(
            body=f"llamacpp:requests_processing {engine.running}\nllamacpp:requests_deferred 0\n".encode()
        )(call)

    engine.pages["/metrics"] = says
    async with running_gateway(engine) as gateway:
        async with http1(gateway.url) as client:
            await client.post(CHAT.path, CHAT.payload(stream=False))
            call = await engine.call()
            await gateway.in_phase("streaming")
        await call.closed()
        record = await gateway.record(outcome="client_gone")
        assert (record["phase"], record["reclaimed_by"], record["bytes"]) == ("streaming", "engine_idle", 0)
