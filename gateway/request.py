"""One live request, as everybody but its nursery sees it.

It holds the marks that become the access record, and three cancel scopes by which
the outside may end it:

* ``whole``: the nursery. The client has left: everything stops, nothing is written.
* ``pending``: the body's arrival, the queue, the engine's silence. Nothing has gone to
  the client yet, so it gets an error answer.
* ``reading``: the engine's side alone. What the engine said so far still goes out,
  then the reason.

Times are readings of Trio's clock, in seconds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import trio

from gateway.errors import GatewayError
from gateway.events import Tail
from gateway.headers import Caller, caller_id
from gateway.spool import Spool
from gateway.usage import Meter, usage_of
from gateway.words import CLIENT_CLOSED_REQUEST, Outcome, Phase, ReclaimedBy, first_outcome

FAREWELL_SECONDS = 1.0
"""How long a client may take to be told why its answer ends early."""


class Reclaimed(Protocol):
    """What becomes of the slot of a request that was cut short; ``by`` is None until it is known."""

    seconds: float | None
    by: ReclaimedBy | None


class Request:
    """A request from its head to its record."""

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
        self.bytes = 0
        self.error: GatewayError | None = None
        self.tail = Tail()
        self.spool: Spool | None = None
        self.reclaim: Reclaimed | None = None
        self.meter: Meter | None = None
        self.tenant = ""
        self.priority: str | None = None
        self.reserved_tokens: int | None = None

        self.whole: trio.CancelScope | None = None
        self.pending = trio.CancelScope()
        self.reading = trio.CancelScope()
        self.writing = trio.CancelScope()
        self._facts: set[Outcome] = set()
        self._answered = False
        self._stopped_by: GatewayError | None = None

        self.arrived = trio.current_time()
        self._queued: float | None = None
        self._dispatched: float | None = None
        self._first_content: float | None = None
        self._cut: float | None = None
        self._upstream_closed: float | None = None
        self._ended: float | None = None

    def __repr__(self) -> str:
        return f"<Request {self.id} {self.route} {self.phase} engine={self.engine}>"

    # What happens to it, in the order in which it may happen.

    def queued(self) -> None:
        """It has to wait for a slot."""
        self.phase = Phase.QUEUED
        if self._queued is None:
            self._queued = trio.current_time()

    def dispatched(self, engine: str) -> None:
        """It has a slot of ``engine``, which is about to be called."""
        self.phase = Phase.CONNECTING
        self.engine = engine
        self.attempts += 1
        if self._dispatched is None:
            self._dispatched = trio.current_time()
        if self._queued is None:
            self._queued = self._dispatched

    def passed(self, data: bytes) -> None:
        """``data`` has gone from the engine into the spool."""
        self.phase = Phase.STREAMING
        self.tail.feed(data)
        if self._first_content is None and self.tail.content_seen:
            self._first_content = trio.current_time()

    def cut_off(self, reclaim: Reclaimed) -> None:
        """Its connection to an engine was closed before the engine had ended."""
        self.reclaim = reclaim

    def upstream_closed(self) -> None:
        """The engine's side is over: response closed, slot handed on."""
        self._upstream_closed = trio.current_time()

    def client_left(self) -> None:
        """The client closed, reset or half-closed: cancel everything.

        A connection that we have cut off ourselves says nothing about the client.
        """
        cut_off = self.writing.cancel_called or Outcome.CLIENT_STALLED in self._facts
        if not self._answered and not cut_off:
            self._facts.add(Outcome.CLIENT_GONE)
            self._cut_short()
        if self.whole is not None:
            self.whole.cancel()

    def client_stalled(self) -> None:
        """The client took nothing for ``stall_seconds`` although there was something: cancel everything."""
        if not self._answered:
            self._facts.add(Outcome.CLIENT_STALLED)
            self._cut_short()
        if self.whole is not None:
            self.whole.cancel()

    def stop(self, reason: GatewayError, *, farewell_seconds: float = FAREWELL_SECONDS) -> None:
        """End it from outside: by an operator or because the gateway's drain is over.

        The engine's side is cancelled now; the client has a second to be told.
        """
        if self._stopped_by is not None:
            # Of two reasons the first in the order of outcomes is told.
            if first_outcome((reason.outcome, self._stopped_by.outcome)) is reason.outcome:
                self._stopped_by = reason
        else:
            self._stopped_by = reason
            self._cut_short()
            self.pending.cancel()
            self.reading.cancel()
            self.writing.deadline = min(self.writing.deadline, trio.current_time() + farewell_seconds)

    def _cut_short(self) -> None:
        if self._cut is None:
            self._cut = trio.current_time()

    @property
    def stopped_by(self) -> GatewayError | None:
        """Why it was ended from outside, if it was."""
        return self._stopped_by

    def failed(self, error: GatewayError) -> None:
        """It ends with ``error``, as an answer or inside one; ``self.error`` is what the client is told.

        What comes after the whole answer doesn't change how it ended; of an error and of what
        has stopped the request at the same time the first in the order of outcomes decides.
        """
        if Outcome.COMPLETED in self._facts:
            return
        stopped_by = self._stopped_by
        if (
            stopped_by is not None
            and first_outcome((stopped_by.outcome, error.outcome)) is stopped_by.outcome
        ):
            error = stopped_by
        self.error = error.bare()
        self._facts.add(error.outcome)

    def answered(self) -> None:
        """The client has been sent the whole answer. If it leaves from now on, it is not too early.

        Nor was it if that came to light while the last write was on its way back to us.
        """
        self._answered = True
        self._facts.discard(Outcome.CLIENT_GONE)
        if self.error is None:
            self._facts.add(Outcome.COMPLETED)

    def ended(self, otherwise: GatewayError) -> None:
        """The nursery is closed. ``otherwise`` is why, if nothing was said about it."""
        self._ended = trio.current_time()
        if not self._facts:
            self.failed(self._stopped_by or otherwise)

    # What can be told of it.

    @property
    def outcome(self) -> Outcome:
        """How it ended, once it has."""
        return first_outcome(self._facts)

    @property
    def dispatched_to_engine(self) -> bool:
        """Whether an engine was ever called for it."""
        return self._dispatched is not None

    @property
    def queue_seconds(self) -> float | None:
        """How long it waited for a slot, if it got one."""
        return _between(self._queued, self._dispatched)

    @property
    def ttft_seconds(self) -> float | None:
        """From its arrival to the first content of the answer (comments don't count)."""
        return _between(self.arrived, self._first_content)

    @property
    def teardown_seconds(self) -> float | None:
        """From the client's leaving (or the stop) to the close of the engine's side, if it was cut short."""
        if self._dispatched is None or self.outcome is Outcome.COMPLETED:
            return None
        span = _between(self._cut, self._upstream_closed)
        return span if span is not None and span >= 0 else None

    def view(self) -> dict[str, Any]:
        """Describe it while it lives, for the control plane."""
        return {
            "id": self.id,
            "caller_id": self.caller_id,
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
            "duration_ms": _milliseconds(_between(self.arrived, self._ended)),
            "bytes": self.bytes,
            "events": self.tail.events,
            **usage_of(self.meter).fields(),
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
