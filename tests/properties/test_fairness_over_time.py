"""Who is served how often, over minutes of simulated time: newcomers, tricklers, engines of their own."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from gateway.fairness import Queue
from gateway.lanes import Share, Waiter


class Day:
    """Engines with slots, tenants that ask, and a clock."""

    def __init__(self, **engines: int) -> None:
        self.queue = Queue(most=10**6, promote_seconds=0)
        self.now = 0.0
        self.served: Counter[str] = Counter()
        self._holds: dict[Waiter, tuple[float, bool, tuple[str, ...]]] = {}
        self._free = engines
        self._numbers = count()
        self._ahead: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, instant: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._ahead, (instant, next(self._numbers), happens))

    def ask(self, share: Share, *engines: str, holds: float = 1.0, again: bool = False) -> None:
        """One request; ``again``: as soon as it is served the next one comes."""
        waiter = Waiter(next(self._numbers), share, engines, 1)
        self.at(self.now, lambda: self.queue.add(waiter, self.now))
        self._holds[waiter] = holds, again, engines

    def backlog(self, share: Share, *engines: str, clients: int) -> None:
        for _ in range(clients):
            self.ask(share, *engines, again=True)

    def run(self, until: float) -> None:
        while self._ahead and self._ahead[0][0] <= until:
            self.now, _, happens = heapq.heappop(self._ahead)
            happens()
            for waiter in list(self.queue.grant(self._seat, self.now)):
                self.served[waiter.share.name] += 1
        self.now = until

    def _seat(self, waiter: Any, kept: set[Any]) -> bool:
        able: list[str] = [name for name in waiter.lane if self._free[name] and name not in kept]
        if not able:
            kept.update(waiter.lane)
            return False
        self._free[able[0]] -= 1
        holds, _, _ = self._holds[waiter]
        self.at(self.now + holds, lambda: self._end(waiter, able[0]))
        return True

    def _end(self, waiter: Waiter, engine: str) -> None:
        self._free[engine] += 1
        self.queue.release(waiter, self.now)
        holds, again, engines = self._holds.pop(waiter)
        if again:
            self.ask(waiter.share, *engines, holds=holds, again=True)


def test_a_newcomer_has_its_part_of_a_small_engine_however_busy_a_large_one_is() -> None:
    day = Day(big=64, small=1)
    there, here, new = Share("there"), Share("here"), Share("new")
    day.backlog(there, "big", clients=128)
    day.backlog(here, "small", clients=4)
    day.run(900)
    day.served.clear()
    day.backlog(new, "small", clients=4)
    day.run(1100)
    assert day.served["new"] == pytest.approx(100, abs=3)
    assert day.served["here"] == pytest.approx(100, abs=3)


def test_who_uses_both_engines_has_its_part_of_each() -> None:
    day = Day(big=64, small=1)
    both, small = Share("both"), Share("small")
    day.backlog(both, "big", clients=128)
    day.backlog(small, "small", clients=4)
    day.run(300)
    day.served.clear()
    day.backlog(both, "small", clients=4)
    day.run(500)
    assert day.served["small"] == pytest.approx(100, abs=3)


def test_nothing_is_saved_up_by_holding_a_slot_all_the_time() -> None:
    day = Day(engine=16)
    busy, trickle = Share("busy"), Share("trickle")
    day.backlog(busy, "engine", clients=32)

    def next_slow_one() -> None:
        day.ask(trickle, "engine", holds=20)
        if day.now < 1800:
            day.at(day.now + 10, next_slow_one)

    day.at(0, next_slow_one)
    day.run(1800)
    day.served.clear()
    day.backlog(trickle, "engine", clients=32)
    day.run(2100)
    assert day.served["busy"] == pytest.approx(2400, rel=0.05)


def test_a_lane_that_connects_two_pools_makes_them_one() -> None:
    day = Day(left=4, right=4)
    left, right, either = Share("left"), Share("right"), Share("either")
    day.backlog(left, "left", clients=8)
    day.backlog(right, "right", clients=8)
    day.run(200)
    day.served.clear()
    day.backlog(either, "left", "right", clients=16)
    day.run(500)
    parts = [day.served[name] / 2400 for name in ("left", "right", "either")]
    assert all(part == pytest.approx(1 / 3, abs=0.05) for part in parts), parts
