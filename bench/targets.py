"""What the bench starts and asks: the simulated engine, the gateway in front of it, and "direct".

A `Target` is where the clients send their requests; `Gateway` is one, `direct` is the engine itself, and the
proxies to compare with are in `baselines.py`. All ports are free ones picked at the start.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from bench import processes

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HOST = "127.0.0.1"
START_SECONDS = 30.0
GAUGES = ("gateway_streams", "gateway_queue_depth", "gateway_spooled_bytes", 'gateway_slots{state="running"}')


class BenchError(Exception):
    """The bench can't go on; its text is for the terminal."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    """(status, body) of one request on a connection of its own."""
    connection = http.client.HTTPConnection(HOST, port, timeout=20)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def wait_ready(tree: processes.Tree, port: int, path: str, what: str, log: str) -> None:
    """Wait until GET `path` answers 200; raise with the end of the log if it doesn't."""
    limit = time.monotonic() + START_SECONDS
    while time.monotonic() < limit and tree.running():
        try:
            if get(port, path)[0] == 200:
                return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.05)
    state = "is not ready" if tree.running() else f"ended with {tree.process.returncode}"
    raise BenchError(f"{what} {state}: {tail(log)}")


def tail(path: str, size: int = 800) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - size))
            return file.read().decode("utf-8", "replace").strip()
    except OSError:
        return "(no log)"


class Engine:
    """The simulated engine, in a process of its own."""

    def __init__(self, slots: int = 4096) -> None:
        self.port = free_port()
        self.folder = tempfile.TemporaryDirectory(prefix="bench-engine-")
        self.log = os.path.join(self.folder.name, "engine.log")
        command = [sys.executable, "-m", "bench.engine", "--port", str(self.port), "--slots", str(slots)]
        with open(self.log, "wb") as log:
            process = processes.start(command, cpu=processes.rest_cpu(), cwd=ROOT, stdout=log, stderr=log)
        self.tree = processes.Tree(process)

    def __enter__(self) -> Engine:
        try:
            wait_ready(self.tree, self.port, "/health", "the simulated engine", self.log)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.tree.end()
        self.folder.cleanup()

    def reset(self, slots: int | None = None) -> None:
        get(self.port, "/bench/reset" + (f"?slots={slots}" if slots else ""), "POST")

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = json.loads(get(self.port, "/bench/stats")[1])
        if stats.get("bench") != "engine":
            raise BenchError(f"port {self.port} is not the simulated engine's")
        return stats

    def settled(self, seconds: float = 8.0) -> dict[str, Any]:
        """Its statistics once nothing runs any more, or when the time is up."""
        limit = time.monotonic() + seconds
        while True:
            stats = self.stats()
            if stats["running"] + stats["waiting"] == 0 or time.monotonic() > limit:
                return stats
            time.sleep(0.05)


class Started(Protocol):
    """An engine of the bench's own, simulated or real."""

    port: int
    tree: processes.Tree


@dataclass
class Target:
    """Where requests go. `tree` and `admin` are None where there is no process or control plane to ask."""

    name: str
    port: int
    engine: Started
    tree: processes.Tree | None = None
    admin: int | None = None
    http2: bool = False

    def url(self, path: str = "/v1/chat/completions") -> str:
        return f"http://{HOST}:{self.port}{path}"


def direct(engine: Started) -> Target:
    return Target("direct", engine.port, engine)


class Served(Target):
    """A target with a process of its own, on the gateway's core, and a folder for its files and its log."""

    tree: processes.Tree

    def __init__(self, name: str, engine: Started) -> None:
        super().__init__(name, free_port(), engine)
        self.folder = tempfile.TemporaryDirectory(prefix=f"bench-{name}-")
        self.log = os.path.join(self.folder.name, "log")

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        with open(self.log, "wb") as log:
            cpu = processes.gateway_cpu()
            process = processes.start(command, cpu=cpu, cwd=ROOT, env=env, stdout=log, stderr=log)
        self.tree = processes.Tree(process)

    def ready_at(self) -> tuple[int, str]:
        """The port and path that answer 200 once it is ready."""
        return self.port, "/health"

    def __enter__(self) -> Self:
        try:
            wait_ready(self.tree, *self.ready_at(), self.name, self.log)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.tree.end()
        self.folder.cleanup()

    def check_alive(self) -> None:
        if not self.tree.running():
            raise BenchError(f"{self.name} ended with {self.tree.process.returncode}: {tail(self.log)}")


class Gateway(Served):
    """The gateway, serving one engine from a configuration of its own."""

    def __init__(self, engine: Started, slots: int, *, kind: str = "openai", more: str = "") -> None:
        super().__init__("gateway", engine)
        self.slots, self.admin, self.http2 = slots, free_port(), True
        config = os.path.join(self.folder.name, "config.toml")
        with open(config, "w", encoding="utf-8") as file:
            file.write(
                f'[server]\nlisten = ["{HOST}:{self.port}"]\nadmin = "{HOST}:{self.admin}"\n'
                "drain_seconds = 2\n\n"
                f'[[engine]]\nname = "bench"\nkind = "{kind}"\nurl = "http://{HOST}:{engine.port}"\n'
                f'slots = {slots}\nmodels = ["*"]\nreclaim = "off"\n{more}'
            )
        self.start([sys.executable, "-m", "gateway", "serve", "--config", config])

    def ready_at(self) -> tuple[int, str]:
        assert self.admin is not None
        return self.admin, "/readyz"

    def faults(self) -> int:
        """Tracebacks in its log: there must be none, whatever clients do."""
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return sum("Traceback (most recent call last)" in line for line in file)

    def ledger(self) -> dict[str, Any]:
        assert self.admin is not None
        ledger: dict[str, Any] = json.loads(get(self.admin, "/admin/ledger")[1])
        return ledger

    def gauges(self) -> dict[str, float | None]:
        """The gauges that must be 0 when idle; None: not exported."""
        assert self.admin is not None
        text = get(self.admin, "/metrics")[1]
        return {gauge: _gauge(text, gauge) for gauge in GAUGES}

    def idle(self, seconds: float = 3.0) -> tuple[dict[str, Any], dict[str, float | None]]:
        """(ledger, gauges) once both are back to 0, or as they are when the time is up."""
        limit = time.monotonic() + seconds
        while True:
            self.check_alive()
            ledger, gauges = self.ledger(), self.gauges()
            busy = [row for row in ledger["engines"].values() if row["running"] or row["reclaiming"]]
            if (not busy and not any(gauges.values())) or time.monotonic() > limit:
                return ledger, gauges
            time.sleep(0.05)


def _gauge(text: str, gauge: str) -> float | None:
    """The sum of a gauge's samples, over all its label sets that hold the ones asked for."""
    name, _, labels = gauge.rstrip("}").partition("{")
    found = re.findall(rf"^{name}(?:{{([^}}]*)}})? (\S+)$", text, re.MULTILINE)
    values = [float(value) for having, value in found if labels in having]
    return sum(values) if values else None
