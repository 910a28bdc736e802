"""What a trace tells of one request: its spans as plain values, made from its marks after its end.

::

    POST /v1/chat/completions      the request, from its head to its record
    ├─ queue                       waiting for a slot
    └─ chat MODEL                  a call of an engine; one for each try
       ├─ connect                  until there is a connection
       ├─ prefill                  until the first bytes for the client
       ├─ stream                   until the engine has ended, or was cut off
       └─ reclaim                  from there until it was seen to have stopped: past its parent's end

No word of a prompt or an answer is in them: there is none among the marks. Messages of errors stay out too,
for an engine's may quote what it was asked.

Source: OpenTelemetry's semantic conventions for HTTP spans (1.23, stable) and for GenAI client spans (in
development); names beginning with ``gateway.`` are our own. Times are readings of Trio's clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal
from urllib.parse import urlsplit

from gateway.marks import Marks, Try
from gateway.tracecontext import Trace, new_id
from gateway.words import Outcome

Kind = Literal["server", "client", "internal"]
Value = str | int | float | bool

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
}
"""``gen_ai.operation.name`` by route; others (rerank, tokenize) are called by the last part of their path."""

_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
"""Others are a client's invention, and not to be names of spans."""

_LONGEST = 256
"""Characters of a path or a model's name, as in the access record."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span. ``error`` is the type of what went wrong (a word, a status) if it counts as an error."""

    name: str
    kind: Kind
    span_id: str
    parent_id: str | None
    start: float
    end: float
    attributes: Mapping[str, Value]
    error: str | None = None


def spans_of(request: Marks, record: Mapping[str, Any]) -> Iterator[Span]:
    """Make the spans of a request that has ended; ``record`` is its access record.

    That has the last word on how it ended: what its connection says afterwards doesn't count.
    """
    trace = request.trace
    assert trace is not None, "a request that is traced"
    since = request.waited_in_vain_since
    if since is not None:
        yield _span("queue", trace.span_id, since, request.ended_at, {})
    for number, one in enumerate(request.tries, 1):
        if one.queued is not None:
            yield _span("queue", trace.span_id, one.queued, one.called, {"gateway.engine": one.engine})
        yield from _phases(one)
        yield _of_try(number, one, request, trace, record)
    yield _of_request(request, trace, record)


def _of_request(request: Marks, trace: Trace, record: Mapping[str, Any]) -> Span:
    known = request.method in _METHODS
    method = request.method if known else "HTTP"
    route = None if request.route == "other" else request.route
    error = _fault(record)
    return Span(
        f"{method} {route}" if route else method,
        "server",
        trace.span_id,
        trace.parent.span_id if trace.parent else None,
        request.arrived,
        request.ended_at,
        _given(
            {
                "http.request.method": request.method if known else "_OTHER",
                "http.request.method_original": None if known else request.method[:_LONGEST],
                "http.route": route,
                "http.response.status_code": request.status,
                "url.path": request.path[:_LONGEST],
                "url.scheme": request.caller.scheme,
                "client.address": request.caller.address or None,
                "error.type": error,
                "gateway.request_id": request.id,
                "gateway.outcome": record["outcome"],
                "gateway.phase": record["phase"],
                "gateway.code": record["code"],
                "gateway.engine": request.engine,
                "gateway.tenant": request.tenant or None,
                "gateway.attempts": request.attempts,
                "gateway.reclaimed_by": request.reclaim.by if request.reclaim else None,
            }
        ),
        error,
    )


def _fault(record: Mapping[str, Any]) -> str | None:
    """Say what went wrong on the server's side (5xx), if anything did; a client that leaves isn't that.

    An answer that broke off after a good head counts as what broke it off.
    """
    status = record["status"]
    if record["outcome"] in (Outcome.CLIENT_GONE, Outcome.CLIENT_STALLED) or status is None or status < 500:
        return None
    return record["code"] or str(status)


def _of_try(number: int, one: Try, request: Marks, trace: Trace, record: Mapping[str, Any]) -> Span:
    operation = _OPERATIONS.get(request.route) or request.route.rpartition("/")[2]
    model = one.model[:_LONGEST] if one.model else None
    address, port = _address(one.url)
    # Of a client's call 4xx is an error too: that is what makes it worth a look.
    error = str(one.status) if one.status is not None and one.status >= 400 else one.error
    last = number == len(request.tries) and request.meter is not None
    return Span(
        f"{operation} {model}" if model else operation,
        "client",
        one.span_id,
        trace.span_id,
        one.called,
        _end(one),
        _given(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": one.kind,
                "gen_ai.request.model": model,
                "gen_ai.usage.input_tokens": record["prompt_tokens"] if last else None,
                "gen_ai.usage.output_tokens": record["completion_tokens"] if last else None,
                "gateway.usage_source": record["usage_source"] if last else None,
                "http.request.method": "POST",
                "http.response.status_code": one.status,
                "server.address": address,
                "server.port": port,
                "error.type": error,
                "gateway.engine": one.engine,
                "gateway.attempt": number,
                "gateway.stream": request.stream,
            }
        ),
        error,
    )


def _phases(one: Try) -> Iterator[Span]:
    """Make the spans below a call's own, each from one mark to the next that came."""
    end = _end(one)
    yield _span("connect", one.span_id, one.called, end if one.connected is None else one.connected, {})
    if one.connected is not None:
        yield _span("prefill", one.span_id, one.connected, end if one.begun is None else one.begun, {})
        if one.begun is not None:
            yield _span("stream", one.span_id, one.begun, end, {})
    reclaim = one.reclaim
    if reclaim is not None and reclaim.by is not None:
        # A ghost has no end of its own: its reclaim was over when its time was.
        over = reclaim.bound if reclaim.seconds is None else end + reclaim.seconds
        told = {"gateway.engine": one.engine, "gateway.reclaimed_by": reclaim.by.value}
        yield _span("reclaim", one.span_id, end, over, told)


def _span(name: str, parent_id: str, start: float, end: float, attributes: Mapping[str, Value]) -> Span:
    return Span(name, "internal", new_id(8), parent_id, start, end, attributes)


def _end(one: Try) -> float:
    return one.called if one.closed is None else one.closed


def _given(attributes: Mapping[str, Any]) -> dict[str, Value]:
    """Leave out what there is nothing to say of."""
    return {name: value for name, value in attributes.items() if value is not None}


@lru_cache(maxsize=256)
def _address(url: str) -> tuple[str, int | None]:
    """Return ``server.address`` and ``server.port`` of an engine's URL; of a unix socket its path alone."""
    parts = urlsplit(url)
    if parts.scheme == "unix" or not parts.hostname:
        return parts.path or url, None
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
