"""What can be told of one request: its marks, the answer to who asks about it, and its access record.

Times are readings of Trio's clock, in seconds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from gateway.errors import GatewayError
from gateway.events import Tail
from gateway.headers import Caller, caller_id
from gateway.spool import Spool
from gateway.tracecontext import Trace
from gateway.usage import Meter, Usage, usage_of
from gateway.words import CLIENT_CLOSED_REQUEST, Outcome, Phase, ReclaimedBy, first_outcome


class Reclaimed(Protocol):
    """What becomes of the slot of a request that was cut short; ``by`` is None until it is known.

    ``bound`` is when it will be at the latest.
    """

    seconds: float | None
    by: ReclaimedBy | None
    bound: float


@dataclass(slots=True)
class Try:
    """The marks of one call of an engine: its ``kind`` and ``url``, and the ``model`` that it is asked for.

    Of the times those are None that didn't come. ``span_id`` is empty where nothing is traced.
    """

    engine: str
    kind: str
    url: str
    model: str | None
    called: float
    """It had its slot."""
    queued: float | None
    """It began to wait for that; None of a try that came without a wait after another one."""
    span_id: str = ""
    connected: float | None = None
    begun: float | None = None
    """The first bytes for the client were there."""
    closed: float | None = None
    """The engine had ended, or the connection to it was closed."""
    status: int | None = None
    error: str | None = None
    """Why the engine failed, in a word."""
    reclaim: Reclaimed | None = None


class Marks:
    """What is known of a request: :class:`gateway.request.Request` sets it as things happen."""

    def __init__(
        self, *, method: str, path: str, query: bytes, headers: Sequence[tuple[bytes, bytes]], caller: Caller
    ) -> None:
        self.id = os.urandom(12).hex()
        self.caller_id = caller_id(headers)
        self.caller = caller
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.route = "other"
        self.model: str | None = None
        self.model_label = ""
        self.engine: str | None = None
        self.stream: bool | None = None
        self.phase = Phase.RECEIVING
        self.attempts = 0
        self.status: int | None = None
        self.error: GatewayError | None = None
        self.tail = Tail()
        self.spool: Spool | None = None
        self.reclaim: Reclaimed | None = None
        self.meter: Meter | None = None
        self.tenant = ""
        self.priority: str | None = None
        self.reserved_tokens: int | None = None
        self.asked_tokens: int | None = None
        """The longest answer that it asks for."""
        self.served_model: str | None = None
        self.tries: list[Try] = []
        self.trace: Trace | None = None
        """Its place in a trace, if it has one."""
        self._facts: set[Outcome] = set()
        self.arrived = trio.current_time()
        self._queued: float | None = None
        self._waiting_since: float | None = None
        self._dispatched: float | None = None
        self._first_content: float | None = None
        self._cut: float | None = None
        self._upstream_closed: float | None = None
        self._ended: float | None = None
        self._usage: Usage | None = None

    @property
    def bytes(self) -> int:
        """How much of the body of its answer the client has been sent."""
        return self.spool.sent if self.spool is not None else 0

    @property
    def outcome(self) -> Outcome:
        """How it ended, once it has."""
        return first_outcome(self._facts)

    @property
    def dispatched_to_engine(self) -> bool:
        """Whether an engine was ever called for it."""
        return self._dispatched is not None

    @property
    def dispatched_at(self) -> float:
        """When an engine was first called for it."""
        assert self._dispatched is not None
        return self._dispatched

    @property
    def ended_at(self) -> float:
        """When it ended."""
        assert self._ended is not None
        return self._ended

    @property
    def waited_in_vain_since(self) -> float | None:
        """When it began to wait for a slot that it never got."""
        return self._waiting_since

    @property
    def queue_seconds(self) -> float | None:
        """How long it waited for a slot, if it got one."""
        return _between(self._queued, self._dispatched)

    @property
    def ttft_seconds(self) -> float | None:
        """From its arrival to the first content of the answer (comments don't count)."""
        return _between(self.arrived, self._first_content)

    @property
    def duration_seconds(self) -> float | None:
        """From its arrival to its end, once it has ended."""
        return _between(self.arrived, self._ended)

    def token_seconds(self, tokens: int) -> float | None:
        """How long a token took on average behind the first content of a stream of so many."""
        if tokens < 2 or not self.tail.events:
            return None
        span = _between(self._first_content, self._upstream_closed)
        return span / (tokens - 1) if span is not None else None

    @property
    def teardown_seconds(self) -> float | None:
        """From the client's leaving (or the stop) to the close of the engine's side, if it was cut short."""
        if self._dispatched is None or self.outcome is Outcome.COMPLETED:
            return None
        span = _between(self._cut, self._upstream_closed)
        return span if span is not None and span >= 0 else None

    @property
    def usage(self) -> Usage:
        """What it took, as far as is known; worked out once after its end, for all who ask."""
        if self._ended is None:
            return usage_of(self.meter)
        if self._usage is None:
            self._usage = usage_of(self.meter)
        return self._usage

    def view(self) -> dict[str, Any]:
        """Describe it while it lives, for the control plane."""
        return {
            "id": self.id,
            "caller_id": self.caller_id,
            "tenant": self.tenant or None,
            "route": self.route,
            "model": self.model,
            "engine": self.engine,
            "stream": self.stream,
            "phase": self.phase,
            "age_seconds": round(trio.current_time() - self.arrived, 3),
            "bytes": self.bytes,
            "events": self.tail.events,
            "spooled_bytes": self.spool.held if self.spool else 0,
        }

    def record(self) -> dict[str, Any]:
        """Describe it after its end: the access record."""
        until = self._ended if self._dispatched is None else self._dispatched
        return {
            "id": self.id,
            "caller_id": self.caller_id,
            "client": self.caller.address or None,
            "tenant": self.tenant or None,
            "priority": self.priority,
            "method": self.method,
            "route": self.route,
            "path": self.path[:256] if self.route == "other" else None,
            "model": self.model[:256] if self.model else self.model,
            "served_model": self.served_model,
            "engine": self.engine,
            "stream": self.stream,
            "status": self._recorded_status(),
            "outcome": self.outcome,
            "phase": self.phase,
            "code": self.error.code if self.error else None,
            "detail": (self.error.detail or self.error.message) if self.error else None,
            "attempts": self.attempts,
            "reserved_tokens": self.reserved_tokens,
            "queue_ms": _milliseconds(_between(self._queued, until)),
            "ttft_ms": _milliseconds(self.ttft_seconds),
            "duration_ms": _milliseconds(self.duration_seconds),
            "bytes": 0 if self.method == "HEAD" else self.bytes,  # The server leaves its body out.
            "events": self.tail.events,
            **self.usage.fields(),
            "teardown_ms": _milliseconds(self.teardown_seconds),
            **self.reclaimed(),
        }

    def reclaimed(self) -> dict[str, Any]:
        """Describe what became of its slot, as far as it is known: a part of the access record."""
        reclaim = self.reclaim
        return {
            "reclaim_ms": _milliseconds(reclaim.seconds) if reclaim else None,
            "reclaimed_by": reclaim.by if reclaim else None,
        }

    def _recorded_status(self) -> int | None:
        if self.outcome in (Outcome.CLIENT_GONE, Outcome.CLIENT_STALLED):
            return CLIENT_CLOSED_REQUEST
        # An answer that broke off after its head counts as what broke it off.
        return self.error.status if self.error else self.status


def _between(start: float | None, end: float | None) -> float | None:
    return end - start if start is not None and end is not None else None


def _milliseconds(seconds: float | None) -> float | None:
    return round(seconds * 1000, 3) if seconds is not None else None
