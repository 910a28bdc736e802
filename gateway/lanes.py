"""One lane of the queue: those who wait for the same engines, in the order in which they go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import islice


@dataclass(eq=False, slots=True)
class Share:
    """A tenant, as the queue knows it.

    ``priority`` is the number of its class, ``slots`` how many it may hold, ``queue`` how many of
    its requests may wait; 0: any. ``virtual`` is the virtual time at which its next request
    starts, ``held`` counts its slots, those being reclaimed and ghosts' too.
    """

    name: str
    weight: float = 1.0
    priority: int = 1
    slots: int = 0
    queue: int = 0
    virtual: float = 0.0
    held: int = 0
    waiters: OrderedDict[int, Waiter] = field(default_factory=OrderedDict)
    parked: set[tuple[Lane, int]] = field(default_factory=set)

    def __repr__(self) -> str:
        return f"<Share {self.name} {self.held} held, {len(self.waiters)} waiting>"

    @property
    def newest(self) -> Waiter:
        """Its waiter that came last."""
        return self.waiters[next(reversed(self.waiters))]

    def add(self, waiter: Waiter) -> None:
        """Have one more wait; one that has waited before keeps its place."""
        _put_in_order(self.waiters, waiter)

    def may_hold(self, cost: int) -> bool:
        """Whether it may hold so many more slots."""
        return not self.slots or self.held + cost <= self.slots

    def unpark(self) -> None:
        """It holds fewer slots: have it looked at again."""
        parked, self.parked = self.parked, set()
        for lane, level in parked:
            lane.enter(self, level)


@dataclass(eq=False, slots=True)
class Waiter:
    """A request: its place in the order of arrival, whose it is, for which engines, its cost in slots.

    ``level`` is the class that it waits in and ``since`` when it came there; ``returns``: it was
    seated before. ``seated`` is when its slots were granted, ``charged`` how many seconds of them
    have been counted.
    """

    number: int
    share: Share
    lane: Hashable
    cost: int
    level: int = 0
    since: float = 0.0
    queued: bool = False
    returns: bool = False
    seated: float = 0.0
    charged: float = 0.0


def _put_in_order(waiters: OrderedDict[int, Waiter], waiter: Waiter) -> None:
    """Put one among those that are in the order of their numbers: mostly it is the last."""
    number = waiter.number
    returns = bool(waiters) and number < next(reversed(waiters))
    waiters[number] = waiter
    if returns:
        waiters.move_to_end(number, last=False)
        if number > next(islice(waiters, 1, None)):
            for other in sorted(waiters):
                waiters.move_to_end(other)


Head = tuple[int, float, int, Waiter]
"""Who goes first in a lane: by class (below the highest first), virtual time, arrival."""


class Lane:
    """Waiters for the same engines. ``number`` orders lanes where nothing else does."""

    def __init__(self, levels: int, number: int) -> None:
        self._number = number
        self._waiting: list[dict[Share, OrderedDict[int, Waiter]]] = [{} for _ in range(levels)]
        self._heaps: list[list[tuple[float, int, Share]]] = [[] for _ in range(levels)]
        self._entered: list[dict[Share, tuple[float, int]]] = [{} for _ in range(levels)]
        self._ties = 0

    def __lt__(self, other: Lane) -> bool:
        return self._number < other._number

    def add(self, waiter: Waiter) -> None:
        """Have one wait in its class."""
        waiting = self._waiting[waiter.level].setdefault(waiter.share, OrderedDict())
        _put_in_order(waiting, waiter)
        if waiter.share not in self._entered[waiter.level]:
            self.enter(waiter.share, waiter.level)

    def remove(self, waiter: Waiter) -> None:
        """Take one out."""
        waiting = self._waiting[waiter.level]
        waiting[waiter.share].pop(waiter.number)
        if not waiting[waiter.share]:
            del waiting[waiter.share]
            self._entered[waiter.level].pop(waiter.share, None)

    def enter(self, share: Share, level: int) -> None:
        """Have a share considered in a class, if it has somebody there."""
        if share in self._waiting[level]:
            self._ties += 1
            self._entered[level][share] = (share.virtual, self._ties)
            heappush(self._heaps[level], (share.virtual, self._ties, share))

    def refresh(self, share: Share) -> None:
        """A share's virtual time has gone back: what stands in the heaps would keep it behind."""
        for level, entered in enumerate(self._entered):
            if share in entered:
                self.enter(share, level)

    def head(self) -> Head | None:
        """Return who goes first, of those whose tenants may hold what they ask for."""
        for level in reversed(range(len(self._heaps))):
            heap, entered = self._heaps[level], self._entered[level]
            while heap:
                virtual, tie, share = heap[0]
                if entered.get(share) != (virtual, tie):
                    heappop(heap)  # It has another entry, or nobody waits any more.
                    continue
                if share.virtual != virtual:
                    entered[share] = (share.virtual, tie)
                    heapreplace(heap, (share.virtual, tie, share))
                    continue
                waiting = self._waiting[level][share]
                waiter = waiting[next(iter(waiting))]
                if share.may_hold(waiter.cost):
                    return (-level, virtual, waiter.number, waiter)
                heappop(heap)
                del entered[share]
                share.parked.add((self, level))
        return None
