"""A request's place in the queue, and the engines it may go to, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from gateway.balance import Pick, View, least_loaded
from gateway.engine import Engine
from gateway.errors import Code, GatewayError
from gateway.fairness import CLASSES
from gateway.lanes import Share, Waiter
from gateway.ledger import Slot


@dataclass(frozen=True, slots=True)
class Stage:
    """Some engines, any of which may serve a request, and under which name they have its model.

    ``model`` is None where that is what the client wrote.
    """

    engines: tuple[Engine, ...]
    model: str | None = None


@dataclass(eq=False, slots=True, kw_only=True)
class Ticket(Waiter):
    """A request's place: besides what a waiter is, the ``stages`` it may go through.

    It is kept across retries, and with it the place and the ``deadline`` (Trio's clock), which
    may be ``hurried`` by its client. ``tokens`` is what it may need of an engine's KV cache, for its
    prompt (an estimate) and for its answers. ``engines`` are those that it waits for now, ``pick`` chooses
    among them, and ``answered`` is told of the one that has begun to answer. ``where`` makes the stages
    anew when engines or routes have changed.
    """

    stages: Sequence[Stage]
    engines: Sequence[Engine] = ()
    model: str | None = None
    tried: list[Engine] = field(default_factory=list)
    pick: Pick = least_loaded
    answered: Callable[[Engine], None] | None = None
    where: Callable[[], Sequence[Stage]] | None = None
    deadline: float
    came: float
    tokens: tuple[int, int] = (0, 0)
    inputs: int = 1
    hurried: bool = False
    seat: tuple[Engine, Slot] | None = None
    refusal: GatewayError | None = None
    called: trio.Event = field(default_factory=trio.Event)

    def next_stage(self, now: float, *, trial: bool = True) -> Stage | None:
        """Return where it may go from here: the first stage with an engine that is up, or else with any.

        Up are those that are well, and, with ``trial``, one that waits for a request to be tried with.

        What was tried isn't tried again, and what couldn't hold it isn't waited for.
        """
        first: Stage | None = None
        for each in self.stages:
            if left := self._left_of(each):
                stage = Stage(left, each.model)
                if any(_is_up(engine, now, trial=trial) for engine in left):
                    return stage
                first = first or stage
        return first

    def _left_of(self, stage: Stage) -> tuple[Engine, ...]:
        return tuple([each for each in stage.engines if each not in self.tried and self.fits(each)])

    def replan(self, now: float) -> Stage | None:
        """Engines or routes have changed: make the stages anew, and return where it may go from here."""
        if self.where is not None:
            self.stages = self.where()
        return self.next_stage(now)

    @property
    def may_be_held(self) -> bool:
        """Whether its tenant may have so many slots at all."""
        return not self.share.slots or self.cost <= self.share.slots

    def fits(self, engine: Engine) -> bool:
        """Whether an engine is in use and could ever hold it."""
        return engine.in_use and engine.could_hold(self.cost, sum(self.tokens))

    def moves_to(self, stage: Stage) -> bool:
        """Whether that is somewhere else than where it waits."""
        return stage.engines != self.engines or stage.model != self.model

    def go(self, stage: Stage) -> None:
        """Wait for the engines of ``stage`` from now on."""
        self.engines, self.model = stage.engines, stage.model
        self.lane = tuple([engine.name for engine in stage.engines])

    def choose(self, kept: set[Engine], now: float) -> Engine | None:
        """Choose an engine that can take it now; not one that is ``kept`` for others.

        Engines that are down are left out, unless all are: then they are as good as any.
        """
        takes = [engine for engine in self.engines if engine.in_use and engine.health.takes(now)]
        if not takes and not any(engine.health.rests(now) for engine in self.engines):
            takes = [each for each in self.engines if each.in_use and each.health.takes_in_panic(now)]
        tokens = sum(self.tokens)
        able = [each for each in takes if each not in kept and each.ledger.fits(self.cost, tokens)]
        if len(able) < 2:
            return able[0] if able else None
        views = {each.name: each for each in able}
        return views[self.pick([view_of(each) for each in able]).name]


def who_waits(tickets: Iterable[Ticket], now: float) -> dict[str, dict[str, Any]]:
    """Describe those who wait for the control plane: by the class in which they do, and by tenant."""
    tenants: dict[str, dict[str, Any]] = {}
    classes = dict.fromkeys(CLASSES, 0)
    for ticket in tickets:
        classes[CLASSES[ticket.level]] += 1
        share = ticket.share
        seen = tenants.setdefault(
            share.name, {"waiting": len(share.waiters), "held": share.held, "longest_seconds": 0.0}
        )
        seen["longest_seconds"] = max(seen["longest_seconds"], round(now - ticket.came, 3))
    return {"classes": classes, "tenants": tenants}


def view_of(engine: Engine) -> View:
    """Take a snapshot of an engine for choosing."""
    ledger, load = engine.ledger, engine.load
    return View(
        engine.name,
        ledger.slots,
        ledger.held,
        load.waiting if load is not None else 0,
        (load.kv_use or 0.0) if load is not None else 0.0,
        engine.last_granted,
    )


def fitting(stages: Sequence[Stage], cost: int, tokens: int) -> list[Stage]:
    """Return of ``stages`` the engines that a request could ever fit."""
    found = [
        Stage(tuple([each for each in stage.engines if each.could_hold(cost, tokens)]), stage.model)
        for stage in stages
    ]
    return [stage for stage in found if stage.engines]


def fitting_or_refused(stages: Sequence[Stage], cost: int, tokens: int, share: Share) -> list[Stage]:
    """Return of ``stages`` the engines that a request of ``share`` could ever fit.

    Raises GatewayError ``invalid_request`` if there are none, or its tenant may never hold so much.
    """
    engines = [engine for stage in stages for engine in stage.engines]
    largest = max([engine.settings.slots for engine in engines])
    most = min(largest, share.slots or largest)
    if cost > most:
        whose = "the largest engine for it holds" if most == largest else "its tenant may hold"
        raise GatewayError(
            Code.INVALID_REQUEST,
            f"The request makes {cost} sequences at once; {whose} {most}.",
            param="n",
        )
    fits = fitting(stages, cost, tokens)
    if not fits:
        raise GatewayError(
            Code.INVALID_REQUEST,
            f"The request may need {tokens} tokens, prompt and answer together; the"
            f" largest engine for it holds {max(engine.settings.kv_tokens for engine in engines)}.",
            param="max_tokens",
        )
    return fits


def no_engine() -> GatewayError:
    """Say that no engine is left."""
    what = "Every engine for this model is kept free by an operator, or gone; try again later."
    return GatewayError(Code.NO_ENGINE, what)


def draining() -> GatewayError:
    """Say that nobody is admitted any more."""
    return GatewayError(Code.DRAINING, "The gateway is shutting down; try again.")


def why_nowhere(ticket: Ticket) -> GatewayError:
    """Say why a request that waited, or was to be tried again, can't go anywhere any more."""
    engines = [engine for stage in ticket.stages for engine in stage.engines if engine.in_use]
    if ticket.may_be_held and (not engines or any(map(ticket.fits, engines))):
        return no_engine()
    what = f"{ticket.cost} sequences and {sum(ticket.tokens)} tokens"
    return GatewayError(
        Code.INVALID_REQUEST,
        f"There is no room for {what} any more: an engine or a limit has become smaller.",
    )


def _is_up(engine: Engine, now: float, *, trial: bool) -> bool:
    health = engine.health
    return (health.takes(now) and (trial or not health.ejected)) or health.rests(now)
