"""Through nginx and HAProxy, as deploy/ has them: streams flow, leaving is felt, bytes and errors pass.

Where the program isn't installed its tests are skipped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.conftest import Tls
from tests.deploy.proxies import NAMES, Proxy, running_proxy
from tests.support.gateway import Gateway, Section, running_gateway
from tests.support.http1 import Http1, Truncated, http1, request_bytes
from tests.support.http2 import Stream as Http2Stream
from tests.support.http2 import http2
from tests.support.process import gateway_process
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Ending, Status, Stream, Whole, honest, never_answers

FELT_SECONDS = 1.0  # it takes milliseconds: docs/deployment.md

each_proxy = pytest.mark.parametrize("name", NAMES)
each_way = pytest.mark.parametrize(
    ("name", "protocol"),
    [("nginx", "http1"), ("nginx", "http2"), ("haproxy", "http1")],  # haproxy.cfg says why not over HTTP/2
)


@asynccontextmanager
async def proxied(
    name: str, folder: Path, tls: Tls, engine: ScriptedEngine, server: Section | None = None
) -> AsyncIterator[tuple[Gateway, Proxy]]:
    async with (
        running_gateway(engine, server=server) as gateway,
        running_proxy(name, folder, tls, gateway=gateway.url, admin=gateway.service.admin) as proxy,
    ):
        yield gateway, proxy


@asynccontextmanager
async def asked(protocol: str, proxy: Proxy, payload: object) -> AsyncIterator[Http1 | Http2Stream]:
    """A chat request under way."""
    if protocol == "http1":
        async with http1(proxy.url, tls=proxy.trusted) as client:
            await client.post(CHAT.path, payload)
            yield client
    else:
        async with http2(proxy.url, tls=proxy.trusted) as connection:
            yield await connection.post(CHAT.path, payload)


async def leave(exchange: Http1 | Http2Stream) -> float:
    now = trio.current_time()
    await (exchange.close() if isinstance(exchange, Http1) else exchange.reset())
    return now


@each_way
async def test_a_token_arrives_before_the_next_is_made(
    name: str, protocol: str, tmp_path: Path, tls: Tls
) -> None:
    assert CHAT.parts is not None
    go_on = trio.Event()
    engine = ScriptedEngine(Stream(tokens=2, pause_after=1, until=go_on))
    async with (
        proxied(name, tmp_path, tls, engine) as (_, proxy),
        asked(protocol, proxy, CHAT.payload(stream=True)) as exchange,
    ):
        assert (await exchange.head()).status == 200
        await exchange.until(b" tk0")
        assert engine.calls[0].tokens == 1
        go_on.set()
        assert await exchange.rest() == CHAT.parts.all(2)


@each_way
async def test_a_client_that_leaves_a_silent_stream_ends_it(
    name: str, protocol: str, tmp_path: Path, tls: Tls
) -> None:
    engine = ScriptedEngine(Stream(pause_after=1, until=trio.Event()))
    async with proxied(name, tmp_path, tls, engine) as (gateway, proxy):
        async with asked(protocol, proxy, CHAT.payload(stream=True)) as exchange:
            await exchange.head()
            await exchange.until(b" tk0")
            left = await leave(exchange)
            assert await engine.calls[0].closed() - left < FELT_SECONDS
        await gateway.record(outcome="client_gone", phase="streaming")


@each_way
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_byte_ends_it(
    name: str, protocol: str, stream: bool, tmp_path: Path, tls: Tls
) -> None:
    engine = ScriptedEngine(never_answers)
    async with proxied(name, tmp_path, tls, engine) as (gateway, proxy):
        async with asked(protocol, proxy, CHAT.payload(stream=stream)) as exchange:
            call = await engine.call()
            left = await leave(exchange)
            assert await call.closed() - left < FELT_SECONDS
        await gateway.record(outcome="client_gone", status=499)


@each_way
async def test_a_client_that_leaves_the_queue_is_never_called_for(
    name: str, protocol: str, tmp_path: Path, tls: Tls
) -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(Stream(pause_after=1, until=go_on), slots=1)
    async with proxied(name, tmp_path, tls, engine) as (gateway, proxy):
        async with asked("http1", proxy, CHAT.payload(stream=True)) as first:
            await first.head()
            async with asked(protocol, proxy, CHAT.payload(stream=True)) as second:
                await gateway.queued(1)
                left = await leave(second)
                await gateway.queued(0)
                assert trio.current_time() - left < FELT_SECONDS
            go_on.set()
            await first.rest()
        await gateway.record(outcome="client_gone", phase="queued")
    assert len(engine.calls) == 1


@each_way
async def test_bodies_pass_unchanged(name: str, protocol: str, tmp_path: Path, tls: Tls) -> None:
    text = "".join(hashlib.sha256(b"%d" % number).hexdigest() for number in range(20_000))
    body = json.dumps(CHAT.payload(stream=False, user=text), indent=1).encode() + b"\r\n \n"
    answer = json.dumps({"odd": "\u2028 \x7f", "choices": [], "text": text}).encode() + b"\n\n"
    engine = ScriptedEngine(Whole(body=answer))
    async with proxied(name, tmp_path, tls, engine) as (_, proxy):
        if protocol == "http1":
            async with http1(proxy.url, tls=proxy.trusted) as client:
                await client.send(request_bytes(CHAT.path, body))
                got = await client.answer()
        else:
            async with http2(proxy.url, tls=proxy.trusted) as connection:
                fields = {"content-type": "application/json", "content-length": str(len(body))}
                stream = await connection.request("POST", CHAT.path, fields, end=False)
                await send_all(stream, body)
                got = await stream.answer()
    assert (got.status, got.body) == (200, answer)
    assert engine.calls[0].body == body


async def send_all(stream: Http2Stream, body: bytes) -> None:
    """As far as the windows let it, again and again."""
    connection, at = stream.connection, 0
    while at < len(body):
        await connection.until(lambda: connection.h2.local_flow_control_window(stream.number) > 0)
        size = connection.h2.local_flow_control_window(stream.number)
        size = min(size, connection.h2.max_outbound_frame_size, len(body) - at)
        await stream.send_data(body[at : at + size], end=at + size == len(body))
        at += size


@each_way
async def test_refusals_pass_with_when_to_come_back(
    name: str, protocol: str, tmp_path: Path, tls: Tls
) -> None:
    headers = [("Content-Type", "application/json"), ("Retry-After", "7")]
    engine = ScriptedEngine(Status(429, headers=headers))
    async with (
        proxied(name, tmp_path, tls, engine) as (_, proxy),
        asked(protocol, proxy, CHAT.payload(stream=True)) as exchange,
    ):
        answer = await exchange.answer()
        assert (answer.status, answer.head["retry-after"]) == (429, "7")
        assert answer.body == Status(429).body


@each_proxy
async def test_too_large_a_body_is_refused_by_the_gateway(name: str, tmp_path: Path, tls: Tls) -> None:
    async with (
        proxied(name, tmp_path, tls, ScriptedEngine(honest), {"max_body_bytes": 100_000}) as (_, proxy),
        asked("http1", proxy, CHAT.payload(stream=True, user="x" * 200_000)) as exchange,
    ):
        answer = await exchange.answer()
        assert (answer.status, answer.json["error"]["code"]) == (413, "body_too_large")


@each_way
async def test_an_answer_that_broke_off_does_not_look_whole(
    name: str, protocol: str, tmp_path: Path, tls: Tls
) -> None:
    engine = ScriptedEngine(Stream(ending=Ending.FIN))
    async with (
        proxied(name, tmp_path, tls, engine) as (_, proxy),
        asked(protocol, proxy, CHAT.payload(stream=True)) as exchange,
    ):
        await exchange.head()
        with pytest.raises(Truncated) as cut:
            await exchange.rest()
        got = bytes(exchange.got) or cut.value.got
        assert b" tk4" in got
        assert b"engine_failed" in got


@each_proxy
async def test_a_drain_lets_streams_end(name: str, tmp_path: Path, tls: Tls) -> None:
    assert CHAT.parts is not None
    go_on = trio.Event()
    engine = ScriptedEngine(Stream(pause_after=1, until=go_on))
    async with proxied(name, tmp_path, tls, engine) as (gateway, proxy):
        async with asked("http1", proxy, CHAT.payload(stream=True)) as first:
            await first.head()
            gateway.service.drain()
            async with asked("http1", proxy, CHAT.payload(stream=True)) as second:
                answer = await second.answer()
                assert answer.status == 503
            await trio.sleep(1.2 if name == "haproxy" else 0)  # longer than between two of its checks
            go_on.set()
            assert await first.rest() == CHAT.parts.all(5)
        await gateway.ended.wait()


@each_proxy
async def test_the_control_plane_is_not_to_be_reached(name: str, tmp_path: Path, tls: Tls) -> None:
    async with (
        proxied(name, tmp_path, tls, ScriptedEngine(honest)) as (_, proxy),
        http1(proxy.url, tls=proxy.trusted) as client,
    ):
        for path in ("/", "/readyz", "/healthz", "/metrics", "/admin/requests"):
            assert (await client.ask(path)).status == 404
        assert (await client.ask("/v1/models")).status == 200


@each_proxy
async def test_connections_to_the_gateway_are_kept(name: str, tmp_path: Path, tls: Tls) -> None:
    # In the gateway's place an engine, which counts connections; HAProxy's checks go to a real one.
    engine = ScriptedEngine(honest)
    async with (
        running_gateway(engine) as gateway,
        running_proxy(name, tmp_path, tls, gateway=engine.url, admin=gateway.service.admin) as proxy,
    ):
        async with http1(proxy.url, tls=proxy.trusted) as client:  # one: workers and threads keep their own
            for _ in range(10):
                assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).status == 200
        assert [call.nth > 0 for call in engine.calls] == [False] + 9 * [True]


@each_proxy
async def test_what_clients_write_about_themselves_is_replaced(name: str, tmp_path: Path, tls: Tls) -> None:
    engine = ScriptedEngine(honest)
    faked = {"X-Forwarded-For": "6.6.6.6", "X-Forwarded-Proto": "gopher", "X-Forwarded-Host": "evil"}
    async with (
        proxied(name, tmp_path, tls, engine) as (gateway, proxy),
        http1(proxy.url, tls=proxy.trusted) as client,
    ):
        await client.ask(CHAT.path, CHAT.payload(stream=False), headers={**faked, "X-Request-Id": "mine"})
        await client.ask(CHAT.path, CHAT.payload(stream=False), headers=faked)
        call = engine.calls[0]
        assert call.header("x-forwarded-for") == "127.0.0.1, 127.0.0.1"
        assert call.header("x-forwarded-proto") == "https"
        assert call.header("x-forwarded-host") == "gateway.localhost"
        await gateway.recorded(2)
        first, second = (record["caller_id"] for record in gateway.records)
        assert first == "mine"
        assert len(second) >= 16


async def test_clients_of_a_gateway_that_is_gone_are_told_in_json(tmp_path: Path, tls: Tls) -> None:
    nobody = "http://127.0.0.1:1"
    with trio.fail_after(20):
        async with (
            running_proxy("nginx", tmp_path, tls, gateway=nobody, admin=nobody) as proxy,
            asked("http1", proxy, CHAT.payload(stream=True)) as exchange,
        ):
            answer = await exchange.answer()
            assert (answer.status, answer.head["retry-after"]) == (503, "1")
            assert "can't be reached" in answer.json["error"]["message"]


@each_proxy
@pytest.mark.slow
async def test_many_streams_are_held_at_once(name: str, tmp_path: Path, tls: Tls) -> None:
    assert CHAT.parts is not None
    count, go_on, whole = 200, trio.Event(), CHAT.parts.all(5)
    engine = ScriptedEngine(Stream(pause_after=2, until=go_on), slots=count)
    with trio.fail_after(60):
        async with (
            gateway_process(tmp_path, engine) as gateway,
            running_proxy(name, tmp_path, tls, gateway=gateway.url, admin=gateway.admin_url) as proxy,
            trio.open_nursery() as nursery,
        ):
            ended = 0

            async def read() -> None:
                nonlocal ended
                async with asked("http1", proxy, CHAT.payload(stream=True)) as exchange:
                    assert (await exchange.answer()).body == whole
                    ended += 1

            for _ in range(count):
                nursery.start_soon(read)
            await engine.until(lambda: sum(call.tokens == 2 for call in engine.calls) == count)
            assert ended == 0
            go_on.set()
    assert ended == count
