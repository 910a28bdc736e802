"""Work that an engine goes on with for nobody, past the time it has for stopping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import structlog
import trio

from gateway.engine import Engine
from gateway.evidence import Look, Suspect
from gateway.ledger import Slot
from gateway.words import ReclaimedBy

log = structlog.get_logger("gateway.reclaim")


@dataclass(eq=False, slots=True, kw_only=True)
class Reclaim(Suspect):
    """A request's end on an engine, from our close (Trio's clock) to what became of its slot.

    ``sequences`` is how many the engine may count for it. ``slot`` is None once it is given back;
    ``seconds`` is how long that took or would have taken; ``by`` is None until it is known.
    """

    sequences: int = 1
    slot: Slot | None = None
    seconds: float | None = None
    by: ReclaimedBy | None = None
    bound: float = inf


class Ghosts:
    """The ghosts of one engine. ``free`` gives back the slot of one that has ended."""

    def __init__(self, engine: Engine, free: Callable[[Reclaim], None]) -> None:
        self._engine = engine
        self._free = free
        self._ghosts: list[Reclaim] = []
        self._seconds = 0.0
        self._idle_since = inf

    def __bool__(self) -> bool:
        return bool(self._ghosts)

    @property
    def sequences(self) -> int:
        """How many there are."""
        return sum(each.cost for each in self._ghosts)

    @property
    def seconds(self) -> float:
        """Seconds that slots were theirs."""
        now = trio.current_time()
        return self._seconds + sum((now - each.bound) * each.cost for each in self._ghosts)

    @property
    def seem_gone(self) -> bool:
        """Whether the last look found the engine without them."""
        return self._idle_since < inf

    def may_have(self, reclaim: Reclaim) -> bool:
        """Whether one more may keep its slots: beside other ghosts', one slot is left to work with."""
        if reclaim.slot is None or not reclaim.said_busy:
            return False
        return not self._ghosts or self.sequences + reclaim.cost < self._engine.ledger.slots

    def add(self, reclaim: Reclaim) -> None:
        """Have a reclaim whose time is over become one."""
        assert reclaim.slot is not None
        if not self._ghosts:
            log.warning(
                "the engine goes on with a request that nobody waits for; it keeps its slot until the engine"
                " is idle or started anew",
                engine=self._engine.name,
                after_seconds=self._engine.settings.reclaim_seconds,
            )
        self._engine.ledger.haunt(reclaim.slot)
        self._ghosts.append(reclaim)
        self._idle_since = inf

    def consider(self, look: Look, confirm: float) -> None:
        """End them if the engine has been seen without them twice, ``confirm`` seconds apart."""
        if look.void:
            return  # It says nothing.
        if look.strangers:
            self._idle_since = inf
        elif look.others:
            return  # Perhaps they are our own youngest requests.
        elif look.asked - self._idle_since >= confirm:
            self.end()
        else:
            self._idle_since = min(self._idle_since, look.answered)

    def end(self) -> None:
        """Give their slots back: the engine has none of them any more, or can't be believed."""
        if not self._ghosts:
            return
        log.info("the ghosts' slots are free", engine=self._engine.name, sequences=self.sequences)
        self._seconds = self.seconds
        ended, self._ghosts = self._ghosts, []
        for each in ended:
            self._free(each)
