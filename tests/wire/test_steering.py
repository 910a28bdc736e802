"""Nothing a client says chooses who is called, and nobody is told the engines' keys."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import structlog

from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import Truncated, http1, request_bytes
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Ending, Raw, Status, Stream, honest
from tests.wire import frames as f
from tests.wire.around import BODY
from tests.wire.raw2 import raw2

KEY = "sk-very-secret-0123456789"


@contextmanager
def trap() -> Iterator[str]:
    """An address that nobody may ever connect to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(BlockingIOError):
            listener.accept()


def bodies(evil: str) -> list[dict[str, Any]]:
    url = f"http://{evil}"
    return [
        {name: url}
        for name in ("api_base", "base_url", "api_url", "url", "endpoint", "proxy", "callback", "webhook_url")
    ] + [
        {"litellm_params": {"api_base": url}},
        {"extra_body": {"base_url": url, "headers": {"Host": evil}}},
        {"metadata": {"model_info": {"base_model": url}}},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"{url}/x.png"}}]}
            ]
        },
        {"tools": [{"type": "mcp", "server_url": url}]},
    ]


HEADERS = [
    "Host",
    "X-Base-Url",
    "X-Api-Base",
    "X-Forwarded-Host",
    "X-Forwarded-Server",
    "X-Original-URL",
    "X-Rewrite-URL",
    "X-Host",
    "X-Upstream",
    "Forwarded",
    "Via",
    "Referer",
    "Origin",
    "Destination",
    "Proxy",
]


async def test_no_field_of_the_body_is_dialled() -> None:
    engine = ScriptedEngine(honest)
    with trap() as evil:
        async with running_gateway(engine) as gateway, http1(gateway.url) as client:
            for more in bodies(evil):
                payload = {**CHAT.payload(stream=True), **more}
                assert (await client.ask(CHAT.path, payload)).status == 200
                assert engine.calls[-1].json == payload


async def test_no_header_is_dialled() -> None:
    engine = ScriptedEngine(honest)
    with trap() as evil:
        async with (
            running_gateway(engine) as gateway,
            http1(gateway.url) as client,
            raw2(gateway.url) as connection,
        ):
            for number, name in enumerate(HEADERS):
                for value in (evil, f"http://{evil}/", f"host={evil}"):
                    answer = await client.ask(CHAT.path, CHAT.payload(stream=True), headers={name: value})
                    assert answer.status == 200
                    assert engine.calls[-1].header("host") == engine.url.removeprefix("http://")
                stream = 2 * number + 1
                more = [] if name == "Host" else [(name.lower().encode(), evil.encode())]
                fields = [
                    (field, evil.encode() if field == b":authority" else value)
                    for field, value in f.head(more=more)
                ]
                await connection.send(f.headers(stream, fields, end=False), f.data(stream, BODY, end=True))
                await connection.over(stream)
                assert connection.status(stream) == 200
    assert len(engine.calls) == len(HEADERS) * 4


async def test_no_target_is_dialled() -> None:
    engine = ScriptedEngine(honest)
    body = BODY
    with trap() as evil:
        async with running_gateway(engine) as gateway, http1(gateway.url) as client:
            for target in (
                f"http://{evil}{CHAT.path}",
                f"//{evil}{CHAT.path}",
                f"/http://{evil}/",
                f"@{evil}/",
                f"{evil}:443",
                "*",
            ):
                await client.send(request_bytes(target, body))
                assert (await client.answer()).status == 404, target
            await client.send(request_bytes(f"{CHAT.path}?url=http://{evil}/&base_url={evil}#@{evil}", body))
            assert (await client.answer()).status == 200
            await client.send(request_bytes(evil, method="CONNECT"))
            assert (await client.answer()).status == 501
    assert [call.path for call in engine.calls] == [CHAT.path]


async def test_no_proxy_of_the_environment_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(honest)
    with trap() as evil:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://{evil}")
        async with running_gateway(engine) as gateway, http1(gateway.url) as client:
            assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).status == 200


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_an_engine_s_redirect_is_passed_on_and_not_followed(status: int) -> None:
    with trap() as evil:
        location = f"http://{evil}/v1/chat/completions"
        engine = ScriptedEngine(
            Status(status, b"moved", [("Location", location), ("Content-Type", "text/plain")])
        )
        async with running_gateway(engine) as gateway, http1(gateway.url) as client:
            answer = await client.ask(CHAT.path, CHAT.payload(stream=True))
            assert (answer.status, answer.head["location"], answer.body) == (status, location, b"moved")
    assert len(engine.calls) == 1


