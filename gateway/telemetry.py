"""What the gateway tells about its requests: access records and metrics.

A request's end is only noted here; records are written a moment later by a task of
their own, many in one go. When hundreds of readers leave at one instant their engines
are told first and the paperwork is done after. Writing happens in a thread, so that a
full pipe holds up nobody.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Literal, Protocol

import trio
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric

from gateway import __version__ as version
from gateway.accounts import Accounts
from gateway.engine import Engine
from gateway.gateway import Gateway
from gateway.gauges import Gauges
from gateway.ghosts import Reclaim
from gateway.history import History, Spans
from gateway.logs import JSON, lost
from gateway.request import Request
from gateway.usagestore import UsageStore
from gateway.words import ReclaimedBy

Sink = Callable[[dict[str, Any]], None]


class Traces(Protocol):
    """Who makes traces of requests: see :class:`gateway.tracing.Tracing`."""

    @property
    def dropped(self) -> int:
        """Spans that were lost."""

    def ended(self, request: Request, record: Mapping[str, Any]) -> None:
        """Note the end of a request and its access record."""

    def reclaimed(self, reclaim: Reclaim) -> None:
        """Note that it is known what became of a slot."""


_GATHER_SECONDS = 0.02
"""Records are written at most this much later than their request's end."""

_LAST_FLUSH_SECONDS = 1.0

_MOST_UNWRITTEN = 100_000
"""Records kept while standard output doesn't take them; newer ones are dropped and counted."""

_QUEUE_BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_RECLAIM_BUCKETS = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 1.5, 2.5, 5, 10, 20, 40)
_DURATION_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_TEARDOWN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)


