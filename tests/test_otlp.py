"""Spans are encoded as OpenTelemetry's SDK does it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from gateway.otlp import Encoder
from gateway.spans import Span, Value
from gateway.tracecontext import Trace

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
OFFSET = 1_795_980_021_123_456_789
RESOURCE = Resource.create({"service.name": "gateway", "service.version": "0.1"})
SCOPE = InstrumentationScope("gateway", "0.1")
KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}

ids = st.integers(1, 2**64 - 1).map("{:016x}".format)
values: st.SearchStrategy[Value] = st.one_of(
    st.text(max_size=20), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)
)
spans = st.builds(
    Span,
    name=st.text(max_size=20),
    kind=st.sampled_from(["server", "client", "internal"]),
    span_id=ids,
    parent_id=st.none() | ids,
    start=st.floats(0, 1e6),
    end=st.floats(0, 1e6),
    attributes=st.dictionaries(st.text(min_size=1, max_size=10), values, max_size=5),
    error=st.none() | st.just("engine_failed"),
)


def by_the_sdk(span: Span, state: TraceState | None) -> ReadableSpan:
    def context(span_id: str, *, remote: bool = False) -> SpanContext:
        return SpanContext(int(TRACE, 16), int(span_id, 16), remote, TraceFlags(TraceFlags.SAMPLED), state)

    attributes: Mapping[str, Value] = span.attributes
    return ReadableSpan(
        span.name,
        context=context(span.span_id),
        parent=context(span.parent_id, remote=span.kind == "server") if span.parent_id else None,
        resource=RESOURCE,
        attributes=attributes,
        kind=KINDS[span.kind],
        status=Status(StatusCode.UNSET if span.error is None else StatusCode.ERROR),
        start_time=OFFSET + round(span.start * 1e9),
        end_time=OFFSET + round(span.end * 1e9),
        instrumentation_scope=SCOPE,
    )


@pytest.mark.parametrize("state", [b"", b"vendor=value,other=1"])
@given(made=st.lists(spans, min_size=1, max_size=4))
def test_they_are_what_the_sdk_would_send(state: bytes, made: list[Span]) -> None:
    theirs = TraceState.from_header([state.decode()]) if state else None
    expected = encode_spans([by_the_sdk(span, theirs) for span in made])
    trace = Trace(TRACE, "00f067aa0ba902b7", sampled=True, state=state)
    encoded = Encoder(RESOURCE, SCOPE).encode(trace, made, OFFSET)
    assert encoded.count == len(made)
    got = type(expected)()
    got.ParseFromString(encoded.data)
    assert got == expected
