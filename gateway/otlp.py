"""The last step of a trace: OpenTelemetry's exporter for OTLP over HTTP, and what is said when it fails.

It runs in the thread of the SDK's processor (:mod:`gateway.tracing`), beside the loop and in its interpreter.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = structlog.get_logger("gateway.tracing")

_QUIET_SECONDS = 60.0
"""At least so long there is silence after a line about a collector that fails, if it fails again."""

_SWITCH_SECONDS = 0.00005
"""How long the exporter's thread may keep the interpreter from the loop, each time that has let go of it for
a system call. It encodes in Python for milliseconds on end; with Python's own 5 ms, and batches of 512 spans,
the slowest hundredth of those who left was let go three times as late."""


class Exporter(SpanExporter):
    """OpenTelemetry's exporter, counted. All but ``shutdown`` runs in the processor's thread."""

    def __init__(self, endpoint: str, failing: Failing) -> None:
        self._exporter = OTLPSpanExporter(endpoint)
        self._failing = failing
        self._closed = False
        self.taken = 0
        self.lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send ``spans``, trying again for ten seconds at most (``OTEL_EXPORTER_OTLP_TIMEOUT``)."""
        self.taken += len(spans)
        result = SpanExportResult.FAILURE if self._closed else self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._failing.ended()
        else:
            self.lost += len(spans)
        return result

    def shutdown(self) -> None:
        """Give up what is being tried, at once; safe to call from any thread, and more than once."""
        if not self._closed:
            self._closed = True
            self._exporter.shutdown()  # type: ignore[no-untyped-call]


class Failing(logging.Handler):
    """Puts what the SDK logs into our words: a line when the collector fails, and one when that is over."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.failing = False
        self._said_at = -_QUIET_SECONDS
        self._said = False

    def emit(self, record: logging.LogRecord) -> None:
        """Take what the SDK has to say."""
        if self.failing:
            return
        self.failing, now = True, time.monotonic()
        if now - self._said_at >= _QUIET_SECONDS:
            self._said, self._said_at = True, now
            log.warning("traces don't reach the collector; more isn't said of it", reason=record.getMessage())

    def ended(self) -> None:
        """The collector has taken something."""
        if self.failing and self._said:
            log.info("traces reach the collector again")
        self.failing = self._said = False


@contextmanager
def soon_back() -> Iterator[None]:
    """Keep the exporter's thread from keeping the loop waiting while the block runs."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def said_once() -> Iterator[Failing]:
    """Have all of the SDK's log go through one :class:`Failing` while the block runs."""
    logger = logging.getLogger("opentelemetry")
    failing, propagate = Failing(), logger.propagate
    logger.addHandler(failing)
    logger.propagate = False
    try:
        yield failing
    finally:
        logger.removeHandler(failing)
        logger.propagate = propagate
