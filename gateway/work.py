"""What is to be done for one inference request, across its tries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import trio

from gateway.attempt import Attempt
from gateway.dialect import Route
from gateway.engine import Engine
from gateway.errors import EngineError
from gateway.gateway import Gateway
from gateway.ledger import Slot
from gateway.request import Request
from gateway.tickets import Ticket


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
        if self.at is not None and isinstance(error, EngineError) and error.blames and not error.stale:
            engine, slot = self.at
            engine.health.failed(slot, trio.current_time(), error.message, absent=error.absent, begun=begun)

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
