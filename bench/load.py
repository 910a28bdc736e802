"""The clients: many streams at a time, some of which leave, and probes that time other routes meanwhile.

    python -m bench.load < plan.json > result.json

Reads a `Plan` and writes a `Result` (both JSON), so that it runs as a process of its own, on the engine's
core. Every loop is bounded by `requests`, `timeout_seconds` and `max_seconds`; only loopback is spoken to.
Every token carries its number: a missing, doubled or reordered one counts as a bad event.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bench.client import ClientConnection, Exchange, connect, json_body
from bench.loop import run

now = time.monotonic
GAPS = 2_000_000
GOLDEN = 0.6180339887  # spreads leavers evenly over the requests, without randomness


@dataclass(frozen=True)
class Probe:
    """A request repeated on a connection of its own while the streams run."""

    name: str
    url: str
    method: str = "GET"
    body: dict[str, object] | None = None
    count: int = 40
    every_seconds: float = 0.1
    after_seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What the clients do. `streams` at a time, `requests` in all."""

    url: str
    name: str
    streams: int
    requests: int
    tokens: int
    tps: float = 0.0
    prefill_ms: float = 0.0
    batch: int = 8
    pad: int = 0
    ramp_seconds: float = 0.0
    leave_after: int = 0  # events; 0: nobody leaves
    leave_fraction: float = 1.0
    timeout_seconds: float = 60.0
    max_seconds: float = 120.0
    model: str = "sim"
    protocol: str = "http/1.1"
    probes: list[Probe] = field(default_factory=list)


class Stream(Exchange):
    """A streamed completion."""

    def __init__(self, plan: Plan, number: int, gaps: array[float]) -> None:
        self.user, self.gaps = f"{plan.name}-{number}", gaps
        self.leave_at = plan.leave_after if number * GOLDEN % 1 < plan.leave_fraction else 0
        self.events = self.bad = self.bytes = self.errors = 0
        self.first = self.last = 0.0
        self.marker, self.rest = False, b""
        sim = {"tps": plan.tps, "prefill_ms": plan.prefill_ms, "batch": plan.batch, "pad": plan.pad}
        fields: dict[str, object] = {
            "model": plan.model,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": plan.tokens,
            "stream": True,
            "user": self.user,
            "sim": sim,
        }
        super().__init__("POST", urlsplit(plan.url).path, json_body(fields))

    def received(self, data: bytes) -> bool:
        self.bytes += len(data)
        if self.status != 200:
            self.rest = (self.rest + data)[:4096]
            return False
        *events, self.rest = (self.rest + data).split(b"\n\n")
        instant, fresh = now(), 0
        for event in events:
            at = event.find(b'" tk')
            if at >= 0:
                if event[at + 4 : at + 10] != b"%06d" % self.events or not event.startswith(b"data: "):
                    self.bad += 1
                self.events += 1
                fresh += 1
                if self.leave_at and self.events >= self.leave_at:
                    self._clock(instant, fresh)
                    return True
            elif event == b"data: [DONE]":
                self.marker = True
            elif event.startswith((b'data: {"error"', b"event: error")):
                self.errors += 1
            elif not event.startswith((b"data: {", b":")):
                self.bad += 1
        if fresh:
            self._clock(instant, fresh)
        return False

    def _clock(self, instant: float, fresh: int) -> None:
        """Note the gap before these events; those that came along with the first have none."""
        if len(self.gaps) < GAPS:
            if self.last:
                self.gaps.append(instant - self.last)
            self.gaps.extend([0.0] * (fresh - 1))
        self.first = self.first or instant
        self.last = instant

    def outcome(self) -> str:
        if self.error:
            return self.error
        if self.left:
            return "left" if not self.bad else "bad events"
        if self.status != 200:
            return f"status {self.status}"
        if self.errors:
            return "error event"
        if self.bad or self.rest.strip():
            return "bad events"
        return "completed" if self.marker else "no end marker"


