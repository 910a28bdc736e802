"""Admission: who may call now, who waits, who is refused, and that no slot is ever lost or held twice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.admission import Admission
from gateway.config import Engine as Settings
from gateway.engine import Engine
from gateway.errors import Code, GatewayError
from gateway.tickets import Ticket
from tests.tickets import ticket_for


def make_engine(slots: int = 1, name: str = "gpu0") -> Engine:
    settings = Settings(name=name, kind="vllm", url="http://e", slots=slots, models=("*",))
    way: Any = None  # Admission doesn't call engines.
    return Engine(settings, way, host=b"e", prefix=b"")


def idle(*engines: Engine) -> bool:
    accounts = [engine.ledger.statement() for engine in engines]
    return all(a.balanced and a.free == a.slots and a.acquired == a.released for a in accounts)


class Visitor:
    """A request that takes its turn: it waits, holds its slot until told to go, and says how it went."""

    def __init__(self, admission: Admission, ticket: Ticket) -> None:
        self.ticket = ticket
        self.engine: Engine | None = None
        self.refused: Code | None = None
        self.had_to_wait = False
        self.scope = trio.CancelScope()
        self._admission = admission
        self._may_go = trio.Event()

    async def visit(self) -> None:
        with self.scope:
            try:
                async with self._admission.slot(self.ticket, waiting=self._note_waiting) as (self.engine, _):
                    await self._may_go.wait()
            except GatewayError as error:
                self.refused = error.code

    def leave(self) -> None:
        self._may_go.set()

    def _note_waiting(self) -> None:
        self.had_to_wait = True


class Hall:
    """Visitors of one admission."""

    def __init__(self, nursery: trio.Nursery, admission: Admission) -> None:
        self.nursery = nursery
        self.admission = admission

    async def come(self, *engines: Engine, cost: int = 1, ticket: Ticket | None = None) -> Visitor:
        visitor = Visitor(self.admission, ticket or ticket_for(self.admission, engines, cost))
        self.nursery.start_soon(visitor.visit)
        await wait_all_tasks_blocked()
        return visitor


@asynccontextmanager
async def hall(*engines: Engine, queue: int = 100, seconds: float = 60) -> AsyncIterator[Hall]:
    """When the test's body has ended, everybody goes, and nothing may be held."""
    admission = Admission(queue=queue, queue_seconds=seconds)
    async with trio.open_nursery() as nursery:
        yield Hall(nursery, admission)
        nursery.cancel_scope.cancel()
    assert admission.waiting == 0
    assert idle(*engines)


def inside(visitors: Sequence[Visitor]) -> list[bool]:
    return [visitor.engine is not None for visitor in visitors]


# -------------------------------------------------------------------------------------------- at once


async def test_a_free_slot_is_had_at_once_and_given_back_on_leaving() -> None:
    engine = make_engine(2)
    admission = Admission(queue=0, queue_seconds=1)
    with trio.fail_after(0):
        async with admission.slot(ticket_for(admission, [engine], 2), waiting=pytest.fail) as granted:
            assert granted[0] is engine
            assert engine.ledger.running == 2
    assert idle(engine)


async def test_the_slot_is_given_back_whatever_happens_inside() -> None:
    engine = make_engine()
    admission = Admission(queue=0, queue_seconds=1)
    with pytest.raises(ValueError, match="boom"):
        async with admission.slot(ticket_for(admission, [engine], 1), waiting=pytest.fail):
            raise ValueError("boom")
    assert idle(engine)
    with trio.CancelScope() as scope:
        async with admission.slot(ticket_for(admission, [engine], 1), waiting=pytest.fail):
            scope.cancel()
            await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert idle(engine)


async def test_what_could_never_fit_is_refused_and_what_fits_somewhere_goes_there() -> None:
    small, large = make_engine(2, "small"), make_engine(4, "large")
    admission = Admission(queue=8, queue_seconds=1)
    with pytest.raises(GatewayError) as caught:
        ticket_for(admission, [small, large], 5)
    assert (caught.value.code, caught.value.param) == (Code.INVALID_REQUEST, "n")
    async with admission.slot(ticket_for(admission, [small, large], 3), waiting=pytest.fail) as (engine, _):
        assert engine is large
    assert idle(small, large)


# ------------------------------------------------------------------------------------------- in turn


async def test_first_come_first_served() -> None:
    engine = make_engine()
    async with hall(engine) as visitors:
        come = [await visitors.come(engine) for _ in range(5)]
        assert [visitor.had_to_wait for visitor in come] == [False] + [True] * 4
        for number in range(5):
            assert inside(come) == [True] * (number + 1) + [False] * (4 - number)
            come[number].leave()
            await wait_all_tasks_blocked()


