"""What is to be done for one inference request, across its tries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import trio

from gateway.attempt import Attempt
from gateway.dialect import Route
from gateway.engine import Engine
from gateway.errors import EngineError, RefusedError
from gateway.gateway import Gateway
from gateway.ledger import Slot
from gateway.request import Request
from gateway.tickets import Ticket

TOO_MANY = 429
"""The most useful of engines' errors: it says that it is worth coming back."""


@dataclass(frozen=True, slots=True)
class _Failure:
    error: EngineError
    engine: str | None
    model: str | None


def _usefulness(error: EngineError) -> tuple[bool, bool, int]:
    """Rank failures: an engine's own answer, of these a 429; then the gateway's with the most to say."""
    if isinstance(error, RefusedError):
        return True, error.answer[0] == TOO_MANY, 0
    return False, False, error.status  # 504 and 502 say more than 503, that there was nobody.


@dataclass(slots=True)
class Work:
    """What the reader needs of one inference request. ``fields`` are its body's, as they stand there.

    ``at`` is the engine that has granted a slot, and that slot; ``goes_on`` says that another will be.
    """

    nursery: trio.Nursery
    request: Request
    gateway: Gateway
    route: Route
    ticket: Ticket
    body: bytes
    fields: Sequence[tuple[str, msgspec.Raw]]
    at: tuple[Engine, Slot] | None = None
    goes_on: bool = False
    failures: list[_Failure] = field(default_factory=list)

    def note(self, error: EngineError) -> None:
        """A try has failed; where, is what the record says if nothing better comes of the others."""
        self.failures.append(_Failure(error, self.request.engine, self.request.served_model))

    def has_better(self, status: int) -> bool:
        """Whether an engine before has given a more useful error answer than one with ``status``."""
        refused = (each.error for each in self.failures if isinstance(each.error, RefusedError))
        return status != TOO_MANY and any(error.answer[0] == TOO_MANY for error in refused)

    def most_useful(self) -> EngineError:
        """Choose the failure that its client is told, and have the record name its engine."""
        best = max(self.failures, key=lambda each: _usefulness(each.error))
        self.request.engine, self.request.served_model = best.engine, best.model
        return best.error

    def goes_elsewhere(self) -> bool:
        """Whether another engine is to be tried, after the last one has failed."""
        if self.at is not None and not self.goes_on:
            self.goes_on = self.gateway.goes_elsewhere(self.request, self.ticket, self.at[0])
        return self.goes_on

    def attempt(self) -> Attempt:
        """Begin to call the engine, on the slot of it that it is ``at``."""
        assert self.at is not None
        engine, slot = self.at
        request, model = self.request, self.ticket.model
        request.dispatched(engine.name, model)
        return Attempt(
            request,
            self.gateway.reclaimers[engine],
            slot,
            self.fields,
            self.gateway.config.usage.ask_engine,
            model,
        )

    def failed(self, error: Exception, *, begun: bool) -> None:
        """It has ended with ``error``: the engine may be to blame. ``begun``: it had begun to answer."""
        tries = self.request.tries
        if self.at is not None and isinstance(error, EngineError) and tries and tries[-1].error is None:
            tries[-1].error = error.code
        if self.at is not None and isinstance(error, EngineError) and error.blames and not error.stale:
            engine, slot = self.at
            reason = error.detail or error.message
            engine.health.failed(slot, trio.current_time(), reason, absent=error.absent, begun=begun)

    def over(self, *, committed: bool) -> None:
        """The try is over; a trial that has said nothing of its engine is free for the next request."""
        self.request.upstream_closed()
        if committed:
            self.gateway.settle(self.request)
        if self.at is not None:
            engine, slot = self.at
            engine.health.neutral(slot)

    def forget_body(self) -> None:
        """The request is committed: its body isn't needed any more."""
        self.body, self.fields = b"", ()