class Run:
    """One plan being carried out."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.gaps: array[float] = array("d")
        self.streams: list[Stream] = []
        self.probed: dict[str, list[Exchange]] = {probe.name: [] for probe in plan.probes}
        self.started = now()
        self.deadline = self.started + plan.max_seconds

    async def connect(self, url: str) -> ClientConnection:
        parts = urlsplit(url)
        if parts.hostname != "127.0.0.1" or parts.port is None:
            raise SystemExit("only loopback targets")
        return await connect(self.plan.protocol, parts.hostname, parts.port)

    async def exchange(self, connection: ClientConnection, exchange: Exchange) -> None:
        limit = min(self.plan.timeout_seconds, max(0.1, self.deadline - now()))
        connection.send(exchange)
        loop = asyncio.get_running_loop()
        exchange.timer = loop.call_later(limit, connection.leave, exchange, "timeout")
        await exchange.over

    async def client(self, number: int) -> None:
        plan = self.plan
        connection: ClientConnection | None = None
        await asyncio.sleep(plan.ramp_seconds * number / plan.streams)
        while len(self.streams) < plan.requests and now() < self.deadline:
            stream = Stream(plan, len(self.streams), self.gaps)
            self.streams.append(stream)
            try:
                if connection is None or not connection.usable:
                    connection = await self.connect(plan.url)
            except OSError as error:
                stream.sent = now()
                stream.end(f"connect {type(error).__name__}")
                await asyncio.sleep(0.01)
                continue
            await self.exchange(connection, stream)
        if connection:
            connection.close()

    async def prober(self, probe: Probe) -> None:
        parts = urlsplit(probe.url)
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        body = json_body(probe.body) if probe.body is not None else None
        connection: ClientConnection | None = None
        await asyncio.sleep(probe.after_seconds)
        for _ in range(probe.count):
            if now() >= self.deadline:
                break
            exchange = Exchange(probe.method, path, body)
            self.probed[probe.name].append(exchange)
            try:
                if connection is None or not connection.usable:
                    connection = await self.connect(probe.url)
                await self.exchange(connection, exchange)
            except OSError as error:
                exchange.end(f"connect {type(error).__name__}")
            await asyncio.sleep(probe.every_seconds)
        if connection:
            connection.close()

    async def go(self) -> dict[str, Any]:
        cpu = time.process_time()
        tasks = [self.client(number) for number in range(self.plan.streams)]
        await asyncio.gather(*tasks, *(self.prober(probe) for probe in self.plan.probes))
        return self.result(now() - self.started, time.process_time() - cpu)

    def result(self, seconds: float, cpu: float) -> dict[str, Any]:
        streams = self.streams
        good = [stream for stream in streams if stream.outcome() in ("completed", "left")]
        return {
            "seconds": seconds,
            "cpu_seconds": cpu,
            "requests": len(streams),
            "outcomes": dict(Counter(stream.outcome() for stream in streams)),
            "errors": len(streams) - len(good),
            "events": sum(stream.events for stream in streams),
            "bytes": sum(stream.bytes for stream in streams),
            "ttft_ms": percentiles([(stream.first - stream.sent) * 1e3 for stream in good if stream.first]),
            "gap_ms": percentiles([gap * 1e3 for gap in self.gaps]),
            "leavers": [
                {"user": stream.user, "events": stream.events, "left": stream.left}
                for stream in good
                if stream.left
            ],
            "refusals": [
                stream.rest.decode("latin-1") for stream in streams if stream.status not in (0, 200)
            ][:3],
            "probes": {name: self._probe(done) for name, done in self.probed.items()},
        }

    def _probe(self, done: list[Exchange]) -> dict[str, Any]:
        good = [exchange for exchange in done if exchange.status == 200 and not exchange.error]
        return {
            "count": len(done),
            "errors": len(done) - len(good),
            "ms": percentiles([(exchange.ended - exchange.sent) * 1e3 for exchange in good]),
            "course": [
                (round(exchange.sent - self.started, 3), round((exchange.ended - exchange.sent) * 1e3, 2))
                for exchange in good
            ],
        }


def percentiles(values: list[float]) -> dict[str, float | None]:
    """p50, p95, p99 and max (nearest rank); all None without values."""
    ordered = sorted(values)
    names = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    if not ordered:
        return dict.fromkeys(names)
    top = len(ordered) - 1
    return {name: round(ordered[min(top, int(len(ordered) * share))], 4) for name, share in names.items()}


def to_json(plan: Plan) -> bytes:
    return json.dumps(asdict(plan)).encode()


def from_json(text: str) -> Plan:
    fields = json.loads(text)
    fields["probes"] = [Probe(**probe) for probe in fields["probes"]]
    return Plan(**fields)


async def _main() -> None:
    result = await Run(from_json(sys.stdin.read())).go()
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    run(_main())