async def test_a_freed_slot_changes_hands_in_one_step() -> None:
    engine = make_engine()
    async with hall(engine) as visitors:
        admission = visitors.admission
        async with trio.open_nursery() as nursery:

            async def first() -> None:
                async with admission.slot(ticket_for(admission, [engine], 1), waiting=pytest.fail):
                    second = await visitors.come(engine)
                # No task has run since, and the slot is not free.
                assert engine.ledger.free == 0
                assert admission.waiting == 0
                assert second.ticket.seat is not None

            nursery.start_soon(first)


async def test_a_large_request_is_not_overtaken_by_a_later_cheap_one() -> None:
    engine = make_engine(4)
    async with hall(engine) as visitors:
        holders = [await visitors.come(engine) for _ in range(4)]
        large = await visitors.come(engine, cost=3)
        cheap = await visitors.come(engine)
        for count, holder in enumerate(holders[:3], 1):
            assert inside([large, cheap]) == [False, False]
            holder.leave()
            await wait_all_tasks_blocked()
            assert engine.ledger.free == (count if count < 3 else 0)
        assert inside([large, cheap]) == [True, False]
        holders[3].leave()
        await wait_all_tasks_blocked()
        assert inside([large, cheap]) == [True, True]


async def test_a_request_for_another_engine_passes_by() -> None:
    one, other = make_engine(2, "one"), make_engine(2, "other")
    async with hall(one, other) as visitors:
        await visitors.come(one)
        large = await visitors.come(one, cost=2)
        assert not large.engine
        assert (await visitors.come(other)).engine is other
        either = await visitors.come(one, other)
        assert either.engine is other
        assert not large.engine


async def test_a_request_that_may_go_to_either_holds_its_place_at_both() -> None:
    one, other = make_engine(2, "one"), make_engine(2, "other")
    async with hall(one, other) as visitors:
        holders = [await visitors.come(one), await visitors.come(other)]
        large = await visitors.come(one, other, cost=2)
        later = [await visitors.come(one), await visitors.come(other)]
        assert inside([large, *later]) == [False, False, False]
        holders[1].leave()
        await wait_all_tasks_blocked()
        assert large.engine is other
        assert inside(later) == [True, False]


async def test_nobody_holds_a_place_where_he_could_never_go() -> None:
    small, large = make_engine(2, "small"), make_engine(4, "large")
    async with hall(small, large) as visitors:
        await visitors.come(large)
        waiting = await visitors.come(small, large, cost=4)
        assert not waiting.engine
        assert (await visitors.come(small, cost=2)).engine is small


async def test_who_leaves_the_queue_lets_those_go_whom_he_held_up() -> None:
    engine = make_engine(3)
    async with hall(engine) as visitors:
        await visitors.come(engine)
        large = await visitors.come(engine, cost=3)
        cheap = [await visitors.come(engine), await visitors.come(engine)]
        assert inside(cheap) == [False, False]
        large.scope.cancel()
        await wait_all_tasks_blocked()
        assert inside(cheap) == [True, True]


async def test_a_leaver_is_out_of_the_queue_at_once() -> None:
    engine = make_engine()
    async with hall(engine) as visitors:
        holder, leaver = await visitors.come(engine), await visitors.come(engine)
        assert visitors.admission.waiting == 1
        leaver.scope.cancel()
        await wait_all_tasks_blocked()
        assert visitors.admission.waiting == 0
        holder.leave()
        await wait_all_tasks_blocked()
        assert idle(engine)
        assert engine.ledger.statement().acquired == 1


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_a_slot_granted_to_a_leaver_in_the_same_tick_passes_on(cancel_first: bool) -> None:
    engine = make_engine()
    for _ in range(20):  # The order of tasks within a tick is Trio's to choose.
        async with hall(engine) as visitors:
            holder, leaver, next_one = [await visitors.come(engine) for _ in range(3)]
            if cancel_first:
                leaver.scope.cancel()
                holder.leave()
            else:
                holder.leave()
                leaver.scope.cancel()
            await wait_all_tasks_blocked()
            assert next_one.engine is engine
            assert visitors.admission.waiting == 0


# ---------------------------------------------------------------------------------------------- bounds


async def test_the_queue_is_bounded_for_all_engines_together() -> None:
    one, other = make_engine(name="one"), make_engine(name="other")
    async with hall(one, other, queue=2) as visitors:
        for _ in range(2):
            await visitors.come(one, other)
        waiting = [await visitors.come(one), await visitors.come(other)]
        late = await visitors.come(one)
        assert late.refused is Code.QUEUE_FULL
        assert not late.had_to_wait
        assert visitors.admission.waiting == 2
        waiting[0].scope.cancel()
        await wait_all_tasks_blocked()
        assert (await visitors.come(one)).refused is None


