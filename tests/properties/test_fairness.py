"""The queue's promises: nobody starves, weights are kept, no slot is free while somebody may have it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fairness import CLASSES, Queue
from gateway.lanes import Share, Waiter

LOW, NORMAL, HIGH = range(len(CLASSES))


@dataclass
class House:
    """A queue before engines of so many slots each, in virtual time."""

    engines: dict[str, int]
    queue: Queue
    now: float = 0.0
    used: Counter[str] = field(default_factory=Counter)
    seats: dict[Waiter, str] = field(default_factory=dict)
    ends: dict[Waiter, float] = field(default_factory=dict)
    served: list[Waiter] = field(default_factory=list)
    numbers: int = 0

    def come(self, share: Share, cost: int = 1, lane: tuple[str, ...] | None = None) -> Waiter:
        waiter = Waiter(self.numbers, share, lane or tuple(self.engines), cost)
        self.numbers += 1
        self.queue.add(waiter, self.now)
        return waiter

    def seat(self, waiter: Waiter, kept: set[str]) -> bool:
        lane: tuple[str, ...] = waiter.lane  # type: ignore[assignment]
        for engine in lane:
            if engine not in kept and self.used[engine] + waiter.cost <= self.engines[engine]:
                self.used[engine] += waiter.cost
                self.seats[waiter] = engine
                return True
        kept.update(lane)
        return False

    def grant(self, seconds: float = 1.0) -> list[Waiter]:
        seated = list(self.queue.grant(self.seat, self.now))
        for waiter in seated:
            self.served.append(waiter)
            self.ends[waiter] = self.now + seconds
        return seated

    def end(self, waiter: Waiter) -> None:
        del self.ends[waiter]
        self.used[self.seats.pop(waiter)] -= waiter.cost
        self.queue.release(waiter, self.now)

    def next_end(self) -> None:
        """Until the next one ends."""
        waiter = min(self.ends, key=lambda each: (self.ends[each], each.number))
        self.now = self.ends[waiter]
        self.end(waiter)


def house(slots: int = 2, *, most: int = 10**6, promote: float = 0.0) -> House:
    return House({"e": slots}, Queue(most=most, promote_seconds=promote))


@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 1.0), (5.0, 2.0, 1.0)])
@pytest.mark.parametrize("spread", [0.0, 0.9])
def test_weights_are_kept_within_a_twentieth(weights: tuple[float, ...], spread: float) -> None:
    """Of the service, also where requests are of different lengths and costs."""
    place, dice = house(4), random.Random(1)
    shares = [Share(f"t{n}", weight) for n, weight in enumerate(weights)]
    for _ in range(10_000 // len(shares)):
        for n, share in enumerate(shares):
            place.come(share, cost=dice.choice([1, 2]) if spread and n else 1)
    service: Counter[str] = Counter()
    lengths = {waiter: 1 + spread * dice.uniform(-1, 1) for waiter in place.queue}
    served = 0
    while served < 6000 and all(share.waiters for share in shares):
        for waiter in place.grant():
            place.ends[waiter] = place.now + lengths[waiter]
            service[waiter.share.name] += lengths[waiter] * waiter.cost  # type: ignore[assignment]
            served += 1
        place.next_end()
    assert served > 1000
    whole = sum(service.values())
    for share in shares:
        assert service[share.name] / whole == pytest.approx(share.weight / sum(weights), rel=0.05)


def test_who_comes_later_than_a_flood_waits_for_one_job() -> None:
    place = house(2)
    a, b = Share("a"), Share("b")
    for _ in range(500):
        place.come(a)
    place.grant(0.1)
    for _ in range(100):
        place.next_end()
        place.grant(0.1)
    late = place.come(b)
    assert late not in place.grant(0.1), "no slot is free"
    place.next_end()
    assert place.grant(0.1) == [late]


def test_nobody_saves_up_while_he_asks_for_nothing() -> None:
    place = house(1)
    a, b = Share("a"), Share("b")
    for _ in range(50):
        place.come(a)
        place.grant()
        place.next_end()
    for _ in range(20):
        place.come(a)
        place.come(b)
    place.grant()
    order = []
    for _ in range(20):
        order += [waiter.share.name for waiter in place.grant()]
        place.next_end()
    assert order.count("b") <= order.count("a") + 2


def test_what_an_engine_goes_on_with_is_charged() -> None:
    """A tenant whose requests hold their slots ten times as long gets a tenth as many."""
    place = house(2)
    storm, calm = Share("storm"), Share("calm")
    for _ in range(3000):
        place.come(storm)
        place.come(calm)
    served: Counter[str] = Counter()
    for _ in range(1500):
        for waiter in place.grant():
            place.ends[waiter] = place.now + (10 if waiter.share is storm else 1)
            served[waiter.share.name] += 1
        place.next_end()
    assert served["calm"] / served["storm"] == pytest.approx(10, rel=0.1)


def test_what_still_runs_is_charged_as_it_runs() -> None:
    place = house(3)
    long, short = Share("long"), Share("short")
    for _ in range(2):
        place.come(long)
    place.grant(1000)
    for _ in range(60):
        place.come(long)
        place.come(short)
    got: list[str] = []
    for _ in range(40):
        got += [waiter.share.name for waiter in place.grant(1)]
        place.next_end()
    assert set(got[5:]) == {"short"}, "the other one has two slots all the time"


def test_classes_are_strict() -> None:
    place = house(1)
    shares = {name: Share(name, priority=level) for level, name in enumerate(CLASSES)}
    for _ in range(3):
        for share in shares.values():
            place.come(share)
    order = []
    while len(place.queue):
        order += [waiter.share.name for waiter in place.grant()]
        place.next_end()
    assert order == ["high"] * 3 + ["normal"] * 3 + ["low"] * 3


def test_who_has_waited_long_enough_is_a_class_up() -> None:
    """So the longest wait is bounded, however many of a higher class come."""
    place = house(1, promote=10)
    high, low = Share("high", priority=HIGH), Share("low", priority=LOW)
    patient = place.come(low)
    for _ in range(100):
        place.come(high)
        place.come(high)
        if patient in place.grant():
            break
        place.next_end()
    assert 20 <= place.now <= 22


def test_a_large_one_is_not_passed_for_ever() -> None:
    place = house(4)
    small, large = Share("small"), Share("large")
    for _ in range(4):
        place.come(small)
    place.grant()
    big = place.come(large, cost=4)
    for _ in range(20):
        place.come(small)
    for _ in range(4):
        assert place.grant() == []
        place.next_end()
    assert place.grant() == [big]


def test_who_may_hold_no_more_holds_up_nobody() -> None:
    place = house(4)
    capped, other = Share("capped", slots=1), Share("other")
    first = [place.come(capped) for _ in range(5)]
    rest = [place.come(other) for _ in range(5)]
    assert set(place.grant()) == {first[0], *rest[:3]}
    place.end(first[0])
    assert place.grant() == [first[1]] or place.grant() == [rest[3]]
    assert capped.held <= 1


def test_the_newest_of_the_largest_gives_way() -> None:
    place = house(0, most=5)
    a, b = Share("a"), Share("b")
    flood = [place.come(a) for _ in range(4)]
    one = place.come(b)
    assert place.queue.surplus(one) is None
    two = place.come(b)
    assert place.queue.surplus(two) is flood[-1]
    place.queue.remove(flood[-1])
    more = place.come(a)
    assert place.queue.surplus(more) is more, "who comes last of the largest goes"


def test_a_tenant_s_own_queue_is_its_own() -> None:
    place = house(0)
    a = Share("a", queue=2)
    waiters = [place.come(a) for _ in range(3)]
    assert place.queue.surplus(waiters[2]) is waiters[2]


def test_who_was_seated_before_keeps_its_place() -> None:
    place = house(1)
    a = Share("a")
    first, second = place.come(a), place.come(a)
    assert place.grant() == [first]
    place.end(first)
    place.queue.add(first, place.now)
    assert place.queue.surplus(first) is None
    assert place.grant() == [first]
    assert second.queued


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(0, 3), st.integers(1, 3), st.integers(0, 2)),
        st.tuples(st.just("leave"), st.integers(0, 50), st.just(0), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 50), st.just(0), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 40), st.just(0), st.just(0)),
    ),
    max_size=60,
)
LANES = (("a",), ("b",), ("a", "b"))


@given(STEPS, st.lists(st.integers(0, 3), min_size=4, max_size=4))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_after_every_step_all_is_as_it_must_be(
    steps: list[tuple[str, int, int, int]], caps: list[int]
) -> None:
    place = House({"a": 3, "b": 4}, Queue(most=12, promote_seconds=15))
    shares = [Share(f"t{n}", 1.0 + n, n % 3, slots=cap) for n, cap in enumerate(caps)]
    for what, number, cost, lane in steps:
        if what == "come":
            share = shares[number]
            if share.slots and cost > share.slots:
                continue
            waiter = place.come(share, cost, LANES[lane])
            place.grant()
            if (surplus := place.queue.surplus(waiter)) is not None:
                place.queue.remove(surplus)
        elif what == "leave" and len(place.queue):
            waiters = sorted(place.queue, key=lambda each: each.number)
            place.queue.remove(waiters[number % len(waiters)])
        elif what == "end" and place.seats:
            place.end(sorted(place.seats, key=lambda each: each.number)[number % len(place.seats)])
        elif what == "wait":
            place.now += number
        place.grant()
        holds(place, shares)


def holds(place: House, shares: list[Share]) -> None:
    """The books agree, no tenant has too much, and nobody who could go now waits."""
    waiters = list(place.queue)
    assert len(waiters) == len(place.queue) == sum(len(share.waiters) for share in shares) <= place.queue.most
    for share in shares:
        held = sum(waiter.cost for waiter in place.seats if waiter.share is share)
        assert share.held == held
        assert not share.slots or held <= share.slots
    admissible = [waiter for waiter in waiters if waiter.share.may_hold(waiter.cost)]
    free = {engine: slots - place.used[engine] for engine, slots in place.engines.items()}
    assert all(slots >= 0 for slots in free.values())
    # What is next in its lane and doesn't fit keeps its engines; what fits on one that nobody keeps has gone.
    blocked = {
        engine
        for waiter in admissible
        if all(free[each] < waiter.cost for each in waiter.lane)  # type: ignore[attr-defined]
        for engine in waiter.lane  # type: ignore[attr-defined]
    }
    for waiter in admissible:
        lane: tuple[str, ...] = waiter.lane  # type: ignore[assignment]
        assert not any(free[each] >= waiter.cost and each not in blocked for each in lane)