async def test_what_an_engine_gets_is_one_request_framed_once() -> None:
    """Whatever the framing was in which it came."""
    engine = ScriptedEngine(honest)
    chunked = b"%x;a=b\r\n%b\r\n0\r\nContent-Length: 3\r\nHost: evil\r\n\r\n" % (len(BODY), BODY)
    odd = {
        "Transfer-Encoding": "chunked",
        "Connection": "keep-alive, X-Secret, Content-Type",
        "X-Secret": "hop",
        "TE": "trailers, chunked",
        "Trailer": "Host",
        "Keep-Alive": "timeout=1",
        "Proxy-Connection": "close",
        "Upgrade": "h2c",
        "HTTP2-Settings": "AAMAAABk",
    }
    async with (
        running_gateway(engine) as gateway,
        http1(gateway.url) as client,
        raw2(gateway.url) as connection,
    ):
        await client.send(request_bytes(CHAT.path, headers=odd) + chunked)
        assert (await client.answer()).status == 200
        trailers = f.headers(1, [(b"content-length", b"3"), (b"x-trailer", b"evil")])
        await connection.send(f.headers(1, f.head(), end=False), f.data(1, BODY), trailers)
        await connection.over(1)
        assert connection.status(1) == 200
    for call in engine.calls:
        assert call.body == BODY
        assert call.stray == b""
        names = [name.lower() for name, _ in call.headers]
        assert call.header("content-length") == str(len(BODY))
        unwanted = {
            "transfer-encoding",
            "x-secret",
            "te",
            "trailer",
            "keep-alive",
            "upgrade",
            "http2-settings",
        }
        assert not unwanted & set(names)
        assert "x-trailer" not in names
        assert names.count("host") == 1


async def everything_told(gateway: Gateway) -> str:
    """What the control plane and the records say."""
    told = [json.dumps(record, default=str) for record in gateway.records]
    for path in ("/metrics", "/admin/requests", "/admin/ledger", "/healthz", "/readyz", "/no-such"):
        answer = await gateway.admin(path)
        told += [answer.body.decode(), str(answer.head)]
    return "\n".join(told)


async def test_the_key_goes_to_the_engine_and_nowhere_else(capfd: pytest.CaptureFixture[str]) -> None:
    """Also when the engine can't be reached, fails, breaks off, or sends what isn't HTTP."""
    engine = ScriptedEngine(honest)
    engine.plan = [
        Status(401),
        Status(500),
        Stream(ending=Ending.RST),
        Stream(ending=Ending.NO_MARKER),
        Raw([b"this is no HTTP\r\n\r\n"]),
        Raw([b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"]),
    ]
    dead = {
        "name": "dead",
        "kind": "openai",
        "url": "http://127.0.0.1:1",
        "slots": 1,
        "models": ["dead"],
        "api_key": KEY,
    }
    told = []
    with structlog.testing.capture_logs() as lines:
        async with running_gateway(engine, dead, engine={"api_key": KEY}) as gateway:
            for model in [*["model"] * 7, "dead", "no-such"]:
                async with http1(gateway.url) as client:
                    await client.post(
                        CHAT.path,
                        {**CHAT.payload(stream=True), "model": model},
                        {"Authorization": "Bearer mine"},
                    )
                    head = await client.head()
                    with suppress(Truncated):
                        await client.rest()
                    told += [str(head), bytes(client.got).decode()]
            await gateway.recorded(9)
            told.append(await everything_told(gateway))
    told += [str(lines), *capfd.readouterr()]
    assert [call.header("authorization") for call in engine.calls] == [f"Bearer {KEY}"] * 7
    for what in told:
        assert KEY not in what
        assert "Bearer" not in what


async def test_a_client_s_key_is_told_nobody_either(capfd: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine(honest)
    with structlog.testing.capture_logs() as lines:
        async with running_gateway(engine) as gateway, http1(gateway.url) as client:
            for path in (CHAT.path, "/no-such", "/v1/models"):
                for payload in (CHAT.payload(stream=True), b"broken"):
                    method = "GET" if path == "/v1/models" else "POST"
                    headers = {"Authorization": f"Bearer {KEY}", "X-Api-Key": KEY, "Cookie": KEY}
                    answer = await client.ask(path, payload, method=method, headers=headers)
                    assert KEY.encode() not in answer.body
            told = await everything_told(gateway)
    assert KEY not in told
    assert KEY not in str(lines)
    assert KEY not in "".join(capfd.readouterr())


async def test_a_connection_that_is_refused_mid_head_doesn_t_name_what_it_said(
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine = ScriptedEngine(honest)
    with structlog.testing.capture_logs() as lines:
        async with running_gateway(engine) as gateway, http1(gateway.url) as client:
            await client.send(
                f"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\x00\r\n\r\n".encode()
            )
            assert (await client.answer()).status == 400
            assert await client.eof() == b""
            told = await everything_told(gateway)
    assert KEY not in told + str(lines) + "".join(capfd.readouterr())
