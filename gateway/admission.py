"""Who may call an engine now, who waits, who is refused.

Granting is one synchronous step: whoever frees a slot grants the next ticket in
the same step, so that no instant exists at which a slot is free while somebody
admissible waits. The queue is first come first served for each engine: a ticket
that waits for an engine is not overtaken there by a later, cheaper one, while
tickets for other engines pass by.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import trio

from gateway.engine import Engine
from gateway.errors import Code, GatewayError
from gateway.ledger import Slot


@dataclass(eq=False, slots=True)
class Ticket:
    """A request's place: its order of arrival, its cost in slots, the engines it may go to.

    It is kept across retries, and with it the place and the ``deadline`` (Trio's clock).
    """

    number: int
    engines: Sequence[Engine]
    cost: int
    deadline: float
    seat: tuple[Engine, Slot] | None = None
    refusal: GatewayError | None = None
    called: trio.Event = field(default_factory=trio.Event)


class Admission:
    """Grants slots of all engines and keeps the one queue in front of them."""

    def __init__(self, *, queue: int, queue_seconds: float) -> None:
        self._most_waiting = queue
        self._queue_seconds = queue_seconds
        self._waiting: list[Ticket] = []
        self._numbers = count()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Admission {self.waiting} of {self._most_waiting} waiting>"

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._waiting)

    def ticket(self, engines: Sequence[Engine], cost: int) -> Ticket:
        """Make a ticket for a request of ``cost`` slots that may go to any of ``engines``.

        Raises GatewayError ``invalid_request`` if it could never fit.
        """
        largest = max(engine.ledger.slots for engine in engines)
        if cost > largest:
            raise GatewayError(
                Code.INVALID_REQUEST,
                f"The request makes {cost} sequences at once; the largest engine for it holds {largest}.",
                param="n",
            )
        fitting = [engine for engine in engines if engine.ledger.slots >= cost]
        return Ticket(next(self._numbers), fitting, cost, trio.current_time() + self._queue_seconds)

    @asynccontextmanager
    async def slot(
        self, ticket: Ticket, *, waiting: Callable[[], None]
    ) -> AsyncIterator[tuple[Engine, Slot]]:
        """Hold a slot: enter with it and the engine that granted it, give it back on leaving.

        One that has been handed over meanwhile is its new owner's to give back. ``waiting`` is
        called if the request has to queue. Raises GatewayError ``queue_full``,
        ``queue_timeout`` or ``draining``.
        """
        engine, slot = self._at_once(ticket) or await self._in_turn(ticket, waiting)
        try:
            yield engine, slot
        finally:
            if engine.ledger.runs(slot):
                self.give_back(engine, slot)

    def give_back(self, engine: Engine, slot: Slot) -> None:
        """Return a slot, and grant in the same step whoever can go now."""
        engine.ledger.give_back(slot)
        self._grant()

    def close(self) -> None:
        """Refuse everybody who waits and everybody who comes: the gateway is draining."""
        self._closed = True
        for ticket in self._waiting:
            ticket.refusal = _draining()
            ticket.called.set()
        self._waiting.clear()

    def _at_once(self, ticket: Ticket) -> tuple[Engine, Slot] | None:
        if self._closed:
            raise _draining()
        self._enqueue(ticket)
        self._grant()
        if ticket.seat is None:
            return None
        seat, ticket.seat = ticket.seat, None
        return seat

    async def _in_turn(self, ticket: Ticket, waiting: Callable[[], None]) -> tuple[Engine, Slot]:
        # Nobody is pushed out: only the youngest can find the queue full, not a retry that keeps its place.
        if len(self._waiting) > self._most_waiting and ticket is self._waiting[-1]:
            self._leave(ticket)
            waiting_now = (
                f"{self._most_waiting} requests are waiting already"
                if self._most_waiting
                else "no slot is free"
            )
            raise GatewayError(Code.QUEUE_FULL, f"The gateway is full: {waiting_now}; try again later.")
        waiting()
        try:
            with trio.move_on_at(ticket.deadline):
                await ticket.called.wait()
        except trio.Cancelled:
            # The client has left. A slot granted in the same tick passes on.
            if ticket.seat is not None:
                self.give_back(*ticket.seat)
                ticket.seat = None
            raise
        finally:
            self._leave(ticket)
        if ticket.refusal is not None:
            raise ticket.refusal
        if ticket.seat is None:
            raise GatewayError(
                Code.QUEUE_TIMEOUT, f"No slot became free within {self._queue_seconds:g} s; try again later."
            )
        seat, ticket.seat = ticket.seat, None
        return seat

    def _enqueue(self, ticket: Ticket) -> None:
        ticket.called = trio.Event()
        insort(self._waiting, ticket, key=lambda waiting: waiting.number)

    def _leave(self, ticket: Ticket) -> None:
        """Take a ticket out of the queue, and let those go whom it held up."""
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            self._grant()

    def _grant(self) -> None:
        """Grant every ticket that can go now, oldest first."""
        spoken_for: set[Engine] = set()
        granted = []
        for ticket in self._waiting:
            engine = _choose(ticket, spoken_for)
            if engine is None:
                spoken_for.update(ticket.engines)
                continue
            ticket.seat = (engine, engine.ledger.grant(ticket.cost))
            ticket.called.set()
            granted.append(ticket)
        for ticket in granted:
            self._waiting.remove(ticket)


def _choose(ticket: Ticket, spoken_for: set[Engine]) -> Engine | None:
    """Return the engine with the fewest running that can take the ticket now."""
    able = [
        engine for engine in ticket.engines if engine not in spoken_for and engine.ledger.free >= ticket.cost
    ]
    return min(able, key=lambda engine: engine.ledger.running, default=None)


def _draining() -> GatewayError:
    return GatewayError(Code.DRAINING, "The gateway is shutting down; try again.")
