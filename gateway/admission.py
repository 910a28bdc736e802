"""Who may call an engine now, who waits, who is refused.

Granting is one synchronous step: whoever frees a slot grants the next ticket in
the same step, so that no instant exists at which a slot is free while somebody
admissible waits. Who is next is :mod:`gateway.fairness`'s to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import count
from math import inf
from typing import Any

import trio

from gateway.engine import Engine
from gateway.errors import Code, GatewayError
from gateway.fairness import Queue
from gateway.lanes import Share
from gateway.ledger import Slot
from gateway.tickets import Stage, Ticket, draining, fitting_or_refused, no_engine, who_waits, why_nowhere


class Admission:
    """Grants slots of all engines and keeps the one queue in front of them.

    ``queue`` and ``queue_seconds`` are how many may wait and how long; who has waited
    ``promote_seconds`` is a class of priority up.
    """

    def __init__(self, *, queue: int, queue_seconds: float, promote_seconds: float = 0.0) -> None:
        self.queue = Queue(most=queue, promote_seconds=promote_seconds)
        self._queue_seconds = queue_seconds
        self._numbers = count()
        self._granted: dict[Slot, Ticket] = {}
        self._everybody = Share("")
        self._closed = False

    def apply(self, *, queue: int, queue_seconds: float, promote_seconds: float) -> None:
        """Have other bounds from now on, for those who come."""
        self._queue_seconds = queue_seconds
        self.queue.apply(most=queue, promote_seconds=promote_seconds)

    def __repr__(self) -> str:
        return f"<Admission {self.waiting} of {self.queue.most} waiting>"

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self.queue)

    def view(self) -> dict[str, Any]:
        """Describe the queue for the control plane: by tenant, and by the class in which they wait."""
        said, hold = who_waits(self.tickets(), trio.current_time()), round(self.queue.estimate, 3)
        return {"waiting": self.waiting, "most": self.queue.most, **said, "typical_hold": hold}

    def ticket(
        self,
        stages: Sequence[Stage],
        cost: int,
        *,
        tokens: tuple[int, int] = (0, 0),
        inputs: int = 1,
        share: Share | None = None,
        timeout: float = inf,
    ) -> Ticket:
        """Make a ticket for a request of ``cost`` slots that may go to the engines of ``stages``.

        ``tokens`` is what it may need of an engine's KV cache, where that is counted, for its prompt and for
        its answers; ``inputs`` is how many sequences the engine may count for it at most. ``share`` is its
        tenant's, ``timeout`` how long its client waits for the beginning of an answer, in seconds. Raises
        GatewayError ``invalid_request`` if it could never fit.
        """
        share = share or self._everybody
        fits = fitting_or_refused(stages, cost, sum(tokens), share)
        now = trio.current_time()
        ticket = Ticket(
            next(self._numbers),
            share,
            (),
            cost,
            tokens=tokens,
            inputs=inputs,
            stages=fits,
            came=now,
            deadline=now + min(self._queue_seconds, timeout),
            hurried=timeout < self._queue_seconds,
        )
        if (stage := ticket.next_stage(now)) is None:
            raise no_engine()
        ticket.go(stage)
        return ticket

    def slot(
        self, ticket: Ticket, *, waiting: Callable[[], None]
    ) -> AbstractAsyncContextManager[tuple[Engine, Slot]]:
        """Hold a slot: enter with it and the engine that granted it, give it back on leaving.

        One that has been handed over meanwhile is its new owner's to give back. ``waiting`` is
        called if the request has to queue. Raises GatewayError ``queue_full``,
        ``queue_timeout`` or ``draining``.
        """
        return _Held(self, ticket, waiting)

    async def seat(self, ticket: Ticket, waiting: Callable[[], None]) -> tuple[Engine, Slot]:
        """Wait for a slot, as :meth:`slot` says; whoever has it is to give it back."""
        return self._at_once(ticket) or await self._in_turn(ticket, waiting)

    def give_back(self, engine: Engine, slot: Slot) -> None:
        """Return a slot, and grant in the same step whoever can go now."""
        engine.ledger.give_back(slot)
        self.queue.release(self._granted.pop(slot), trio.current_time())
        self._grant()

    def prompt_counted(self, ticket: Ticket, engine: Engine, slot: Slot, prompt: int) -> None:
        """The engine has counted the prompt: its cache has another room for others than was thought."""
        engine.ledger.reserve(slot, prompt + ticket.tokens[1])
        self._grant()

    def tickets(self) -> list[Ticket]:
        """Return who waits."""
        return [each for each in self.queue if isinstance(each, Ticket)]

    def wake(self) -> None:
        """Grant whoever can go now: an engine takes requests again, or more of them."""
        self._grant()

    def look_round(self, *, one: bool) -> None:
        """Engines are well again, or not any more: have who waits go where he should.

        ``one``: an engine is on trial. One request is enough for that.
        """
        now, moves = trio.current_time(), list[tuple[Ticket, Stage]]()
        for ticket in self.tickets():
            stage = ticket.next_stage(now, trial=one) if len(ticket.stages) > 1 else None
            if stage is not None and ticket.moves_to(stage):
                moves.append((ticket, stage))
                if one:
                    break
        self._move(moves)

    def replan(self, *, refuse: bool) -> None:
        """The engines or the routes have changed: have everybody who waits look where to go, and grant.

        Who has nowhere to go is refused, or waits on where he is.
        """
        now, moves = trio.current_time(), list[tuple[Ticket, Stage]]()
        for ticket in self.tickets():
            before = ticket.stages
            if (stage := ticket.replan(now)) is not None and ticket.may_be_held:
                if ticket.moves_to(stage):
                    moves.append((ticket, stage))
            elif refuse:
                self.refuse(ticket, why_nowhere(ticket))
            else:
                ticket.stages = before
        self._move(moves)
        self.wake()

    def _move(self, moves: Sequence[tuple[Ticket, Stage]]) -> None:
        with self.queue.moving([ticket for ticket, _ in moves]):
            for ticket, stage in moves:
                ticket.go(stage)

    def close(self) -> None:
        """Refuse everybody who waits and everybody who comes: the gateway is draining."""
        self._closed = True
        for each in self.tickets():
            self.refuse(each, draining())

    def _at_once(self, ticket: Ticket) -> tuple[Engine, Slot] | None:
        if self._closed:
            raise draining()
        now = trio.current_time()
        if not (ticket.may_be_held and all(map(ticket.fits, ticket.engines))):
            # One was removed since the ticket was made, or is smaller than it was.
            if (stage := ticket.replan(now)) is None or not ticket.may_be_held:
                raise why_nowhere(ticket)
            ticket.go(stage)
        elif len(ticket.stages) > 1 and (stage := ticket.next_stage(now)) is not None:
            ticket.go(stage)
        if self.queue.seat_now(ticket, self._seat, now):
            return self._seated(ticket)
        ticket.called = trio.Event()
        self.queue.add(ticket, now)
        self._grant()
        if (surplus := self.queue.surplus(ticket)) is not None:
            self.refuse(surplus, self._full(surplus.share))
            self._grant()  # It may have kept an engine for itself.
        if ticket.refusal is not None:
            raise ticket.refusal
        if ticket.seat is not None:
            return self._seated(ticket)
        self._check_that_it_can_start(ticket)
        return None

    async def _in_turn(self, ticket: Ticket, waiting: Callable[[], None]) -> tuple[Engine, Slot]:
        waiting()
        try:
            with trio.move_on_at(ticket.deadline):
                await ticket.called.wait()
        except trio.Cancelled:
            # The client has left. A slot granted in the same tick passes on.
            if ticket.seat is not None:
                engine, slot = ticket.seat
                engine.health.neutral(slot)
                self.give_back(engine, slot)
                ticket.seat = None
            raise
        finally:
            self._leave(ticket)
        if ticket.refusal is not None:
            raise ticket.refusal
        if ticket.seat is None:
            wait, what = math.ceil(self._expected(ticket)), "No slot became free in time; try again later."
            raise GatewayError(Code.QUEUE_TIMEOUT, what, retry_after=wait)
        return self._seated(ticket)

    def _seated(self, ticket: Ticket) -> tuple[Engine, Slot]:
        seat, ticket.seat = ticket.seat, None
        assert seat is not None
        return seat

    def _leave(self, ticket: Ticket) -> None:
        """Take a ticket out of the queue, and let those go whom it held up."""
        if ticket.queued:
            self.queue.remove(ticket)
            self._grant()

    def refuse(self, ticket: Any, refusal: GatewayError) -> None:
        """Have one wait no longer."""
        self.queue.remove(ticket)
        ticket.refusal = refusal
        ticket.called.set()

    def _full(self, share: Share) -> GatewayError:
        if share.queue and len(share.waiters) > share.queue:
            waiting_now = f"there is room for {share.queue} of your key's tenant to wait"
        elif self.queue.most:
            waiting_now = f"there is room for {self.queue.most} to wait"
        else:
            waiting_now = "no slot is free"
        return GatewayError(Code.QUEUE_FULL, f"The gateway is full: {waiting_now}; try again later.")

    def _check_that_it_can_start(self, ticket: Ticket) -> None:
        """Refuse at once what would still wait when its client has stopped waiting."""
        if not ticket.hurried:
            return
        left = ticket.deadline - trio.current_time()
        expected = self._expected(ticket)
        if expected > left:
            self._leave(ticket)
            raise GatewayError(
                Code.QUEUE_TIMEOUT,
                f"A slot is expected to be free in {expected:.1f} s, and the client waits for {left:.1f} s.",
                retry_after=math.ceil(expected),
            )

    def _expected(self, ticket: Ticket) -> float:
        """Estimate in how many seconds another request like this one could start."""
        slots = sum(engine.ledger.slots for engine in ticket.engines)
        return self.queue.expected_wait(ticket.share, slots)

    def _grant(self) -> None:
        for ticket in self.queue.grant(self._seat, trio.current_time()):
            assert isinstance(ticket, Ticket)
            ticket.called.set()

    def _seat(self, ticket: Ticket, kept: set[Engine]) -> bool:
        now = trio.current_time()
        engine = ticket.choose(kept, now)
        if engine is None:
            kept.update(ticket.engines)
            return False
        slot = engine.ledger.grant(ticket.cost, sum(ticket.tokens))
        slot.sequences = ticket.inputs
        engine.granted(slot, now)
        self._granted[slot] = ticket
        ticket.seat = engine, slot
        return True


class _Held:
    """A slot, from its grant to its return."""

    def __init__(self, admission: Admission, ticket: Ticket, waiting: Callable[[], None]) -> None:
        self._admission, self._wanted = admission, (ticket, waiting)

    async def __aenter__(self) -> tuple[Engine, Slot]:
        self._engine, self._slot = seat = await self._admission.seat(*self._wanted)
        return seat

    async def __aexit__(self, *_: object) -> None:
        if self._engine.ledger.runs(self._slot):
            self._admission.give_back(self._engine, self._slot)
