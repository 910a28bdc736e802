"""One live request, as everybody but its nursery sees it.

It holds the marks that become the access record, and three cancel scopes by which
the outside may end it:

* ``whole``: the nursery. The client has left: everything stops, nothing is written.
* ``pending``: the body's arrival, or what else comes before an engine is called.
* ``reading``: the queue, and the engine's side. What the engine said so far still goes out,
  then the reason; if nothing has gone to the client yet, it gets an error answer.

Times are readings of Trio's clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TypeVar

import trio

from gateway import config
from gateway.errors import GatewayError
from gateway.headers import Caller
from gateway.marks import Marks, Reclaimed, Try
from gateway.tracecontext import new_id
from gateway.words import Outcome, Phase, first_outcome

FAREWELL_SECONDS = 1.0
"""How long a client may take to be told why its answer ends early."""


T = TypeVar("T")


class Request(Marks):
    """A request from its head to its record."""

    def __init__(
        self, *, method: str, path: str, query: bytes, headers: Sequence[tuple[bytes, bytes]], caller: Caller
    ) -> None:
        super().__init__(method=method, path=path, query=query, headers=headers, caller=caller)
        self.whole: trio.CancelScope | None = None
        self.pending: trio.CancelScope | None = None
        self.reading: trio.CancelScope | None = None
        self.writing = trio.CancelScope()
        self._answered = False
        self._stopped_by: GatewayError | None = None

    def __repr__(self) -> str:
        return f"<Request {self.id} {self.route} {self.phase} engine={self.engine}>"

    # What happens to it, in the order in which it may happen.

    def queued(self) -> None:
        """It has to wait for a slot."""
        self.phase = Phase.QUEUED
        self._waiting_since = trio.current_time()
        if self._queued is None:
            self._queued = self._waiting_since

    def dispatched(self, engine: str, model: str | None = None) -> None:
        """It has a slot of ``engine``, which is about to be called for ``model``, if that isn't its own."""
        self.phase = Phase.CONNECTING
        self.engine, self.served_model = engine, model or self.model
        self.attempts += 1
        self.reclaim = None  # What an attempt before this one has left behind isn't this one's.
        if self._dispatched is None:
            self._dispatched = trio.current_time()
        if self._queued is None:
            self._queued = self._dispatched

    def tried(self, engine: config.Engine, model: str | None) -> Try:
        """Begin the marks of one more call: ``engine`` is asked for ``model``, if that isn't its own."""
        now = trio.current_time()
        queued = self._waiting_since if self.tries or self._waiting_since is not None else now
        self._waiting_since = None
        one = Try(engine.name, engine.kind, engine.url, model or self.model, now, queued)
        if self.trace is not None and self.trace.sampled:
            one.span_id = new_id(8)
        self.tries.append(one)
        return one

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

    def go_on(self) -> None:
        """Raise what it is stopped by, if it is: what is to be cancelled then might not have begun."""
        if self._stopped_by is not None:
            raise self._stopped_by

    async def unless_stopped(self, doing: Awaitable[T]) -> T:
        """Wait for what comes before an engine is called. Raises what it is stopped by meanwhile."""
        with trio.CancelScope() as self.pending:
            if self._stopped_by is not None:
                self.pending.cancel()
            return await doing
        assert self._stopped_by is not None
        raise self._stopped_by

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
            for scope in (self.pending, self.reading):
                if scope is not None:
                    scope.cancel()
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