async def test_who_neednt_wait_passes_a_full_queue() -> None:
    busy, idle_one = make_engine(name="busy"), make_engine(name="idle")
    async with hall(busy, idle_one, queue=1) as visitors:
        for _ in range(2):
            await visitors.come(busy)
        assert (await visitors.come(busy)).refused is Code.QUEUE_FULL
        assert (await visitors.come(idle_one)).engine is idle_one


async def test_a_queue_of_none_refuses_at_once_when_no_slot_is_free() -> None:
    engine = make_engine()
    async with hall(engine, queue=0) as visitors:
        holder = await visitors.come(engine)
        assert holder.engine is engine
        assert (await visitors.come(engine)).refused is Code.QUEUE_FULL
        holder.leave()
        await wait_all_tasks_blocked()
        assert (await visitors.come(engine)).engine is engine


async def test_waiting_has_a_deadline(autojump_clock: MockClock) -> None:
    engine = make_engine(2)
    async with hall(engine, seconds=10) as visitors:
        await visitors.come(engine)
        start = trio.current_time()
        large = await visitors.come(engine, cost=2)
        await trio.sleep(5)
        held_up = await visitors.come(engine)
        await trio.sleep(4.9)
        assert (large.refused, held_up.engine) == (None, None)
        await trio.sleep(0.2)
        assert trio.current_time() - start > 10
        assert large.refused is Code.QUEUE_TIMEOUT
        assert held_up.engine is engine


async def test_a_slot_granted_at_the_very_deadline_isnt_lost(autojump_clock: MockClock) -> None:
    engine = make_engine()
    for _ in range(20):
        async with hall(engine, seconds=10) as visitors:
            holder, waiter = await visitors.come(engine), await visitors.come(engine)

            async def let_go(holder: Visitor) -> None:
                await trio.sleep(10)
                holder.leave()

            visitors.nursery.start_soon(let_go, holder)
            await trio.sleep(11)
            assert waiter.engine is engine or waiter.refused is Code.QUEUE_TIMEOUT
            assert (await visitors.come(engine)).engine is (None if waiter.engine else engine)


# ------------------------------------------------------------------------------------------- retries


async def test_a_retry_keeps_its_place_and_its_deadline(autojump_clock: MockClock) -> None:
    engine = make_engine()
    async with hall(engine, seconds=10) as visitors:
        first = await visitors.come(engine)
        second, third = await visitors.come(engine), await visitors.come(engine)
        first.leave()
        await trio.sleep(4)
        assert inside([second, third]) == [True, False]
        again = await visitors.come(ticket=first.ticket)
        assert again.had_to_wait
        second.leave()
        await wait_all_tasks_blocked()
        assert inside([again, third]) == [True, False]
        again.leave()
        await wait_all_tasks_blocked()
        once_more = await visitors.come(ticket=first.ticket)
        await trio.sleep(6.5)
        assert once_more.refused is Code.QUEUE_TIMEOUT


async def test_a_retry_finds_its_place_in_a_full_queue_too() -> None:
    engine = make_engine()
    async with hall(engine, queue=1) as visitors:
        first, second = await visitors.come(engine), await visitors.come(engine)
        first.leave()
        await wait_all_tasks_blocked()
        third = await visitors.come(engine)
        again = await visitors.come(ticket=first.ticket)
        assert (again.refused, third.refused) == (None, None)
        assert (await visitors.come(engine)).refused is Code.QUEUE_FULL
        second.leave()
        await wait_all_tasks_blocked()
        assert inside([again, third]) == [True, False]


# ---------------------------------------------------------------------------------------------- drain


async def test_draining_refuses_who_waits_and_who_comes_and_leaves_the_rest() -> None:
    engine = make_engine()
    async with hall(engine) as visitors:
        holder = await visitors.come(engine)
        waiting = [await visitors.come(engine) for _ in range(3)]
        visitors.admission.close()
        assert visitors.admission.waiting == 0
        await wait_all_tasks_blocked()
        assert [visitor.refused for visitor in waiting] == [Code.DRAINING] * 3
        assert engine.ledger.running == 1
        assert (await visitors.come(engine)).refused is Code.DRAINING
        holder.leave()
        await wait_all_tasks_blocked()
        assert holder.refused is None
        assert (await visitors.come(engine)).refused is Code.DRAINING
        assert idle(engine)


async def test_who_leaves_as_the_drain_begins_holds_nothing() -> None:
    engine = make_engine()
    for _ in range(20):
        async with hall(engine) as visitors:
            holder, leaver = await visitors.come(engine), await visitors.come(engine)
            leaver.scope.cancel()
            visitors.admission.close()
            holder.leave()
            await wait_all_tasks_blocked()
            assert idle(engine)


def test_it_shows_who_waits() -> None:
    assert repr(Admission(queue=5, queue_seconds=1)) == "<Admission 0 of 5 waiting>"
