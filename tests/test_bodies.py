"""All bodies in flight together stay within one bound, first come first served among their like."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.bodies import SMALL_BYTES, BodyBudget

LARGE = SMALL_BYTES + 1


class Takers:
    """Tasks that take from a budget, and who has got what he wanted, in order."""

    def __init__(self, nursery: trio.Nursery, budget: BodyBudget, *, whole: int) -> None:
        self.nursery = nursery
        self.budget = budget
        self.whole = whole
        self.got: list[str] = []
        self.scopes: dict[str, trio.CancelScope] = {}

    async def start(self, name: str, size: int) -> None:
        self.scopes[name] = trio.CancelScope()
        self.nursery.start_soon(self._take, name, size)
        await wait_all_tasks_blocked()

    async def _take(self, name: str, size: int) -> None:
        with self.scopes[name]:
            await self.budget.take(size, whole=self.whole)
            self.got.append(name)


@asynccontextmanager
async def takers_of(budget: BodyBudget, *, whole: int) -> AsyncIterator[Takers]:
    """At the end everybody must have got what he wanted, or have left."""
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            yield Takers(nursery, budget, whole=whole)


async def test_what_fits_is_held_at_once() -> None:
    budget = BodyBudget(100)
    with trio.fail_after(0):
        await budget.take(60, whole=60)
        await budget.take(40, whole=40)
    assert budget.held == 100
    budget.give_back(60, whole=60)
    budget.give_back(40, whole=40)
    assert budget.held == 0


@pytest.mark.parametrize(("whole", "room"), [(1, 100), (SMALL_BYTES, 100), (LARGE, 75)])
async def test_who_doesnt_fit_waits_and_nobody_of_his_like_overtakes_him(whole: int, room: int) -> None:
    budget = BodyBudget(100)
    await budget.take(room - 30, whole=whole)
    async with takers_of(budget, whole=whole) as takers:
        await takers.start("much", 60)
        await takers.start("little", 10)
        await takers.start("least", 1)
        assert takers.got == []
        assert budget.held == room - 30
        budget.give_back(29, whole=whole)
        await wait_all_tasks_blocked()
        assert takers.got == []
        budget.give_back(11, whole=whole)
        await wait_all_tasks_blocked()
        assert sorted(takers.got) == ["little", "much"]
        assert budget.held == room
        budget.give_back(1, whole=whole)
    assert takers.got[2:] == ["least"]
    assert budget.held == room


async def test_large_bodies_leave_a_quarter_to_the_small_ones() -> None:
    budget = BodyBudget(100)
    await budget.take(75, whole=LARGE)
    async with takers_of(budget, whole=LARGE) as large, takers_of(budget, whole=1) as small:
        await large.start("one more", 1)
        await small.start("passes", 25)
        assert (large.got, small.got) == ([], ["passes"])
        await small.start("waits", 1)
        assert small.got == ["passes"]
        assert budget.held == 100
        budget.give_back(75, whole=LARGE)
    assert (large.got, small.got) == (["one more"], ["passes", "waits"])


async def test_small_bodies_may_have_all_of_it() -> None:
    budget = BodyBudget(100)
    await budget.take(100, whole=1)
    async with takers_of(budget, whole=LARGE) as large:
        await large.start("large", 75)
        budget.give_back(24, whole=1)
        await wait_all_tasks_blocked()
        assert large.got == []
        budget.give_back(1, whole=1)
        await wait_all_tasks_blocked()
        assert large.got == []
        budget.give_back(50, whole=1)
    assert (large.got, budget.held) == (["large"], 100)


async def test_a_large_body_over_the_share_is_let_in_when_it_is_the_only_one() -> None:
    budget = BodyBudget(100)
    await budget.take(10, whole=1)
    await budget.take(10, whole=LARGE)
    async with takers_of(budget, whole=LARGE) as large:
        await large.start("over the share", 90)
        assert large.got == []
        budget.give_back(10, whole=LARGE)
    assert (large.got, budget.held) == (["over the share"], 100)


async def test_a_body_larger_than_the_budget_is_let_in_alone() -> None:
    budget = BodyBudget(100)
    with trio.fail_after(0):
        await budget.take(500, whole=LARGE)
    async with takers_of(budget, whole=1) as small:
        await small.start("next", 1)
        assert small.got == []
        budget.give_back(500, whole=LARGE)
    assert small.got == ["next"]
    async with takers_of(budget, whole=LARGE) as large:
        await large.start("huge", 101)
        assert large.got == []
        budget.give_back(1, whole=1)
    assert (large.got, budget.held) == (["huge"], 101)


@pytest.mark.parametrize("whole", [1, LARGE])
async def test_who_leaves_the_queue_lets_those_behind_him_go(whole: int) -> None:
    budget = BodyBudget(100)
    await budget.take(50, whole=whole)
    async with takers_of(budget, whole=whole) as takers:
        await takers.start("much", 80)
        await takers.start("little", 25)
        takers.scopes["much"].cancel()
    assert takers.got == ["little"]
    assert budget.held == 75


@pytest.mark.parametrize("whole", [1, LARGE])
async def test_who_is_let_in_and_leaves_in_the_same_tick_gives_all_back(whole: int) -> None:
    budget = BodyBudget(100)
    await budget.take(70, whole=whole)
    async with takers_of(budget, whole=whole) as takers:
        await takers.start("first", 70)
        await takers.start("second", 70)
        # The cancellation is on its way when he is called.
        takers.scopes["first"].cancel()
        budget.give_back(70, whole=whole)
        assert budget.held == 70
    assert takers.got == ["second"]
    budget.give_back(70, whole=whole)
    assert budget.held == 0


async def test_after_any_storm_nothing_is_held(autojump_clock: MockClock) -> None:
    dice = random.Random(4)
    budget = BodyBudget(100)
    got = 0

    async def one() -> None:
        nonlocal got
        await trio.sleep(dice.randrange(50))
        size = dice.choice([1, 10, 30, 60, 100, 150])
        whole = dice.choice([size, LARGE])
        with trio.move_on_after(dice.randrange(10)):
            await budget.take(size, whole=whole)
            got += 1
            try:
                assert budget.held <= max(100, size)
                await trio.sleep(dice.randrange(4))
            finally:
                budget.give_back(size, whole=whole)

    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            for _ in range(1000):
                nursery.start_soon(one)
    assert 0 < got < 1000
    assert budget.held == 0
    with trio.fail_after(0):
        await budget.take(75, whole=LARGE)
        await budget.take(25, whole=1)
