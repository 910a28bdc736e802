"""The processes of the soak, and what can be seen of the gateway from outside."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench import processes
from bench.soak.clients import STALL_SECONDS
from bench.targets import HOST, ROOT, BenchError, free_port, get, tail, wait_ready

SLOTS = 16
FIRST_BYTE_SECONDS = 2.0
EXPIRY_SECONDS = 4.5
"""After so long idle connections to engines are let go of, at the next request."""

IDLE_SECONDS = 20.0

CONFIG = """
[server]
listen = ["{host}:{port}"]
admin = "{host}:{admin}"
drain_seconds = 5

[stream]
first_byte_seconds = {first_byte}
stall_seconds = {stall}
spool_bytes = 65536

[admission]
queue = 4096
queue_seconds = 60

[[engine]]
name = "soak"
kind = "openai"
url = "http://{host}:{engine}"
slots = {slots}
models = ["*"]
reclaim = "off"
"""


@dataclass(frozen=True)
class Sample:
    """What the gateway holds while nobody asks anything of it. Sizes are bytes."""

    descriptors: int
    threads: int
    rss: int
    pss: int
    series: int
    live: int
    gauges: float
    ledger: dict[str, Any]

    @property
    def books(self) -> str:
        """What is wrong with the ledger; empty: nothing."""
        row = self.ledger["engines"]["soak"]
        held = row["running"] + row["reclaiming"] + row["ghosts"]
        lost = row["acquired"] - row["released"]
        return "" if self.ledger["balanced"] and held == lost == 0 else f"{row}"


class Engine:
    """The faulty engine, in a process of its own."""

    def __init__(self, folder: str) -> None:
        self.port = free_port()
        self.log = os.path.join(folder, "engine.log")
        command = [sys.executable, "-m", "bench.soak.engine", "--port", str(self.port), "--slots", str(SLOTS)]
        with open(self.log, "wb") as log:
            process = processes.start(command, cpu=processes.rest_cpu(), cwd=ROOT, stdout=log, stderr=log)
        self.tree = processes.Tree(process)

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = json.loads(get(self.port, "/bench/stats")[1])
        return stats


class Gateway:
    """The gateway, with its access records and its other words in two files."""

    def __init__(self, folder: str, engine: Engine) -> None:
        self.port, self.admin = free_port(), free_port()
        self._config, self._engine = os.path.join(folder, "config.toml"), engine
        self.records, self.log = os.path.join(folder, "records"), os.path.join(folder, "gateway.log")
        self._configure(SLOTS)
        command = [sys.executable, "-m", "gateway", "serve", "--config", self._config]
        with open(self.records, "wb") as out, open(self.log, "wb") as log:
            cpu = processes.gateway_cpu()
            self.process = processes.start(command, cpu=cpu, cwd=ROOT, stdout=out, stderr=log)
        self.tree = processes.Tree(self.process)

    def _configure(self, slots: int) -> None:
        with open(self._config, "w", encoding="utf-8") as file:
            file.write(
                CONFIG.format(
                    host=HOST,
                    port=self.port,
                    admin=self.admin,
                    engine=self._engine.port,
                    first_byte=FIRST_BYTE_SECONDS,
                    stall=STALL_SECONDS,
                    slots=slots,
                )
            )

    def reload(self, slots: int) -> None:
        """Have it give the engine so many slots from now on."""
        self._configure(slots)
        self.process.send_signal(signal.SIGHUP)

    def check_alive(self) -> None:
        if not self.tree.running():
            raise BenchError(f"the gateway ended with {self.process.returncode}: {tail(self.log)}")

    def sample(self, *, settled: bool = False) -> Sample:
        """Look at it once it is idle; `settled`: once it has let go of idle connections to the engine too."""
        limit = time.monotonic() + IDLE_SECONDS
        if settled:
            time.sleep(EXPIRY_SECONDS)
            self._ask()
        while True:
            self.check_alive()
            sample = self._look()
            if (not sample.live and not sample.gauges and not sample.books) or time.monotonic() > limit:
                return sample
            time.sleep(0.1)

    def _ask(self) -> None:
        """One plain request."""
        body = json.dumps({"model": "sim", "prompt": "hi", "max_tokens": 1})
        connection = http.client.HTTPConnection(HOST, self.port, timeout=20)
        try:
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            connection.getresponse().read()
        finally:
            connection.close()

    def _look(self) -> Sample:
        metrics = get(self.admin, "/metrics")[1]
        requests = json.loads(get(self.admin, "/admin/requests")[1])
        ledger = json.loads(get(self.admin, "/admin/ledger")[1])
        samples = [line for line in metrics.splitlines() if line and not line.startswith("#")]
        gauges = re.compile(
            r'gateway_(streams|queue_depth|spooled_bytes|ghosts|slots\{.*state="(running|rec|gh))'
        )
        memory = self.tree.memory()
        pid = self.process.pid
        return Sample(
            descriptors=len(os.listdir(f"/proc/{pid}/fd")),
            threads=len(os.listdir(f"/proc/{pid}/task")),
            rss=memory.rss,
            pss=memory.pss,
            series=len(samples),
            live=len(requests["requests"]) + requests["queued"],
            gauges=sum(float(line.rpartition(" ")[2]) for line in samples if gauges.match(line)),
            ledger=ledger,
        )

    def end(self) -> int | None:
        """Ask it to end; its exit code, None if it had to be killed."""
        return self.process.wait() if self.tree.end() else None

    # What it has written, once it has ended.

    def read_records(self) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
        """Its access records by the caller's id, and the lines that are none."""
        records: dict[str, list[dict[str, Any]]] = {}
        others: list[str] = []
        keep = ("outcome", "status", "code", "phase", "attempts")
        with open(self.records, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    record = json.loads(line)
                    caller, kept = record["caller_id"], {name: record[name] for name in keep}
                except (ValueError, LookupError, TypeError):
                    others.append(line.strip()[:300])
                    continue
                if caller is not None:  # else it is one of our own looks
                    records.setdefault(caller, []).append(kept)
        return records, others

    def read_log(self) -> list[str]:
        """What it said besides records, but for its start and end, and for what the engine deserves.

        The engine fails on purpose, now and then several times in a row: that ejects it.
        """
        with open(self.log, encoding="utf-8", errors="replace") as file:
            lines = [line.strip()[:300] for line in file]
        expected = ('"level": "info"', '"level":"info"', '"event":"engine ejected"')
        return [line for line in lines if not any(part in line for part in expected)]


@contextmanager
def started() -> Iterator[tuple[Engine, Gateway]]:
    """Both processes, ready; whatever happens, they are ended."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        engine = Engine(folder)
        gateway = None
        try:
            wait_ready(engine.tree, engine.port, "/health", "the simulated engine", engine.log)
            gateway = Gateway(folder, engine)
            wait_ready(gateway.tree, gateway.admin, "/readyz", "the gateway", gateway.log)
            yield engine, gateway
        finally:
            if gateway is not None:
                gateway.tree.end()
            engine.tree.end()


def count(words: list[str]) -> str:
    """`completed 12, left 3`, most often first."""
    return ", ".join(f"{word} {number}" for word, number in Counter(words).most_common())
