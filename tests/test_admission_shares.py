"""Tenants in the queue: who gives way, whom that lets go, and who couldn't start in time."""

from __future__ import annotations

import pytest
from trio.testing import MockClock

from gateway.errors import Code
from gateway.lanes import Share
from gateway.tickets import Stage
from tests.test_admission import hall, make_engine
from tests.tickets import ticket_for


async def test_who_gives_way_lets_those_go_whom_it_held_up() -> None:
    """Waiting for two slots it keeps the engine for itself, and its one free slot with it."""
    engine, full = make_engine(2, "engine"), make_engine(1, "full")
    crowd = Share("crowd")
    async with hall(engine, full, queue=2) as visitors:
        for one in (engine, full):
            await visitors.come(one)
        await visitors.come(full, ticket=ticket_for(visitors.admission, [full], 1, share=crowd))
        large = await visitors.come(engine, ticket=ticket_for(visitors.admission, [engine], 2, share=crowd))
        small = await visitors.come(engine)
        assert (large.refused, small.engine) == (Code.QUEUE_FULL, engine)


@pytest.mark.parametrize(("timeout", "refused"), [(0.9, Code.QUEUE_TIMEOUT), (1.1, None), (60.0, None)])
async def test_who_could_not_start_in_time_is_refused_at_once(
    timeout: float, refused: Code | None, autojump_clock: MockClock
) -> None:
    """By the estimate itself, which may be less than the whole seconds of ``Retry-After``."""
    engine = make_engine(1)
    async with hall(engine) as visitors:
        await visitors.come(engine)
        ticket = ticket_for(visitors.admission, [engine], 1, timeout=timeout)
        assert visitors.admission.queue.estimate == 1.0
        assert (await visitors.come(engine, ticket=ticket)).refused == refused


async def test_the_engine_with_the_least_part_of_its_slots_taken_is_chosen() -> None:
    small, large = make_engine(2, "small"), make_engine(8, "large")
    async with hall(small, large) as visitors:
        chosen = [(await visitors.come(small, large)).engine for _ in range(6)]
    assert chosen == [small, large, large, large, large, small]


async def test_an_engine_that_was_removed_before_a_ticket_came_to_its_turn_gets_nothing() -> None:
    old, new = make_engine(1, "old"), make_engine(1, "new")
    async with hall(old, new) as visitors:
        ticket = ticket_for(visitors.admission, [old])
        ticket.where = lambda: [Stage((new,))]
        old.retired = True
        assert (await visitors.come(ticket=ticket)).engine == new
        last = ticket_for(visitors.admission, [new])
        new.retired = True
        assert (await visitors.come(ticket=last)).refused == Code.NO_ENGINE
