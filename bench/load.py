"""The clients: many streams at a time, some of which leave, and probes that time other routes meanwhile.

    python -m bench.load < plan.json > result.json

Reads a `Plan` and writes a `Result` (both JSON), so that it runs as a process of its own, on the engine's
core. Every loop is bounded by `requests`, `timeout_seconds` and `max_seconds`; only loopback is spoken to.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from array import array
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

from bench.client import ClientConnection, Exchange, Http1, SlowHttp1, json_body, open_socket
from bench.figures import percentiles
from bench.http2 import Http2
from bench.loop import run
from bench.plan import Plan, Probe, from_json
from bench.stream import Completion, Stream, Whole

now = time.monotonic


class Run:
    """One plan being carried out."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.gaps: array[float] = array("d")
        self.streams: list[Completion] = []
        self.held: dict[int, tuple[Completion, ClientConnection]] = {}  # what is going on, by number
        self.shared: asyncio.Task[ClientConnection] | None = None
        self.marks: list[int] = []  # events received at the window's start and end
        self.probed: dict[str, list[Exchange]] = {probe.name: [] for probe in plan.probes}
        self.started = plan.begin_at or now()
        self.deadline = self.started + plan.max_seconds

    async def connect(self, url: str) -> ClientConnection:
        parts, plan = urlsplit(url), self.plan
        if parts.hostname != "127.0.0.1" or parts.port is None:
            raise SystemExit("only loopback targets")
        raw = await open_socket(parts.hostname, parts.port, plan.reading.buffer_bytes)
        host, rate = f"{parts.hostname}:{parts.port}", plan.reading.bytes_per_second
        loop = asyncio.get_running_loop()
        try:
            if plan.protocol == "h2":
                return (await loop.create_connection(lambda: Http2(host), sock=raw))[1]
            if rate:
                return (await loop.create_connection(lambda: SlowHttp1(host, rate), sock=raw))[1]
            return (await loop.create_connection(lambda: Http1(host), sock=raw))[1]
        except BaseException:
            raw.close()
            raise

    async def connection(self) -> ClientConnection:
        """A client's connection: its own, or the one that all share."""
        if not self.plan.shared:
            return await self.connect(self.plan.url)
        if self.shared is None:
            self.shared = asyncio.ensure_future(self.connect(self.plan.url))
        return await self.shared

    async def exchange(self, connection: ClientConnection, exchange: Exchange, leave_seconds: float) -> None:
        limit = min(self.plan.timeout_seconds, max(0.1, self.deadline - now()))
        connection.send(exchange)
        loop = asyncio.get_running_loop()
        if 0 < leave_seconds < limit:
            exchange.timer = loop.call_later(leave_seconds, connection.leave, exchange)
        else:
            exchange.timer = loop.call_later(limit, connection.leave, exchange, "timeout")
        await exchange.over

    async def client(self, number: int) -> None:
        plan = self.plan
        kind = Stream if plan.stream else Whole
        connection: ClientConnection | None = None
        await asyncio.sleep(self.started + plan.ramp_seconds * number / plan.streams - now())
        while len(self.streams) < plan.requests and now() < self.deadline:
            number = len(self.streams)
            stream = kind(plan, number, self.gaps)
            self.streams.append(stream)
            try:
                if connection is None or not connection.usable:
                    connection = await self.connection()
            except OSError as error:
                stream.sent = now()
                stream.end(f"connect {type(error).__name__}")
                await asyncio.sleep(0.01)
                continue
            self.held[number] = stream, connection
            await self.exchange(connection, stream, plan.leave_seconds)
            del self.held[number]
        if connection:
            connection.close()

    async def departure(self) -> None:
        """Everybody leaves at one instant."""
        await asyncio.sleep(self.started + self.plan.leave_all_seconds - now())
        for stream, connection in list(self.held.values()):
            connection.leave(stream)

    async def marker(self, at: float) -> None:
        await asyncio.sleep(self.started + at - now())
        self.marks.append(sum(stream.events for stream in self.streams))

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
                await self.exchange(connection, exchange, 0)
            except OSError as error:
                exchange.end(f"connect {type(error).__name__}")
            await asyncio.sleep(probe.every_seconds)
        if connection:
            connection.close()

    async def go(self) -> dict[str, Any]:
        cpu, plan = time.process_time(), self.plan
        tasks = [self.client(number) for number in range(plan.streams)]
        tasks += [self.prober(probe) for probe in plan.probes]
        tasks += [self.marker(at) for at in plan.window or ()]
        tasks += [self.departure()] if plan.leave_all_seconds else []
        await asyncio.gather(*tasks)
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
            "reads": sum(stream.reads for stream in streams),
            "events_in_window": self.marks[1] - self.marks[0] if len(self.marks) == 2 else None,
            "ttft_ms": percentiles([(stream.first - stream.sent) * 1e3 for stream in good if stream.first]),
            "gap_ms": percentiles([gap * 1e3 for gap in self.gaps]),
            "leavers": [
                {"user": stream.user, "events": stream.events, "left": stream.left}
                for stream in good
                if stream.left
            ],
            "finished": [
                {"user": stream.user, "last": stream.last}
                for stream in good
                if stream.last and not stream.left
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


async def _main() -> None:
    result = await Run(from_json(sys.stdin.read())).go()
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    run(_main())
