"""The last steps of a trace: its encoding, OpenTelemetry's exporter for OTLP over HTTP, and what is said when
that fails.

What is sent is encoded in the loop, a request at a time, and right into protobuf's messages: that takes a
seventh of what the SDK's own spans and their encoder take. In the exporter's thread it would take the
interpreter from the loop at each of its system calls, and the slowest hundredth of those who leave in a storm
would be let go two to three times as late. The thread (the SDK's processor's) only sends.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import structlog
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from gateway.spans import Span
from gateway.tracecontext import Trace

log = structlog.get_logger("gateway.tracing")

_QUIET_SECONDS = 60.0
"""At least so long there is silence after a line about a collector that fails, if it fails again."""

_SWITCH_SECONDS = 0.00005
"""How long the exporter's thread may keep the interpreter from the loop, each time that has let go of it for
a system call. Python's own time is 5 ms."""


_KINDS = {"internal": 1, "server": 2, "client": 3}
_ERROR = 2
_PARENT_IS_KNOWN, _PARENT_IS_REMOTE = 0x100, 0x200
"""``Span.kind``, ``Status.code`` and ``Span.flags`` (opentelemetry-proto, trace.proto)."""

_NO_RESOURCE = Resource.get_empty()
"""Given, since without one the SDK looks for one each time, for half a millisecond."""

_SAMPLED = SpanContext(1, 1, False, TraceFlags(TraceFlags.SAMPLED))


class Encoded(ReadableSpan):
    """All spans of one request as they are sent. To the SDK's processor, which only queues it, it is one."""

    def __init__(self, count: int, data: bytes) -> None:
        super().__init__("", context=_SAMPLED, resource=_NO_RESOURCE)
        self.count = count
        self.data = data


class Encoder:
    """Encodes spans as the SDK would: a test compares the two."""

    def __init__(self, resource: Resource, scope: InstrumentationScope) -> None:
        nobody = ReadableSpan("", context=_SAMPLED, resource=resource, instrumentation_scope=scope)
        self._frame = encode_spans([nobody])  # The resource and the scope are the SDK's to encode.
        del self._frame.resource_spans[0].scope_spans[0].spans[:]

    def encode(self, trace: Trace, spans: Iterable[Span], offset: int) -> Encoded:
        """Encode the spans of a request. ``offset`` is the calendar's ns at the zero of their clock."""
        request = type(self._frame)()
        request.CopyFrom(self._frame)
        there = request.resource_spans[0].scope_spans[0].spans
        trace_id, state = bytes.fromhex(trace.trace_id), trace.state.decode("ascii") if trace.state else ""
        for span in spans:
            one = there.add(
                trace_id=trace_id,
                span_id=bytes.fromhex(span.span_id),
                trace_state=state,
                name=span.name,
                kind=_KINDS[span.kind],
                start_time_unix_nano=offset + round(span.start * 1e9),
                end_time_unix_nano=offset + round(span.end * 1e9),
                flags=_PARENT_IS_KNOWN,
            )
            if span.parent_id:
                one.parent_span_id = bytes.fromhex(span.parent_id)
                if span.kind == "server":
                    one.flags |= _PARENT_IS_REMOTE
            one.status.SetInParent()
            if span.error is not None:
                one.status.code = _ERROR
            for name, value in span.attributes.items():
                _set(one.attributes.add(key=name).value, value)
        return Encoded(len(there), request.SerializeToString())


def _set(field: Any, value: str | int | float | bool) -> None:
    if isinstance(value, str):
        field.string_value = value
    elif isinstance(value, bool):  # It is an int, too.
        field.bool_value = value
    elif isinstance(value, int):
        field.int_value = value
    else:
        field.double_value = value


class Exporter(SpanExporter):
    """OpenTelemetry's exporter, counted. All but ``shutdown`` runs in the processor's thread."""

    def __init__(self, endpoint: str, failing: Failing) -> None:
        self._exporter = OTLPSpanExporter(endpoint)
        self._failing = failing
        self._closed = False
        self.taken = 0
        self.lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send what is encoded, trying again for ten seconds at most (``OTEL_EXPORTER_OTLP_TIMEOUT``)."""
        requests = [each for each in spans if isinstance(each, Encoded)]
        count = sum(each.count for each in requests)
        self.taken += count
        # Messages that are written one after another are one, with the elements of all (protobuf's encoding).
        data = b"".join(each.data for each in requests)
        if not self._closed and self._exporter._client.export(data).success:
            self._failing.ended()
            return SpanExportResult.SUCCESS
        self.lost += count
        return SpanExportResult.FAILURE

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
