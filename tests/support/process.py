"""The gateway as its users start it: a process, a configuration file, signals, records on stdout."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from tests.support.gateway import Section, entry, toml_of
from tests.support.http1 import Answer, Http1, connect, request_bytes
from tests.support.scripted import Notes, ScriptedEngine

ROOT = Path(__file__).parents[2]
START_SECONDS = 15


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on at the moment."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class GatewayProcess:
    """What a supervisor sees of it."""

    def __init__(self, process: trio.Process, url: str, admin_url: str) -> None:
        self.process, self.url, self.admin_url = process, url, admin_url
        self.lines: list[bytes] = []  # of stdout and stderr together
        self._notes = Notes()
        self.exited = trio.Event()

    async def read(self) -> None:
        assert self.process.stdout is not None
        rest = b""
        async with self.process.stdout as output:
            async for data in output:
                *lines, rest = (rest + data).split(b"\n")
                self.lines += lines
                self._notes.changed()
        if rest:
            self.lines.append(rest)
        await self.process.wait()
        self.exited.set()
        self._notes.changed()

    @property
    def records(self) -> list[dict[str, Any]]:
        """The access records among the lines."""
        found = [json.loads(line) for line in self.lines if line.startswith(b"{")]
        return [line for line in found if "outcome" in line]

    async def recorded(self, count: int) -> None:
        await self._notes.until(lambda: len(self.records) >= count or self.exited.is_set())

    async def said(self, word: bytes) -> None:
        """Until a line has this word in it."""
        await self._notes.until(lambda: any(word in line for line in self.lines) or self.exited.is_set())

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def admin(self, path: str) -> Answer:
        client = Http1(await connect(self.admin_url))
        try:
            await client.send(request_bytes(path, method="GET"))
            return await client.answer()
        finally:
            await client.close()

    async def ready(self) -> None:
        """Until it says that it is, or has ended instead."""
        with trio.move_on_after(START_SECONDS):
            while not self.exited.is_set():
                try:
                    if (await self.admin("/readyz")).status == 200:
                        return
                except OSError:
                    pass
                await trio.sleep(0.02)
        raise AssertionError("never ready: " + b"\n".join(self.lines).decode(errors="replace"))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gateway", *arguments]


@asynccontextmanager
async def gateway_process(
    folder: Path,
    *engines: ScriptedEngine,
    server: Section | None = None,
    usage: Section | None = None,
    pass_fds: tuple[int, ...] = (),
) -> AsyncIterator[GatewayProcess]:
    """The scripted engines run here, the gateway there."""
    port, admin = free_ports(2)
    addresses = {"listen": [f"127.0.0.1:{port}"], "admin": f"127.0.0.1:{admin}"}
    config = folder / "config.toml"
    sections = {"server": {**addresses, **(server or {})}, "usage": usage or {}}
    config.write_text(toml_of(sections, [entry(e, {}) for e in engines]))
    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(engine.serve)
        process = await trio.lowlevel.open_process(
            command("serve", "--config", str(config)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            pass_fds=pass_fds,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        gateway = GatewayProcess(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}")
        nursery.start_soon(gateway.read)
        try:
            await gateway.ready()
            yield gateway
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
            nursery.cancel_scope.cancel()