class Telemetry:
    """Collects what has ended, writes the records, and keeps the metrics.

    ``sink`` receives each record instead of standard output, if given; ``store`` keeps what requests took,
    and ``traces`` is told of each request.
    """

    def __init__(
        self, *, sink: Sink | None = None, store: UsageStore | None = None, traces: Traces | None = None
    ) -> None:
        self.registry = CollectorRegistry()
        self.history = History()
        self._sink = sink
        self._traces = traces
        self.accounts = Accounts(self.registry, store)
        self._unwritten: deque[dict[str, Any]] = deque()
        self._unknown: dict[object, tuple[Request, dict[str, Any]]] = {}
        """Records of requests of which it isn't known yet what becomes of their slots."""
        self._dropped = 0
        self._something = trio.Event()
        self._flushing = trio.CancelScope()
        # What labels() returns is there for good, and looked up faster than labels() does it.
        self._requests = cache(
            Counter(
                "gateway_requests",
                "Requests ended, by how they ended.",
                ("route", "model", "engine", "outcome"),
                registry=self.registry,
            ).labels
        )
        self._of_tenants = cache(
            Counter(
                "gateway_tenant_requests",
                "Requests ended, by whose they were and how they ended.",
                ("tenant", "outcome"),
                registry=self.registry,
            ).labels
        )
        self._queue_wait = self._histogram(
            "gateway_queue_wait_seconds", "Waiting for a slot, of requests that got one.", _QUEUE_BUCKETS
        )
        self._ttft = self._histogram(
            "gateway_ttft_seconds", "From a request's arrival to its answer's first content.", _TTFT_BUCKETS
        )
        self._teardown = self._histogram(
            "gateway_teardown_seconds",
            "From a disconnect seen to the engine's side closed.",
            _TEARDOWN_BUCKETS,
        )
        self._duration = self._histogram(
            "gateway_request_seconds", "From a request's arrival to its end.", _DURATION_BUCKETS
        )
        self._token = cache(
            Histogram(
                "gateway_token_seconds",
                "Time per token of a stream behind its first content: its mean, once for each request.",
                ("engine",),
                buckets=_TOKEN_BUCKETS,
                registry=self.registry,
            ).labels
        )
        Info("gateway", "Which gateway this is.", registry=self.registry).info({"version": version})
        ProcessCollector(registry=self.registry)
        self._reclaim = Histogram(
            "gateway_reclaim_seconds",
            "From the close of a request that was cut short to its engine seen to have stopped.",
            ("engine",),
            buckets=_RECLAIM_BUCKETS,
            registry=self.registry,
        )

    def watch(self, gateway: Gateway) -> None:
        """Show the gauges of ``gateway`` in :meth:`metrics`, read when they are asked for."""
        self.registry.register(Gauges(gateway, self._told))
        for engine in gateway.engines:
            self._reclaim.labels(engine.name)
            self._token(engine.name)

    def _told(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "gateway_records_dropped", "Access records that could not be written.", self.dropped
        )
        yield CounterMetricFamily(
            "gateway_spans_dropped",
            "Spans of traces that didn't reach the collector.",
            self._traces.dropped if self._traces is not None else 0,
        )
        saved = CounterMetricFamily(
            "gateway_gpu_seconds_saved",
            "Seconds of GPU time that those who left early didn't cost: an estimate.",
            labels=["engine"],
        )
        for engine, savings in self.history.savings.items():
            saved.add_metric([engine], savings.seconds)
        yield saved
        yield CounterMetricFamily(
            "gateway_log_lines_dropped", "Lines of the log that could not be written.", lost()
        )
        yield from self.accounts.collect()

    def spans(self, name: Literal["ttft", "teardown"]) -> dict[str, Any]:
        """Describe the times to first token, or the teardowns: a histogram, and the last ones' quantiles."""
        spans: Spans = getattr(self.history, name)
        (metric,) = {"ttft": self._ttft, "teardown": self._teardown}[name].collect()
        buckets = [
            (each.labels["le"], each.value) for each in metric.samples if each.name.endswith("_bucket")
        ]
        p50, p95, p99 = spans.quantiles(0.5, 0.95, 0.99)
        return {"buckets": buckets, "p50": p50, "p95": p95, "p99": p99}

    @property
    def dropped(self) -> int:
        """Access records that could not be written."""
        return self._dropped

    def metrics(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)

    def ended(self, request: Request) -> None:
        """Note the end of a request."""
        record = request.record()
        self.history.ended(request)
        self._requests(request.route, request.model_label, request.engine or "", record["outcome"]).inc()
        if request.tenant:
            self._of_tenants(request.tenant, record["outcome"]).inc()
        for histogram, seconds in (
            (self._queue_wait, request.queue_seconds),
            (self._ttft, request.ttft_seconds),
            (self._teardown, request.teardown_seconds),
            (self._duration, request.duration_seconds),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        seconds = request.token_seconds(record["completion_tokens"] or 0)
        if seconds is not None:
            self._token(request.engine or "").observe(seconds)
        arrived = _wall_time(request.arrived)
        self.accounts.ended(request, record, arrived)
        if self._traces is not None:
            self._traces.ended(request, record)
        record = {"time": arrived.isoformat(timespec="milliseconds"), **record}
        if request.reclaim is not None and request.reclaim.by is None:
            self._unknown[request.reclaim] = (request, record)
        else:
            self._append(record)

    def reclaimed(self, engine: Engine, reclaim: Reclaim) -> None:
        """Note what became of a slot whose request was cut short, and write the request's record."""
        if reclaim.by is ReclaimedBy.ENGINE_IDLE and reclaim.seconds is not None:
            self._reclaim.labels(engine.name).observe(reclaim.seconds)
        if self._traces is not None:
            self._traces.reclaimed(reclaim)
        request, record = self._unknown.pop(reclaim, (None, {}))
        if request is not None:
            self._append({**record, **request.reclaimed()})

    def _append(self, record: dict[str, Any]) -> None:
        if len(self._unwritten) >= _MOST_UNWRITTEN:
            self._dropped += 1
            return
        self._unwritten.append(record)
        self._something.set()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write records as they come, and when the block is left those that are left."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_records)
                try:
                    yield
                finally:
                    nursery.cancel_scope.cancel()
                    self._flushing.deadline = trio.current_time() + _LAST_FLUSH_SECONDS
        finally:
            if not self._flushing.cancelled_caught:  # Else nobody takes them, and a thread is stuck in it.
                for _, record in self._unknown.values():
                    self._append(record)
                with trio.move_on_after(_LAST_FLUSH_SECONDS, shield=True):
                    await self._flush()

    async def _write_records(self) -> None:
        while True:
            await self._something.wait()
            await trio.sleep(_GATHER_SECONDS)
            self._something = trio.Event()
            with trio.CancelScope(shield=True) as self._flushing:
                await self._flush()

    async def _flush(self) -> None:
        records = list(self._unwritten)
        self._unwritten.clear()
        if self._sink is not None:
            for record in records:
                self._sink(record)
        elif records:
            lines = b"".join(_line(record) for record in records)
            try:
                await trio.to_thread.run_sync(_write, lines, abandon_on_cancel=True)
            except OSError:
                # Its reader has gone, or the disk is full. No reason to end requests.
                self._dropped += len(records)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, documentation, buckets=buckets, registry=self.registry)


def _line(record: dict[str, Any]) -> bytes:
    line = JSON(None, "access", {"event": "request", **record})
    return (line if isinstance(line, bytes) else line.encode()) + b"\n"


def _write(data: bytes) -> None:
    # Past Python's buffer: with a thread stuck in its lock the interpreter can't exit.
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(sys.stdout.fileno(), rest) :]


def _wall_time(instant: float) -> datetime:
    """Return the calendar's word for an instant of Trio's clock."""
    ago = timedelta(seconds=trio.current_time() - instant)
    return datetime.now(UTC) - ago
