"""Header fields: what of a client's reaches the engine, and what of an engine's reaches the client."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.conftest import Tls
from tests.support.gateway import running_gateway
from tests.support.http1 import Head, http1, request_bytes
from tests.support.http2 import http2
from tests.support.routes import CHAT, ROUTES, Route
from tests.support.scripted import Call, ScriptedEngine
from tests.support.scripts import Stream, honest

PROTOCOLS = pytest.mark.parametrize("protocol", ["http1", "http2"])


async def exchange(protocol: str, url: str, headers: dict[str, str], stream: bool = True) -> Head:
    payload = CHAT.payload(stream=stream)
    if protocol == "http1":
        async with http1(url) as client:
            answer = await client.ask(CHAT.path, payload, headers=headers)
    else:
        async with http2(url) as connection:
            answer = await connection.ask(
                CHAT.path, payload, headers={k.lower(): v for k, v in headers.items()}
            )
    assert answer.status == 200
    return answer.head


@PROTOCOLS
async def test_what_the_engine_is_told(protocol: str) -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine) as gateway:
        sent = {
            "X-Custom": "kept",
            "Accept-Encoding": "gzip, br",
            "X-Forwarded-For": "203.0.113.9",
            "User-Agent": "me",
        }
        await exchange(protocol, gateway.url, sent)
    (call,) = engine.calls
    assert call.header("Host") == engine.url.removeprefix("http://")
    assert call.header("Accept-Encoding") == "identity"
    assert call.header("X-Custom") == "kept"
    assert call.header("User-Agent") == "me"
    assert call.header("Content-Type") == "application/json"
    assert call.header("Content-Length") == str(len(call.body))
    assert call.header("Transfer-Encoding") is None
    assert call.header("X-Forwarded-For") == "203.0.113.9, 127.0.0.1"
    assert call.header("X-Forwarded-Proto") == "http"
    assert call.stray == b""


async def test_forwarded_scheme_of_a_tls_listener(tls: Tls) -> None:
    engine = ScriptedEngine(honest)
    async with (
        running_gateway(engine, server={"tls": tls.section}) as gateway,
        http1(gateway.url, tls=tls.trusted) as client,
    ):
        assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).status == 200
    assert engine.calls[0].header("X-Forwarded-Proto") == "https"


async def test_fields_of_one_hop_stay_on_it() -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine) as gateway:
        sent = {
            "Connection": "keep-alive, X-Secret",
            "X-Secret": "for the gateway only",
            "Keep-Alive": "timeout=5",
            "Proxy-Authorization": "Basic eDp5",
            "Proxy-Connection": "keep-alive",
            "TE": "trailers",
            "Upgrade": "h2c",
            "X-End": "kept",
        }
        await exchange("http1", gateway.url, sent)
    (call,) = engine.calls
    for name in ("X-Secret", "Keep-Alive", "Proxy-Authorization", "Proxy-Connection", "TE", "Upgrade"):
        assert call.header(name) is None, name
    assert "x-secret" not in (call.header("Connection") or "").lower()
    assert call.header("X-End") == "kept"


@PROTOCOLS
async def test_the_caller_s_id_is_echoed_and_kept_but_names_nothing_upstream(protocol: str) -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine) as gateway:
        head = await exchange(protocol, gateway.url, {"X-Request-Id": "mine-1"})
        assert head["x-request-id"] == "mine-1"
        record = await gateway.record(caller_id="mine-1")
        minted = engine.calls[0].header("X-Request-Id")
        assert minted
        assert minted != "mine-1"
        assert record["id"] == minted
        head = await exchange(protocol, gateway.url, {})
        second = engine.calls[1].header("X-Request-Id")
        assert second not in (None, minted)
        assert (await gateway.record(id=second))["caller_id"] is None


@pytest.mark.parametrize("evil", ["a" * 5000, "x y", "id{}", "\x7f"])
async def test_an_odd_id_of_the_caller_s_does_no_harm(evil: str) -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await client.send(request_bytes(CHAT.path, CHAT.payload(stream=True), headers={"X-Request-Id": evil}))
        assert (await client.answer()).status in (200, 400)
        assert (await client.ask("/v1/models")).status == 200


async def test_a_client_s_key_goes_up_only_where_the_engine_has_none_of_its_own() -> None:
    plain, keyed = (
        ScriptedEngine(honest, models=("plain",)),
        ScriptedEngine(honest, name="keyed", models=("keyed",)),
    )
    entry: dict[str, Any] = {
        "name": "keyed",
        "kind": "openai",
        "url": keyed.url,
        "models": ["keyed"],
        "slots": 4,
    }
    words = {**entry, "api_key": "engine-secret", "headers": {"X-Cluster": "blue"}}
    async with (
        running_gateway(plain, words) as gateway,
        http1(gateway.url) as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(keyed.serve)
        for model in ("plain", "keyed"):
            payload = {**CHAT.payload(stream=False), "model": model}
            headers = {"Authorization": "Bearer client-secret", "X-Api-Key": "client-secret"}
            assert (await client.ask(CHAT.path, payload, headers=headers)).status == 200
        nursery.cancel_scope.cancel()
    assert plain.calls[0].header("Authorization") == "Bearer client-secret"
    assert keyed.calls[0].header("Authorization") == "Bearer engine-secret"
    assert keyed.calls[0].header("X-Cluster") == "blue"
    assert not any("client-secret" in value for _, value in keyed.calls[0].headers)
    assert not any("secret" in str(record) for record in gateway.records)


async def test_llama_cpp_never_gets_the_header_that_keeps_it_running() -> None:
    engine = ScriptedEngine(honest, kind="llamacpp")
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await client.post(CHAT.path, CHAT.payload(stream=True), {"X-Conversation-Id": "c1"})
        await client.answer()
    assert engine.calls[0].header("X-Conversation-Id") is None


@PROTOCOLS
async def test_what_the_client_is_told(protocol: str) -> None:
    headers = [
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
        ("X-Engine", "kept"),
        ("Connection", "keep-alive, X-Internal"),
        ("Keep-Alive", "timeout=5, max=100"),
        ("X-Internal", "hidden"),
        ("Proxy-Authenticate", "Basic"),
        ("X-Gateway-Model", "forged"),
    ]
    engine = ScriptedEngine(Stream(headers=headers))
    async with running_gateway(engine) as gateway:
        head = await exchange(protocol, gateway.url, {})
    assert head.all("set-cookie") == ["a=1", "b=2"]
    assert head["x-engine"] == "kept"
    for name in ("keep-alive", "x-internal", "proxy-authenticate", "x-gateway-model"):
        assert name not in head, name
    assert "x-internal" not in "".join(head.all("connection")).lower()
    assert head["cache-control"] == "no-cache"
    assert head["x-accel-buffering"] == "no"
    if protocol == "http2":
        assert "transfer-encoding" not in head
        assert "connection" not in head


@pytest.mark.parametrize("route", ROUTES, ids=str)
async def test_an_engine_s_own_cache_words_are_not_doubled(route: Route) -> None:
    async def cached(call: Call) -> None:
        await Stream(headers=[("Cache-Control", "no-store"), ("X-Accel-Buffering", "no")])(call)

    engine = ScriptedEngine(cached if route.parts is not None else honest, kind=route.kind)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        answer = await client.ask(route.path, route.payload(stream=True))
        assert len(answer.head.all("cache-control")) <= 1
        assert len(answer.head.all("x-accel-buffering")) <= 1
