"""Who goes next: strict priority between classes, weighted fair between tenants within one.

Pure and synchronous; ``now`` is an argument. What is shared out fairly is service received, in
slot-seconds over a tenant's weight. It is start-time fair queuing (Goyal, Vin and Cheng, 1996): a
tenant's next request starts, in virtual time, where its last one ended, but not before what was
served last has started, so that nobody saves up while he asks for nothing. Engines that no request
may choose between are told apart: each such pool has its own virtual time. What a request will
take is estimated when it is granted, counted on while it runs and corrected when its slot is
free again, whatever the engine did with it until then: an abort storm costs the tenant that makes
it.

Requests that may go to the same engines share a lane. Within a tenant it is first come first
served. A request that is next but doesn't fit keeps its engines for itself: small ones don't pass
a large one for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

from gateway.lanes import Crowds, Lane, Pool, Share, Waiter

FIRST_ESTIMATE = 1.0
"""Seconds that a slot is taken to be held while nothing is known."""

_ESTIMATE_WEIGHT = 1 / 16
"""How much the latest request counts in the estimate; of the first ones it is their mean."""

_TYPICAL_WEIGHT = 1 / 8
_SHORTEST = 0.001

_ACCRUE_SECONDS = 1.0
"""How often what still runs is counted."""

CLASSES = ("low", "normal", "high")
"""The classes of priority; the last one is served first."""

Seat = Callable[[Any, set[Any]], Any]


class Queue:
    """The waiters. ``most`` of them may wait; who has waited ``promote_seconds`` is a class up (0: never)."""

    def __init__(self, *, most: int, promote_seconds: float) -> None:
        self.most = most
        self.estimate = FIRST_ESTIMATE
        """Seconds that a slot is taken to be held, from recent requests."""
        self._promote_seconds = promote_seconds or inf
        self._lanes: dict[Hashable, Lane] = {}
        self._arrived: list[deque[Waiter]] = [deque() for _ in CLASSES]
        self._crowds = Crowds()
        self._running: set[Waiter] = set()
        self._typical = FIRST_ESTIMATE
        """The same, for what is charged in advance: as a geometric mean, which forgets long ones soon."""
        self._pools: dict[Hashable, Pool] = {}
        self._lanes_made = 0
        self._accrued = -inf
        self._released = self._size = 0

    def apply(self, *, most: int, promote_seconds: float) -> None:
        """Have other bounds from now on."""
        self.most = most
        self._promote_seconds = promote_seconds or inf

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Waiter]:
        """Go through all waiters: tenant by tenant, each one's in order."""
        for share in tuple(self._crowds):
            yield from tuple(share.waiters.values())

    def add(self, waiter: Waiter, now: float) -> None:
        """Have one wait."""
        share = waiter.share
        if waiter.returns:
            waiter.level = max(waiter.level, share.priority)
            self._arrived[waiter.level].appendleft(waiter)
        else:
            waiter.level, waiter.since = share.priority, now
            self._arrived[waiter.level].append(waiter)
        waiter.queued = True
        share.add(waiter)
        self._crowds.grown(share)
        self._size += 1
        self._lane(waiter).add(waiter)

    def seat_now(self, waiter: Waiter, seat: Seat, now: float) -> bool:
        """Seat one for which there is nobody to wait for; say whether that could be done.

        So it is mostly, and it is the short way of :meth:`add` and :meth:`grant`.
        """
        share = waiter.share
        if self._size or not share.may_hold(waiter.cost) or not seat(waiter, set()):
            return False
        self._pool(waiter.lane).lift(share)
        waiter.level = share.priority
        self._begun(waiter, now)
        return True

    def surplus(self, waiter: Waiter) -> Waiter | None:
        """Return who has to give way for one that waits now, if there are too many; perhaps itself.

        That is the newest one of the tenant with most waiting: nobody can fill the queue for others.
        For one that was seated before and waits again, nobody has to.
        """
        if waiter.returns or not waiter.queued:
            return None
        share = waiter.share
        if share.queue and len(share.waiters) > share.queue:
            return share.newest
        return self._crowds.largest(share).newest if self._size > self.most else None

    def remove(self, waiter: Waiter) -> None:
        """Take one out who leaves or has given way, if it waits."""
        if waiter.queued:
            self._left(waiter)

    @contextmanager
    def moving(self, waiters: Sequence[Waiter]) -> Iterator[None]:
        """The lanes of some that wait are changed meanwhile; their places in the order stay."""
        for waiter in waiters:
            lane = self._lane(waiter)
            lane.remove(waiter)
            if lane.empty:
                del self._lanes[waiter.lane]
        yield
        by_lane: dict[Lane, list[Waiter]] = {}
        for waiter in waiters:
            by_lane.setdefault(self._lane(waiter), []).append(waiter)
        for lane, moved in by_lane.items():
            lane.add_all(moved)

    def grant(self, seat: Seat, now: float) -> Iterator[Waiter]:
        """Seat whoever can go now, in turn, and yield each.

        ``seat`` seats a waiter and says whether it did; it is told what is kept for those before
        it, and adds to that what it keeps for one that it can't seat.
        """
        if not self._size:
            return
        self._promote(now)
        self._accrue(now)
        kept: set[Any] = set()
        heads = [(head[:3], lane) for lane in self._lanes.values() if (head := lane.head()) is not None]
        heapify(heads)
        while heads:
            key, lane = heappop(heads)
            head = lane.head()
            if head is None:
                continue
            if head[:3] != key:  # What was granted in another lane has moved a tenant behind.
                heappush(heads, (head[:3], lane))
                continue
            waiter = head[3]
            if not seat(waiter, kept):
                continue
            self._left(waiter)
            self._begun(waiter, now)
            if (head := lane.head()) is not None:
                heappush(heads, (head[:3], lane))
            yield waiter

    def release(self, waiter: Waiter, now: float) -> None:
        """The slots of one that was seated are free again."""
        self._running.discard(waiter)
        share, held = waiter.share, max(0.0, now - waiter.seated)
        self._released += 1
        self.estimate += (held - self.estimate) * max(_ESTIMATE_WEIGHT, 1 / self._released)
        ratio = max(held, _SHORTEST) / self._typical
        self._typical *= ratio ** max(_TYPICAL_WEIGHT, 1 / self._released)
        self._charge(waiter, held - waiter.charged)
        share.held -= waiter.cost
        share.unpark()

    def expected_wait(self, share: Share, slots: int) -> float:
        """Estimate in how many seconds the last one of ``share`` that waits can have one of ``slots``."""
        rivals = {each for each in self._crowds if each.priority >= share.priority} | {share}
        weight = share.weight / sum(each.weight for each in rivals)
        return max(1, len(share.waiters)) * self.estimate / max(slots * weight, 1e-9)

    def _lane(self, waiter: Waiter) -> Lane:
        lane = self._lanes.get(waiter.lane)
        if lane is None:
            self._lanes_made += 1
            lane = self._lanes[waiter.lane] = Lane(len(CLASSES), self._lanes_made, self._pool(waiter.lane))
        return lane

    def _pool(self, lane: Hashable) -> Pool:
        """Return the pool of a lane's engines; a lane with engines of several makes them one."""
        engines = lane if isinstance(lane, tuple) else (lane,)
        if len(engines) == 1 and (only := self._pools.get(engines[0])) is not None:
            return only
        found = list(dict.fromkeys(self._pools[each] for each in engines if each in self._pools))
        if len(found) == 1 and all(each in self._pools for each in engines):
            return found[0]
        pool = found[0] if found else Pool(len(CLASSES))
        for other in found[1:]:
            pool.take_over(other)
            for each in self._lanes.values():
                if each.pool is other:
                    each.join(pool)
            self._pools = {key: pool if each is other else each for key, each in self._pools.items()}
        self._pools.update(dict.fromkeys(engines, pool))
        return pool

    def _left(self, waiter: Waiter) -> None:
        lane = self._lanes[waiter.lane]
        lane.remove(waiter)
        if lane.empty:
            del self._lanes[waiter.lane]
        waiter.queued = False
        waiter.share.waiters.pop(waiter.number)
        self._crowds.shrunk(waiter.share)
        self._size -= 1

    def _begun(self, waiter: Waiter, now: float) -> None:
        share = waiter.share
        waiter.ran, pool = waiter.lane, self._pool(waiter.lane)
        if waiter.level == share.priority:  # Who was promoted brings the time of his own class.
            pool.clock[waiter.level] = max(pool.clock[waiter.level], pool.virtual[share])
        self._running.add(waiter)
        share.held += waiter.cost
        waiter.returns, waiter.seated, waiter.charged = True, now, 0.0
        self._charge(waiter, self._typical)

    def _charge(self, waiter: Waiter, seconds: float) -> None:
        waiter.charged += seconds
        share = waiter.share
        pool = self._pool(waiter.ran)
        pool.virtual[share] += seconds * waiter.cost / share.weight
        if seconds < 0:
            for lane in self._lanes.values():
                if lane.pool is pool:
                    lane.refresh(share)

    def _accrue(self, now: float) -> None:
        """Count what has run for longer than it was taken to."""
        if now - self._accrued < _ACCRUE_SECONDS:
            return
        self._accrued = now
        for waiter in self._running:
            if (more := now - waiter.seated - waiter.charged) > 0:
                self._charge(waiter, more)

    def _promote(self, now: float) -> None:
        for level, arrived in enumerate(self._arrived):
            while arrived:
                waiter = arrived[0]
                if waiter.queued and waiter.level == level:
                    if now - waiter.since < self._promote_seconds or level + 1 == len(CLASSES):
                        break
                    lane = self._lane(waiter)
                    lane.remove(waiter)
                    waiter.level, waiter.since = level + 1, now
                    lane.add(waiter)
                    self._arrived[level + 1].append(waiter)
                arrived.popleft()
