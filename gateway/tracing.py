"""Traces: what has ended goes to OpenTelemetry's SDK, which sends it to a collector in a thread of its own.

This module and :mod:`gateway.otlp` alone know OpenTelemetry, and are imported only where ``traces.endpoint``
is set. Nothing of the SDK is called while a request runs: that keeps marks for its access record anyway, and
of a trace it needs its ids and the decision to sample (:mod:`gateway.tracecontext`). Its spans are made after
its end, and after its record, one request in a turn of the loop.

They are encoded there (:mod:`gateway.otlp`), not begun and ended by a ``Tracer``: their ids are out already,
in the ``traceparent`` that engines got, and their times are past. A tracer would have to be told each id by
an ``IdGenerator`` with a memory, and would decide on sampling a second time. The processor and the exporter
are the SDK's own: its queue, its thread, its way of trying again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog
import trio
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from gateway import __version__, config
from gateway.marks import Reclaimed
from gateway.otlp import Encoder, Exporter, Failing, said_once, soon_back
from gateway.request import Request
from gateway.spans import Span, spans_of
from gateway.tracecontext import Trace, enter, without_trace

log = structlog.get_logger("gateway.tracing")

_GATHER_SECONDS = 0.02
"""Spans are made so long after a request's end, after its record: few at a time, others wait meanwhile."""

_SEND_SECONDS = 1.0
"""Spans leave at most this much later, unless a batch is full before."""

_BATCH = 128
"""Requests whose spans are sent together."""

_MOST_SPANS = 8192
"""Spans that wait for the collector, some 7 MB; newer ones are dropped and counted."""

_MOST_TRACES = 10_000
"""Requests that wait for their spans to be made; the same."""

_LAST_SECONDS = 1.0
"""How long the end of the process waits for the collector."""


@dataclass(slots=True)
class _Ended:
    """A request that has ended, and how many of its reclaims haven't."""

    request: Request
    record: Mapping[str, Any]
    reclaims: int = 0


class Tracing:
    """The traces of one gateway. :meth:`exporting` has to be entered for them to leave it."""

    def __init__(self, settings: config.Traces) -> None:
        self._settings = settings
        self._ended: deque[_Ended] = deque()
        self._unknown: dict[Reclaimed, _Ended] = {}
        """Requests whose slots aren't free yet."""
        self._something = trio.Event()
        self._out: _Out | None = None
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """Spans that didn't reach the collector."""
        return self._dropped + (self._out.lost if self._out is not None else 0)

    def begun(self, request: Request) -> None:
        """Give a request its place in a trace: the fields of its head that tell it are ours from now on."""
        request.trace = enter(request.headers, self._settings.sample)
        request.headers = without_trace(request.headers)

    def ended(self, request: Request, record: Mapping[str, Any]) -> None:
        """Note the end of a request and its access record."""
        if request.trace is None or not request.trace.sampled:
            return
        one = _Ended(request, record)
        for each in request.tries:
            if each.reclaim is not None and each.reclaim.by is None:
                self._unknown[each.reclaim] = one
                one.reclaims += 1
        if not one.reclaims:
            self._note(one)

    def reclaimed(self, reclaim: Reclaimed) -> None:
        """Note that it is known what became of a slot: the last of its request's completes the trace."""
        one = self._unknown.pop(reclaim, None)
        if one is not None:
            one.reclaims -= 1
            if not one.reclaims:
                self._note(one)

    def _note(self, one: _Ended) -> None:
        if len(self._ended) >= _MOST_TRACES:
            self._dropped += 1
            return
        self._ended.append(one)
        self._something.set()

    @asynccontextmanager
    async def exporting(self) -> AsyncIterator[None]:
        """Make spans as requests end, and have them sent; when the block is left, those that are left.

        The latter takes no longer than three seconds, whatever the collector does.
        """
        with soon_back(), said_once() as failing:
            self._out = out = _Out(self._settings, failing)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._make_spans, out)
                    try:
                        yield
                    finally:
                        nursery.cancel_scope.cancel()
            finally:
                for one in {id(one): one for one in self._unknown.values()}.values():
                    self._note(one)
                with trio.move_on_after(_LAST_SECONDS, shield=True):
                    await self._hand_over(out)
                await out.close()

    async def _make_spans(self, out: _Out) -> None:
        while True:
            await self._something.wait()
            await trio.sleep(_GATHER_SECONDS)
            self._something = trio.Event()
            await self._hand_over(out)

    async def _hand_over(self, out: _Out) -> None:
        while self._ended:
            one = self._ended.popleft()
            trace = one.request.trace
            assert trace is not None
            out.take(trace, tuple(spans_of(one.request, one.record)))
            # Hundreds may have left at one instant: others have their turns between them.
            await trio.lowlevel.checkpoint()


class _Out:
    """The way out: the SDK's processor and exporter."""

    def __init__(self, settings: config.Traces, failing: Failing) -> None:
        assert settings.endpoint is not None
        self._exporter = Exporter(settings.endpoint.rstrip("/") + "/v1/traces", failing)
        self._failing = failing
        self._encoder = Encoder(
            Resource.create({"service.name": settings.service_name, "service.version": __version__}),
            InstrumentationScope("gateway", __version__),
        )
        self._taken = self._refused = 0
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=_MOST_SPANS,
            schedule_delay_millis=_SEND_SECONDS * 1000,
            max_export_batch_size=_BATCH,
        )

    @property
    def lost(self) -> int:
        """Spans that were dropped: there was no room, or the collector didn't take them."""
        return self._refused + self._exporter.lost

    def take(self, trace: Trace, spans: Sequence[Span]) -> None:
        """Have the spans of one request sent."""
        try:
            # One reading of both clocks for all of it, so that what is nested stays so.
            one = self._encoder.encode(trace, spans, time.time_ns() - round(trio.current_time() * 1e9))
        except (TypeError, ValueError) as error:
            # Half a character, or a number out of all bounds. What only watches mustn't end what it watches.
            log.error("a trace can't be encoded", trace=trace.trace_id, error=str(error))
            self._refused += len(spans)
            return
        if self._taken - self._exporter.taken + one.count > _MOST_SPANS:
            self._refused += one.count
            return
        self._taken += one.count
        self._processor.on_end(one)

    async def close(self) -> None:
        """Send what is left, within a bound, and end the thread."""
        if not self._failing.failing:
            await _within(_LAST_SECONDS, self._processor.force_flush)
        self._exporter.shutdown()  # It gives up what it is at, and takes nothing more.
        await _within(_LAST_SECONDS, self._processor.shutdown)


async def _within(seconds: float, call: Callable[[], object]) -> None:
    with trio.move_on_after(seconds, shield=True):
        await trio.to_thread.run_sync(call, abandon_on_cancel=True)
