"""One of three engines is killed while it streams, and comes back: real processes, real signals."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import structlog
import trio

from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import Truncated, http1
from tests.support.process import ROOT, free_ports
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import honest

STREAMS = 200
TOKENS = 40


async def start(port: int) -> trio.Process:
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "bench.engine", "--port", str(port), "--slots", "100", "--life", "60"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with trio.fail_after(15):
        while True:
            try:
                stream = await trio.open_tcp_stream("127.0.0.1", port)
            except OSError:
                await trio.sleep(0.05)
            else:
                await stream.aclose()
                return process


async def kill(process: trio.Process) -> None:
    process.kill()
    await process.wait()


class Streams:
    """Clients that read their streams to the end, whatever that is."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.begun = 0
        self.ends: Counter[str] = Counter()
        self.changed = trio.Event()

    async def one(self, tokens: int = TOKENS) -> None:
        payload = CHAT.payload(stream=True, max_tokens=tokens, sim={"tps": 20, "prefill_ms": 50})
        async with http1(self._gateway.url) as client:
            await client.post(CHAT.path, payload)
            head = await client.head()
            self.begun += 1
            self.changed.set()
            assert head.status == 200, head
            try:
                body = await client.rest()
            except Truncated as cut:
                self.ends["told" if b'"code":"engine_failed"' in cut.got else "cut"] += 1
            else:
                assert body.endswith(b"data: [DONE]\n\n")
                self.ends["whole"] += 1

    async def all_begun(self, count: int) -> None:
        while self.begun < count:
            self.changed = trio.Event()
            await self.changed.wait()


async def test_only_its_own_streams_fail_and_it_comes_back() -> None:
    ports = free_ports(3)
    processes = [await start(port) for port in ports]
    entries: list[dict[str, Any]] = [
        {"name": name, "kind": "openai", "url": f"http://127.0.0.1:{port}", "slots": 100, "models": ["model"]}
        for name, port in zip("abc", ports, strict=True)
    ]
    try:
        async with running_gateway(*entries, health={"probe_seconds": 0.5}, seconds=60) as gateway:
            streams = Streams(gateway)
            async with trio.open_nursery() as nursery:
                for _ in range(STREAMS):
                    nursery.start_soon(streams.one)
                await streams.all_begun(STREAMS)
                hers = (await gateway.ledger())["engines"]["b"]["running"]
                await kill(processes[1])
                for _ in range(50):
                    nursery.start_soon(streams.one, 4)
            assert 60 <= hers <= 70
            assert streams.ends == {"told": hers, "whole": STREAMS + 50 - hers}
            assert len(gateway.matching(outcome="engine_failed")) == hers
            assert not [record for record in gateway.records if record["outcome"] == "shed"]
            processes[1] = await start(ports[1])
            await gateway.engine("b", lambda engine: engine["state"] == "probation")
            await streams.one(4)
            await gateway.engine("b", lambda engine: engine["state"] == "healthy")
            assert streams.ends["told"] == hers
    finally:
        with trio.CancelScope(shield=True):
            for process in processes:
                await kill(process)


async def test_an_engine_that_stays_away_is_named_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line at its end isn't found hours later: it comes once a minute."""
    monkeypatch.setattr("gateway.probes._REMIND_SECONDS", 0.2)
    engine = ScriptedEngine(honest, name="gpu0")
    with structlog.testing.capture_logs() as lines:
        async with running_gateway(engine, health={"probe_seconds": 0.05}, check=False) as gateway:
            await engine.stop()
            await gateway.engine("gpu0", lambda each: each["state"] == "ejected")
            while sum(line["event"] == "engine is still away" for line in lines) < 3:  # noqa: ASYNC110
                await trio.sleep(0.02)
    away = [line for line in lines if line["event"] == "engine is still away"]
    assert {line["engine"] for line in away} == {"gpu0"}
    assert "Connection refused" in away[0]["reason"]
