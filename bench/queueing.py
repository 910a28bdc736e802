"""What the queue itself costs, however many wait in it: in one process, without sockets."""

from __future__ import annotations

import os
import statistics
import time

from bench.processes import CPUS
from bench.report import Outcome
from gateway.fairness import CLASSES, Queue
from gateway.lanes import Share, Waiter

WAITING = (10, 100, 1_000, 5_000, 20_000, 100_000)
TENANTS = (1, 10, 1_000)
LANES = 3
REQUESTS = 4_000

LIMIT_AT, LIMIT_MICROSECONDS = 5_000, 50.0
GROWTH_FACTOR = 3.0
"""From the fewest to the most waiting: a logarithm grows more from 10 to 100,000."""


def queueing(rounds: int) -> Outcome:
    """CPU of a request's way through the queue: it comes, another one is granted, and one ends."""
    outcome = Outcome("queueing", f"{REQUESTS:,} requests a figure, of 1 to 1,000 tenants; {rounds} rounds")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(CPUS)} if CPUS else before)
    try:
        spent = {
            (waiting, tenants): [_microseconds(waiting, tenants) for _ in range(rounds)]
            for waiting in WAITING
            for tenants in TENANTS
        }
    finally:
        os.sched_setaffinity(0, before)
    medians = {key: statistics.median(figures) for key, figures in spent.items()}
    for waiting in WAITING:
        figures = " / ".join(f"{medians[waiting, tenants]:.1f}" for tenants in TENANTS)
        outcome.add(f"CPU per request, {waiting:,} waiting", f"{figures} us")
    outcome.figures["us_per_request"] = {
        f"{waiting} waiting, {tenants} tenants": figures for (waiting, tenants), figures in spent.items()
    }
    most = max(medians[LIMIT_AT, tenants] for tenants in TENANTS)
    outcome.require(
        f"at {LIMIT_AT:,} waiting, most",
        f"{most:.1f} us",
        most <= LIMIT_MICROSECONDS,
        f"<= {LIMIT_MICROSECONDS:g} us",
    )
    factor = max(medians[WAITING[-1], tenants] / medians[WAITING[0], tenants] for tenants in TENANTS)
    outcome.require(
        f"{WAITING[-1]:,} waiting / {WAITING[0]}, most",
        f"{factor:.2f}",
        factor <= GROWTH_FACTOR,
        f"<= {GROWTH_FACTOR:g}",
    )
    return outcome


class _Room:
    """Slots that are counted, and nothing else."""

    def __init__(self) -> None:
        self.free = 0

    def seat(self, waiter: Waiter, kept: set[object]) -> bool:
        if not self.free:
            kept.add(waiter.lane)
            return False
        self.free -= 1
        return True


def _microseconds(waiting: int, tenants: int) -> float:
    queue, room = Queue(most=10**9, promote_seconds=30.0), _Room()
    shares = [Share(f"t{n}", 1.0 + n % 3, n % len(CLASSES)) for n in range(tenants)]
    for number in range(waiting):
        queue.add(Waiter(number, shares[number % tenants], number % LANES, 1), 0.0)
    now, started = 0.0, time.process_time()
    for number in range(waiting, waiting + REQUESTS):
        now += 0.001
        waiter = Waiter(number, shares[number * 7 % tenants], number % LANES, 1)
        queue.add(waiter, now)
        assert not list(queue.grant(room.seat, now))
        queue.surplus(waiter)
        room.free = 1
        (granted,) = queue.grant(room.seat, now)
        queue.release(granted, now)
    return (time.process_time() - started) / REQUESTS * 1e6
