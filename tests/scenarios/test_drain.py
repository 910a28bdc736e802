"""The gateway is told to stop: what runs may end, what waits is told at once, nothing outlasts the limit."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
import trio

from tests.support.gateway import running_gateway
from tests.support.http1 import Truncated, http1
from tests.support.http2 import http2
from tests.support.process import gateway_process
from tests.support.routes import CHAT, STREAMING, Parts, Route
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Stream, honest, never_answers
from tests.support.visitors import visit

protocols = pytest.mark.parametrize("way", ["fin", "h2_reset"], ids=["http1", "http2"])


def parts_of(route: Route) -> Parts:
    assert route.parts is not None
    return route.parts


@protocols
async def test_running_streams_end_by_themselves(way: str) -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(Stream(pause_after=2, until=go_on))
    async with running_gateway(engine) as gateway:
        async with visit(way, gateway.url, CHAT.path, CHAT.payload(stream=True)) as visitor:
            await visitor.head()
            await visitor.until(b" tk1")
            assert (await gateway.admin("/readyz")).status == 200
            gateway.service.drain()
            assert (await gateway.admin("/readyz")).status == 503
            assert (await gateway.admin("/healthz")).status == 200
            go_on.set()
            assert await visitor.rest() == parts_of(CHAT).all(5)
        await gateway.record(outcome="completed", status=200)
        await gateway.ended.wait()


async def test_queued_requests_are_told_at_once() -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(Stream(pause_after=2, until=go_on), slots=1)
    async with running_gateway(engine) as gateway:
        async with http1(gateway.url) as first, http1(gateway.url) as second, http2(gateway.url) as third:
            await first.post(CHAT.path, CHAT.payload(stream=True))
            await first.head()
            await second.post(CHAT.path, CHAT.payload(stream=True))
            stream = await third.post(CHAT.path, CHAT.payload(stream=False))
            await gateway.queued(2)
            since = trio.current_time()
            gateway.service.drain()
            for answer in (await second.answer(), await stream.answer()):
                assert (answer.status, answer.json["error"]["code"]) == (503, "draining")
                assert int(answer.head["retry-after"]) > 0
            assert trio.current_time() - since < 1
            await gateway.recorded(2, outcome="drained", status=503, phase="queued")
            go_on.set()
            assert (await first.rest()).endswith(b"[DONE]\n\n")
        await gateway.ended.wait()
    assert len(engine.calls) == 1


async def test_new_requests_are_refused_and_their_connections_closed() -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(Stream(pause_after=2, until=go_on))
    async with running_gateway(engine) as gateway:
        async with http1(gateway.url) as first:
            await first.post(CHAT.path, CHAT.payload(stream=True))
            await first.head()
            gateway.service.drain()
            async with http1(gateway.url) as second:
                answer = await second.ask(CHAT.path, CHAT.payload(stream=True))
                assert (answer.status, answer.json["error"]["code"]) == (503, "draining")
                assert answer.head["connection"] == "close"
                assert await second.eof() == b""
            async with http2(gateway.url) as third:
                stream = await third.post(CHAT.path, CHAT.payload(stream=True))
                assert (await stream.answer()).status == 503
                await third.until(lambda: third.goaway is not None)
            go_on.set()
            await first.rest()
        await gateway.ended.wait()
    assert len(engine.calls) == 1


@protocols
@pytest.mark.parametrize("route", STREAMING, ids=str)
async def test_streams_still_running_at_the_limit_end_with_an_error(way: str, route: Route) -> None:
    engine = ScriptedEngine(Stream(tokens=9, pause_after=2, until=trio.Event()), kind=route.kind)
    async with running_gateway(engine, server={"drain_seconds": 0.3}) as gateway:
        async with visit(way, gateway.url, route.path, route.payload(stream=True)) as visitor:
            await visitor.head()
            await visitor.until(b" tk1")
            since = trio.current_time()
            gateway.service.drain()
            with pytest.raises(Truncated) as cut:
                await visitor.rest()
            assert b"draining" in cut.value.got
            assert 0.2 < trio.current_time() - since < 2
        await engine.calls[0].closed()
        await gateway.record(outcome="drained", status=503, phase="streaming")
        await gateway.ended.wait()


async def test_prefills_still_running_at_the_limit_get_a_503() -> None:
    engine = ScriptedEngine(never_answers)
    async with running_gateway(engine, server={"drain_seconds": 0.3}) as gateway:
        async with http1(gateway.url) as client:
            await client.post(CHAT.path, CHAT.payload(stream=False))
            await engine.call()
            gateway.service.drain()
            answer = await client.answer()
            assert (answer.status, answer.json["error"]["code"]) == (503, "draining")
        await gateway.record(outcome="drained", status=503, phase="prefill")
        await gateway.ended.wait()


async def test_idle_gateway_is_gone_at_once_though_connections_are_kept_open() -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine) as gateway, http1(gateway.url) as one, http2(gateway.url) as two:
        assert (await one.ask(CHAT.path, CHAT.payload(stream=True))).status == 200
        assert (await two.ask(CHAT.path, CHAT.payload(stream=True))).status == 200
        since = trio.current_time()
        gateway.service.drain()
        await gateway.ended.wait()
        assert trio.current_time() - since < 2


async def test_who_inherits_the_socket_serves_those_who_come_during_the_drain() -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(Stream(pause_after=2, until=go_on))
    successors = ScriptedEngine(honest, name="successor")
    with socket.create_server(("127.0.0.1", 0)) as shared:
        address = f"http://127.0.0.1:{shared.getsockname()[1]}"
        old_listen, new_listen = ({"listen": [f"fd://{os.dup(shared.fileno())}"]} for _ in range(2))
        async with running_gateway(engine, server=old_listen) as old, http1(address) as first:
            await first.post(CHAT.path, CHAT.payload(stream=True))
            await first.head()
            old.service.drain()
            async with running_gateway(successors, server=new_listen):
                for _ in range(10):
                    async with http1(address) as late:
                        assert (await late.ask(CHAT.path, CHAT.payload(stream=True))).status == 200
            go_on.set()
            assert await first.rest() == parts_of(CHAT).all(5)
            await old.ended.wait()
    assert (len(engine.calls), len(successors.calls)) == (1, 10)


async def test_a_client_that_stops_reading_does_not_hold_up_the_end() -> None:
    engine = ScriptedEngine(Stream(tokens=200_000))
    async with (
        running_gateway(engine, server={"drain_seconds": 0.3}) as gateway,
        http1(gateway.url) as client,
    ):
        await client.post(CHAT.path, CHAT.payload(stream=True))
        await client.head()
        await gateway.in_phase("streaming")
        since = trio.current_time()
        gateway.service.drain()
        await gateway.ended.wait()
        assert trio.current_time() - since < 4


async def test_sigterm_lets_streams_end_and_the_process_exits_cleanly(tmp_path: Path) -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(Stream(pause_after=2, until=go_on))
    with trio.fail_after(30):
        async with gateway_process(tmp_path, engine) as gateway:
            async with http1(gateway.url) as client:
                await client.post(CHAT.path, CHAT.payload(stream=True))
                await client.head()
                gateway.signal(signal.SIGTERM)
                while (await gateway.admin("/readyz")).status != 503:
                    await trio.lowlevel.checkpoint()
                go_on.set()
                assert (await client.rest()).endswith(b"[DONE]\n\n")
            await gateway.exited.wait()
            assert gateway.process.returncode == 0, gateway.lines
            assert [record["outcome"] for record in gateway.records] == ["completed"]
            assert not any(b"Traceback" in line for line in gateway.lines)


async def test_second_sigterm_ends_it_now(tmp_path: Path) -> None:
    engine = ScriptedEngine(Stream(pause_after=2, until=trio.Event()))
    with trio.fail_after(30):
        async with gateway_process(tmp_path, engine, server={"drain_seconds": 600}) as gateway:
            async with http1(gateway.url) as client:
                await client.post(CHAT.path, CHAT.payload(stream=True))
                await client.head()
                gateway.signal(signal.SIGTERM)
                while (await gateway.admin("/readyz")).status != 503:
                    await trio.lowlevel.checkpoint()
                since = trio.current_time()
                gateway.signal(signal.SIGTERM)
                await gateway.exited.wait()
                assert trio.current_time() - since < 3
            await engine.calls[0].closed()
            assert not any(b"Traceback" in line for line in gateway.lines), gateway.lines
