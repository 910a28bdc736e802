"""One lane of the queue: those who wait for the same engines, in the order in which they go."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import islice


@dataclass(eq=False, slots=True)
class Share:
    """A tenant, as the queue knows it.

    ``priority`` is the number of its class, ``slots`` how many it may hold, ``queue`` how many of
    its requests may wait; 0: any. ``held`` counts its slots, those being reclaimed and ghosts' too.
    """

    name: str
    weight: float = 1.0
    priority: int = 1
    slots: int = 0
    queue: int = 0
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
    have been counted, and ``ran`` the lane that it came from.
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
    ran: Hashable = None


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


class Pool:
    """Engines that have lanes in common. What one pool gives says nothing of what is due in another.

    ``virtual`` is, for each tenant, the virtual time at which its next request starts; ``clock``, by
    class, when what was served last has started.
    """

    def __init__(self, levels: int) -> None:
        self.clock = [0.0] * levels
        self.virtual: dict[Share, float] = {}
        self._waiting: Counter[Share] = Counter()

    def waits(self, share: Share, more: int) -> None:
        """So many more of a tenant wait."""
        self._waiting[share] += more
        if not self._waiting[share]:
            del self._waiting[share]

    def lift(self, share: Share) -> None:
        """One more of a tenant comes: it has saved up nothing while none of it waited."""
        if share not in self._waiting:
            self.virtual[share] = max(self.virtual.get(share, 0.0), self.clock[share.priority])

    def take_over(self, other: Pool) -> None:
        """A lane connects both: from now on they are one, and what was served last in each was so at once."""
        ahead = max(self.clock) - max(other.clock)
        self.clock = [max(ours, theirs + ahead) for ours, theirs in zip(self.clock, other.clock, strict=True)]
        for share, virtual in other.virtual.items():
            self.virtual[share] = max(self.virtual.get(share, 0.0), virtual + ahead)
        self._waiting.update(other._waiting)


Head = tuple[int, float, int, Waiter]
"""Who goes first in a lane: by class (below the highest first), virtual time, arrival."""


class Lane:
    """Waiters for the same engines. ``number`` orders lanes where nothing else does."""

    def __init__(self, levels: int, number: int, pool: Pool) -> None:
        self._number = number
        self.pool = pool
        self._waiting: list[dict[Share, OrderedDict[int, Waiter]]] = [{} for _ in range(levels)]
        self._heaps: list[list[tuple[float, int, Share]]] = [[] for _ in range(levels)]
        self._entered: list[dict[Share, tuple[float, int]]] = [{} for _ in range(levels)]
        self._ties = 0

    def __lt__(self, other: Lane) -> bool:
        return self._number < other._number

    def add(self, waiter: Waiter) -> None:
        """Have one wait in its class."""
        self.pool.lift(waiter.share)
        self.pool.waits(waiter.share, 1)
        waiting = self._waiting[waiter.level].setdefault(waiter.share, OrderedDict())
        _put_in_order(waiting, waiter)
        if waiter.share not in self._entered[waiter.level]:
            self.enter(waiter.share, waiter.level)

    def add_all(self, waiters: Iterable[Waiter]) -> None:
        """Have many wait, who have waited elsewhere: each finds its place, and they are sorted once."""
        touched = set()
        for waiter in waiters:
            share, level = waiter.share, waiter.level
            self.pool.lift(share)
            self.pool.waits(share, 1)
            self._waiting[level].setdefault(share, OrderedDict())[waiter.number] = waiter
            touched.add((share, level))
        for share, level in touched:
            waiting = self._waiting[level][share]
            ordered = sorted(waiting.items())
            waiting.clear()
            waiting.update(ordered)
            if share not in self._entered[level]:
                self.enter(share, level)

    def remove(self, waiter: Waiter) -> None:
        """Take one out."""
        self.pool.waits(waiter.share, -1)
        share, level = waiter.share, waiter.level
        waiting = self._waiting[level]
        waiting[share].pop(waiter.number)
        if not waiting[share]:
            del waiting[share]
            self._entered[level].pop(share, None)
        elif share not in self._entered[level]:
            # It was parked for the sake of its first one, who may be the one that leaves.
            self.enter(share, level)

    def enter(self, share: Share, level: int) -> None:
        """Have a share considered in a class, if it has somebody there."""
        if share in self._waiting[level]:
            self._ties += 1
            virtual = self.pool.virtual[share]
            self._entered[level][share] = (virtual, self._ties)
            heappush(self._heaps[level], (virtual, self._ties, share))

    def refresh(self, share: Share) -> None:
        """A share's virtual time has gone back: what stands in the heaps would keep it behind."""
        for level, entered in enumerate(self._entered):
            if share in entered:
                self.enter(share, level)

    @property
    def empty(self) -> bool:
        """Whether nobody waits."""
        return not any(self._waiting)

    def join(self, pool: Pool) -> None:
        """Its pool has become a part of another."""
        self.pool = pool
        for entered in self._entered:
            for share in tuple(entered):
                self.refresh(share)

    def head(self) -> Head | None:
        """Return who goes first, of those whose tenants may hold what they ask for."""
        for level in reversed(range(len(self._heaps))):
            heap, entered = self._heaps[level], self._entered[level]
            while heap:
                virtual, tie, share = heap[0]
                if entered.get(share) != (virtual, tie):
                    heappop(heap)  # It has another entry, or nobody waits any more.
                    continue
                if (now := self.pool.virtual[share]) != virtual:
                    entered[share] = (now, tie)
                    heapreplace(heap, (now, tie, share))
                    continue
                waiting = self._waiting[level][share]
                waiter = waiting[next(iter(waiting))]
                if share.may_hold(waiter.cost):
                    return (-level, virtual, waiter.number, waiter)
                heappop(heap)
                del entered[share]
                share.parked.add((self, level))
        return None


@dataclass(slots=True)
class Crowds:
    """The shares by how many of them wait, so that the largest is known without looking at all."""

    _by_size: dict[int, OrderedDict[Share, None]] = field(default_factory=dict)
    _largest: int = 0

    def __iter__(self) -> Iterator[Share]:
        for shares in tuple(self._by_size.values()):
            yield from shares

    def grown(self, share: Share) -> None:
        """One more of ``share`` waits."""
        size = len(share.waiters)
        self._move(share, size - 1, size)
        self._largest = max(self._largest, size)

    def shrunk(self, share: Share) -> None:
        """One fewer of ``share`` waits."""
        size = len(share.waiters)
        self._move(share, size + 1, size)
        if not self._by_size.get(self._largest):
            self._largest -= 1

    def largest(self, preferred: Share) -> Share:
        """Return the share with most waiting; ``preferred`` if it is one of them."""
        shares = self._by_size[self._largest]
        return preferred if preferred in shares else next(iter(shares))

    def _move(self, share: Share, before: int, after: int) -> None:
        if before:
            shares = self._by_size[before]
            del shares[share]
            if not shares:
                del self._by_size[before]
        if after:
            self._by_size.setdefault(after, OrderedDict())[share] = None
