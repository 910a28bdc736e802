"""Where the gateway listens and what it speaks: TCP, unix sockets, inherited descriptors, TLS, HTTP/1.0."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest
import trio

from tests.conftest import Tls
from tests.support.gateway import running_gateway
from tests.support.http1 import Http1, connect, http1, request_bytes
from tests.support.http2 import http2
from tests.support.process import gateway_process
from tests.support.routes import CHAT, STREAMING, Route
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Stream, honest

every_stream = pytest.mark.parametrize("route", STREAMING, ids=str)


def whole(route: Route, tokens: int = 5) -> bytes:
    assert route.parts is not None
    return route.parts.all(tokens)


async def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    engine = ScriptedEngine(honest)
    async with running_gateway(engine, server={"listen": [f"unix:{path}"]}) as gateway:
        assert gateway.url == f"unix:{path}"
        async with http1(gateway.url) as client, http2(gateway.url) as connection:
            assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).body == whole(CHAT)
            assert (await connection.ask(CHAT.path, CHAT.payload(stream=True))).body == whole(CHAT)
        engine.script = Stream(pause_after=1, until=trio.Event())
        async with http1(gateway.url) as client:
            await client.post(CHAT.path, CHAT.payload(stream=True))
            await client.head()
        await engine.calls[2].closed()
        await gateway.record(outcome="client_gone")


async def test_a_dead_unix_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(path))
    engine = ScriptedEngine(honest)
    async with (
        running_gateway(engine, server={"listen": [f"unix:{path}"]}) as gateway,
        http1(gateway.url) as client,
    ):
        assert (await client.ask("/v1/models")).status == 200


async def test_inherited_descriptor() -> None:
    engine = ScriptedEngine(honest)
    inherited = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{inherited.getsockname()[1]}"
    # The gateway owns what it inherits, and closes it.
    async with (
        running_gateway(engine, server={"listen": [f"fd://{inherited.detach()}"]}),
        http1(address) as client,
    ):
        assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).body == whole(CHAT)


async def test_inherited_by_a_process(tmp_path: Path) -> None:
    engine = ScriptedEngine(honest)
    with trio.fail_after(30), socket.create_server(("127.0.0.1", 0)) as inherited:
        address = f"http://127.0.0.1:{inherited.getsockname()[1]}"
        number = inherited.fileno()
        listen = {"listen": [f"fd://{number}"]}
        async with (
            gateway_process(tmp_path, engine, server=listen, pass_fds=(number,)),
            http1(address) as client,
        ):
            assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).body == whole(CHAT)


async def test_several_listeners_at_once(tmp_path: Path) -> None:
    engine = ScriptedEngine(honest)
    listen = ["127.0.0.1:0", f"unix:{tmp_path}/gateway.sock", "127.0.0.1:0"]
    async with running_gateway(engine, server={"listen": listen}) as gateway:
        assert len(set(gateway.service.listen)) == 3
        for address in gateway.service.listen:
            async with http1(address) as client:
                assert (await client.ask(CHAT.path, CHAT.payload(stream=False))).json == CHAT.whole


@every_stream
async def test_tls_with_either_protocol(tls: Tls, route: Route) -> None:
    engine = ScriptedEngine(honest, kind=route.kind)
    async with running_gateway(engine, server={"tls": tls.section}) as gateway:
        assert gateway.url.startswith("https://")
        async with http1(gateway.url, tls=tls.trusted) as client:
            assert isinstance(client.stream, trio.SSLStream)
            assert client.stream.selected_alpn_protocol() == "http/1.1"
            assert (await client.ask(route.path, route.payload(stream=True))).body == whole(route)
        async with http2(gateway.url, tls=tls.trusted) as connection:
            assert isinstance(connection.stream, trio.SSLStream)
            assert connection.stream.selected_alpn_protocol() == "h2"
            assert (await connection.ask(route.path, route.payload(stream=True))).body == whole(route)


async def test_plain_bytes_on_a_tls_port_and_half_a_handshake_harm_nobody(tls: Tls) -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine, server={"tls": tls.section}) as gateway:
        plain = gateway.url.replace("https", "http")
        async with http1(plain) as talker, http1(plain) as silent:
            await talker.send(request_bytes("/v1/models", method="GET"))
            await talker.eof()
            await silent.send(b"\x16\x03\x01")
            async with http1(gateway.url, tls=tls.trusted) as client:
                assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).status == 200


async def test_old_tls_is_refused(tls: Tls) -> None:
    async with running_gateway(ScriptedEngine(honest), server={"tls": tls.section}) as gateway:
        old = tls.trusted
        old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((trio.BrokenResourceError, ssl.SSLError)):
            await connect(gateway.url, tls=old)


@every_stream
async def test_http_1_0_client_gets_the_stream_up_to_the_close(route: Route) -> None:
    engine = ScriptedEngine(honest, kind=route.kind)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await client.send(request_bytes(route.path, route.payload(stream=True), version="HTTP/1.0"))
        head = await client.head()
        assert head.status == 200
        assert "transfer-encoding" not in head
        assert await client.rest() == whole(route)
        await gateway.record(outcome="completed")


async def test_http_1_0_client_leaves() -> None:
    engine = ScriptedEngine(Stream(pause_after=2, until=trio.Event()))
    async with running_gateway(engine) as gateway:
        async with http1(gateway.url) as client:
            await client.send(request_bytes(CHAT.path, CHAT.payload(stream=True), version="HTTP/1.0"))
            await client.head()
            await client.until(b" tk1")
        await engine.calls[0].closed()
        await gateway.record(outcome="client_gone")


async def test_connection_is_kept_and_closed_as_the_client_asks() -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        for stream in (True, False, True):
            assert (await client.ask(CHAT.path, CHAT.payload(stream=stream))).status == 200
        answer = await client.ask(CHAT.path, CHAT.payload(stream=True), headers={"Connection": "close"})
        assert answer.status == 200
        assert await client.eof() == b""


async def test_pipelined_requests_are_answered_in_order() -> None:
    engine = ScriptedEngine(honest, slots=1)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await client.send(
            b"".join(request_bytes(CHAT.path, CHAT.payload(stream=True, user=u)) for u in "abc")
        )
        for _ in range(3):
            assert (await client.answer()).body == whole(CHAT)
    assert [call.json["user"] for call in engine.calls] == ["a", "b", "c"]


async def test_client_that_expects_a_100_gets_it() -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        request = request_bytes(CHAT.path, CHAT.payload(stream=False), headers={"Expect": "100-continue"})
        head, _, body = request.partition(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n")
        assert (await client.head(bodyless=True)).status == 100
        await client.send(body)
        assert (await client.answer()).status == 200
    assert engine.calls[0].header("Expect") is None


async def test_more_connections_than_allowed_wait_or_are_refused_and_the_first_live_on() -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine, server={"max_connections": 3}) as gateway:
        clients = [Http1(await connect(gateway.url)) for _ in range(3)]
        for client in clients:
            assert (await client.ask("/v1/models")).status == 200
        extra = Http1(await connect(gateway.url))
        for client in clients:
            assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).status == 200
        for client in clients:
            await client.close()
        await extra.close()
        async with http1(gateway.url) as late:
            assert (await late.ask("/v1/models")).status == 200
