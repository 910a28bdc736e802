"""Requests the gateway refuses itself, in the shape of the API called, before any engine hears of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.gateway import running_gateway
from tests.support.http1 import Answer, http1, request_bytes
from tests.support.http2 import http2
from tests.support.routes import CHAT, MESSAGES, OLLAMA_CHAT, RESPONSES, ROUTES, Route
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import honest

every_route = pytest.mark.parametrize("route", ROUTES, ids=str)


def check_shape(path: str, answer: Answer, status: int, code: str) -> None:
    """An error of the gateway's own, as the clients of that API read it."""
    assert answer.status == status, answer
    assert answer.head["content-type"].startswith("application/json")
    error: dict[str, Any] = answer.json
    if path.startswith("/api/"):
        assert isinstance(error["error"], str)
        assert error["error"]
        return
    inner = error["error"]
    assert inner["message"]
    assert inner["type"]
    assert inner["code"] == code
    if path == MESSAGES.path:
        assert error["type"] == "error"
    else:
        assert "param" in inner
    if status in (429, 503):
        assert int(answer.head["retry-after"]) > 0


@every_route
async def test_unknown_model(route: Route) -> None:
    engine = ScriptedEngine(honest, kind=route.kind)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        answer = await client.ask(route.path, {**route.payload(stream=True), "model": "no-such"})
        check_shape(route.path, answer, 404, "model_not_found")
        await gateway.record(outcome="rejected", status=404, code="model_not_found", engine=None)
    assert engine.calls == []


