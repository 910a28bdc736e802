"""Hundreds of clients leave: nothing is left of them but one record each."""

from __future__ import annotations

import os
from pathlib import Path

import trio

from tests.support.gateway import running_gateway
from tests.support.hostile import HOSTILE
from tests.support.http1 import http1
from tests.support.process import gateway_process
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import End, Raw, Stream

LEAVERS = 200
AT_ONCE = 40


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def leave_many(url: str, count: int) -> None:
    """Each reads a little of its stream and goes, every other one with a reset."""
    left = iter(range(count))

    async def leaver() -> None:
        for number in left:
            async with http1(url) as client:
                await client.post(CHAT.path, CHAT.payload(stream=True))
                await client.head()
                await client.until(b" tk", number % 3)
                if number % 2:
                    await client.reset()

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(leaver)


async def test_descriptors_tasks_and_connections_are_back_to_where_they_were() -> None:
    engine = ScriptedEngine(Stream(tokens=1000, gap=0.01), slots=AT_ONCE)
    async with running_gateway(engine, seconds=60) as gateway:
        await leave_many(gateway.url, AT_ONCE)
        await gateway.recorded(AT_ONCE, outcome="client_gone")
        await gateway.idle()
        await engine.until(lambda: not engine.connections)
        fds, tasks = descriptors(), trio.lowlevel.current_statistics().tasks_living
        await leave_many(gateway.url, LEAVERS)
        await gateway.recorded(LEAVERS + AT_ONCE, outcome="client_gone")
        await gateway.idle()
        await engine.until(lambda: not engine.connections)
        with trio.fail_after(1):
            while descriptors() > fds or trio.lowlevel.current_statistics().tasks_living > tasks:  # noqa: ASYNC110
                await trio.sleep(0.01)


async def test_each_abort_is_one_line_and_nothing_else(tmp_path: Path) -> None:
    engine = ScriptedEngine(Stream(tokens=1000, gap=0.01), slots=AT_ONCE)
    with trio.fail_after(60):
        async with gateway_process(tmp_path, engine) as gateway:
            before = len(gateway.lines)
            await leave_many(gateway.url, LEAVERS)
            await gateway.recorded(LEAVERS)
            async with http1(gateway.url) as client:
                assert (await client.ask("/v1/models")).status == 200
            aborts = [record for record in gateway.records if record["outcome"] == "client_gone"]
            assert len(aborts) == LEAVERS
            assert {record["status"] for record in aborts} == {499}
            assert len({record["id"] for record in aborts}) == LEAVERS
            others = [line for line in gateway.lines[before:] if b'"client_gone"' not in line]
            assert not [line for line in others if b'"outcome"' not in line], others
            assert not any(b"Traceback" in line or b"error" in line.lower() for line in others)


async def test_engine_failures_are_no_tracebacks_either(tmp_path: Path) -> None:
    engine = ScriptedEngine(Raw([b"HTTP/1.1 200 OK\r\n", End.RST]), slots=4)
    with trio.fail_after(30):
        async with gateway_process(tmp_path, engine) as gateway:
            async with http1(gateway.url) as client:
                for _ in range(20):
                    assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).status == 502
            await gateway.recorded(20)
            assert {record["outcome"] for record in gateway.records} == {"engine_failed"}
            assert not any(b"Traceback" in line for line in gateway.lines)


async def test_malformed_bytes_are_summarised(tmp_path: Path) -> None:
    engine = ScriptedEngine(Stream())
    with trio.fail_after(30):
        async with gateway_process(tmp_path, engine) as gateway:
            before = len(gateway.lines)
            for sample in [HOSTILE["noise"], HOSTILE["nul in a header"], HOSTILE["h2 data on stream 0"]] * 30:
                async with http1(gateway.url) as client:
                    await client.send(sample)
                    await client.eof()
            assert (await gateway.admin("/healthz")).status == 200
            noise = [line for line in gateway.lines[before:] if b'"outcome"' not in line]
            assert len(noise) <= 10, noise
            assert not any(b"Traceback" in line for line in noise)