BROKEN = {
    "nothing": (b"", "invalid_json"),
    "half": (b'{"model": "mod', "invalid_json"),
    "prose": (b"hello", "invalid_json"),
    "bytes": (b"\xff\xfe\x00", "invalid_json"),
    "deep": (b'{"model": "model", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
    "list": (b"[1]", "invalid_request"),
    "no model": (b'{"messages": []}', "invalid_request"),
    "model of the wrong type": (b'{"model": 7}', "invalid_request"),
    "stream of the wrong type": (b'{"model": "model", "stream": "yes"}', "invalid_request"),
    "model twice": (b'{"model": "model", "model": "other"}', "invalid_request"),
    "stream twice": (b'{"model": "model", "stream": true, "stream": false}', "invalid_request"),
    "model twice, once in escapes": (b'{"model": "model", "mod\\u0065l": "other"}', "invalid_request"),
    "model in another case": (b'{"model": "model", "Model": "other"}', "invalid_request"),
    "n of the wrong type": (b'{"model": "model", "n": "many"}', "invalid_request"),
}


@every_route
@pytest.mark.parametrize("fault", BROKEN)
async def test_broken_body(route: Route, fault: str) -> None:
    body, code = BROKEN[fault]
    engine = ScriptedEngine(honest, kind=route.kind)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await client.send(request_bytes(route.path, body))
        answer = await client.answer()
        assert answer.status == 400, answer
        if not (fault == "list" and answer.json.get("error", {})):
            check_shape(route.path, answer, 400, code)
        await gateway.record(outcome="rejected", status=400)
        again = await client.ask(route.path, route.payload(stream=False))
        assert again.status == 200
    assert len(engine.calls) == 1


async def test_a_name_inside_other_objects_is_nobody_s_business() -> None:
    payload = {**CHAT.payload(stream=False), "metadata": {"model": "x", "Model": "y", "stream": "z", "n": -1}}
    engine = ScriptedEngine(honest)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        assert (await client.ask(CHAT.path, payload)).status == 200


async def test_answer_in_the_background_would_run_for_nobody() -> None:
    engine = ScriptedEngine(honest, kind="vllm")
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        answer = await client.ask(RESPONSES.path, RESPONSES.payload(stream=False, background=True))
        check_shape(RESPONSES.path, answer, 400, "invalid_request")
        answer = await client.ask(RESPONSES.path, RESPONSES.payload(stream=False, background=False))
        assert answer.status == 200


@pytest.mark.parametrize(
    "path",
    ["/", "/v1/nonsense", "/v1/load_lora_adapter", "/api/pull", "/api/delete", "/metrics", "/admin/ledger"],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_paths_outside_the_table_are_not_found(path: str, method: str) -> None:
    engines = [
        ScriptedEngine(honest),
        ScriptedEngine(honest, name="ollama", kind="ollama", models=("llama",)),
    ]
    async with running_gateway(*engines) as gateway, http1(gateway.url) as client:
        answer = await client.ask(path, {"model": "model"} if method == "POST" else None, method=method)
        check_shape(path, answer, 404, "not_found")
    assert engines[0].calls == engines[1].calls == []


@pytest.mark.parametrize(
    "sneaky", ["/v1/../api/pull", "/v1//chat/completions", "/v1/chat/completions/", "/%61pi/pull"]
)
async def test_no_spelling_of_a_path_reaches_beyond_the_table(sneaky: str) -> None:
    engine = ScriptedEngine(honest, kind="ollama")
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        answer = await client.ask(sneaky, CHAT.payload(stream=False))
        assert answer.status in (400, 404)
    assert engine.calls == []


async def test_the_route_of_another_kind_of_engine_is_not_offered() -> None:
    engine = ScriptedEngine(honest, kind="openai")
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        answer = await client.ask(OLLAMA_CHAT.path, OLLAMA_CHAT.payload(stream=False))
        assert answer.status == 404
        assert isinstance(answer.json["error"], str)
    assert engine.calls == []


async def test_websocket_and_multipart_are_not_supported_yet() -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine) as gateway:
        async with http1(gateway.url) as client:
            upgrade = {
                "Connection": "Upgrade",
                "Upgrade": "websocket",
                "Sec-WebSocket-Version": "13",
                "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            }
            answer = await client.ask("/v1/realtime", method="GET", headers=upgrade)
            assert answer.status == 501
        async with http1(gateway.url) as client:
            form = b"--x\r\nContent-Disposition: form-data; name=model\r\n\r\nmodel\r\n--x--\r\n"
            for path in ("/v1/audio/transcriptions", CHAT.path):
                kind = {"Content-Type": "multipart/form-data; boundary=x"}
                answer = await client.ask(path, form, headers=kind)
                check_shape(path, answer, 501, "not_supported")
        await gateway.record(status=501, code="not_supported", outcome="rejected")
    assert engine.calls == []


async def test_upgrade_to_h2c_is_ignored() -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        headers = {
            "Connection": "Upgrade, HTTP2-Settings",
            "Upgrade": "h2c",
            "HTTP2-Settings": "AAMAAABkAAQAAP__",
        }
        answer = await client.ask(CHAT.path, CHAT.payload(stream=False), headers=headers)
        assert (answer.status, answer.head.version) == (200, "HTTP/1.1")
        assert (await client.ask("/v1/models", headers=headers)).status == 200


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_body_too_large(framing: str) -> None:
    body = json.dumps(CHAT.payload(stream=False, pad="x" * 5000)).encode()
    engine = ScriptedEngine(honest)
    async with (
        running_gateway(engine, server={"max_body_bytes": 2000}) as gateway,
        http1(gateway.url) as client,
    ):
        if framing == "length":
            await client.send(request_bytes(CHAT.path, body))
        else:
            head = f"POST {CHAT.path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
            await client.send(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        check_shape(CHAT.path, await client.answer(), 413, "body_too_large")
        await gateway.record(outcome="rejected", status=413, code="body_too_large")
        if framing == "length":
            assert (await client.ask("/v1/models")).status == 200
    assert engine.calls == []


async def test_body_too_large_on_one_http2_stream_leaves_the_connection_usable() -> None:
    engine = ScriptedEngine(honest)
    async with (
        running_gateway(engine, server={"max_body_bytes": 2000}) as gateway,
        http2(gateway.url) as connection,
    ):
        for _ in range(3):
            stream = await connection.post(CHAT.path, b"x" * 15_000)
            assert (await stream.head()).status == 413
        assert (await connection.ask(CHAT.path, CHAT.payload(stream=False))).status == 200
    assert len(engine.calls) == 1


async def test_body_that_does_not_arrive() -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine, server={"body_seconds": 0.2}) as gateway, http1(gateway.url) as client:
        await client.send(request_bytes(CHAT.path, CHAT.payload(stream=False))[:-5])
        check_shape(CHAT.path, await client.answer(), 408, "body_timeout")
        await gateway.record(outcome="rejected", status=408, code="body_timeout", phase="receiving")
    assert engine.calls == []
