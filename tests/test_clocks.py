"""The clocks of an engine's silence: which runs when, and what is said of the one that ran out."""

from __future__ import annotations

from math import inf

import msgspec
import pytest
import trio
from trio.testing import MockClock

from gateway.clocks import EngineClock
from gateway.config import Stream
from gateway.errors import Code

SETTINGS = Stream(first_byte_seconds=10, idle_seconds=3, total_seconds=20)

IDLE_AT_MOST = 3 * 65 / 64 + 1e-9
"""The idle clock may ring a 64th late."""


async def seconds_until_it_rings(clock: EngineClock) -> float:
    """How long from now until it cuts off somebody who waits."""
    start = trio.current_time()
    with clock.scope:
        await trio.sleep(1000)
    assert clock.scope.cancelled_caught
    return trio.current_time() - start


async def test_before_the_call_nothing_runs(autojump_clock: MockClock) -> None:
    clock = EngineClock(SETTINGS)
    with clock.scope:
        await trio.sleep(10_000)
    assert not clock.scope.cancelled_caught
    assert clock.scope.deadline == inf


async def test_the_first_byte_may_take_its_time_from_the_connection_on(autojump_clock: MockClock) -> None:
    clock = EngineClock(SETTINGS)
    clock.called(trio.current_time())
    await trio.sleep(4)
    clock.connected()
    assert await seconds_until_it_rings(clock) == 10
    error = clock.ran_out()
    assert error.code is Code.ENGINE_TIMEOUT
    assert "first_byte_seconds (10)" in error.message
    assert not error.stale


async def test_while_it_is_being_connected_only_the_total_clock_runs(autojump_clock: MockClock) -> None:
    clock = EngineClock(SETTINGS)
    clock.called(trio.current_time())
    assert await seconds_until_it_rings(clock) == 20
    assert "total_seconds (20)" in clock.ran_out().message


async def test_between_two_reads_the_engine_may_be_idle_for_so_long(autojump_clock: MockClock) -> None:
    clock = EngineClock(SETTINGS)
    clock.called(trio.current_time())
    clock.connected()
    await trio.sleep(9)
    for _ in range(3):
        clock.next_read()
        await trio.sleep(2)
    clock.next_read()
    assert 3 <= await seconds_until_it_rings(clock) <= IDLE_AT_MOST
    error = clock.ran_out()
    assert error.code is Code.ENGINE_TIMEOUT
    assert "idle_seconds (3)" in error.message


async def test_idle_clock_that_is_read_often_is_moved_seldom(autojump_clock: MockClock) -> None:
    clock = EngineClock(SETTINGS)
    clock.called(trio.current_time())
    clock.connected()
    deadlines = set[float]()
    for _ in range(300):
        clock.next_read()
        deadlines.add(clock.scope.deadline)
        assert trio.current_time() + 3 <= clock.scope.deadline <= trio.current_time() + IDLE_AT_MOST
        await trio.sleep(0.01)
    assert len(deadlines) <= 300 * 0.01 / (3 / 64) + 2
    clock.stand_still()
    clock.next_read()
    assert 3 <= await seconds_until_it_rings(clock) <= IDLE_AT_MOST


async def test_it_stands_still_while_nobody_reads_but_the_total_clock_does_not(
    autojump_clock: MockClock,
) -> None:
    clock = EngineClock(SETTINGS)
    clock.called(trio.current_time())
    clock.connected()
    clock.stand_still()
    await trio.sleep(15)
    clock.next_read()
    await trio.sleep(1)
    clock.stand_still()
    assert await seconds_until_it_rings(clock) == 4
    assert "total_seconds (20)" in clock.ran_out().message


async def test_the_total_clock_cuts_a_read_short(autojump_clock: MockClock) -> None:
    clock = EngineClock(SETTINGS)
    clock.called(trio.current_time())
    await trio.sleep(18)
    clock.next_read()
    assert await seconds_until_it_rings(clock) == 2
    assert "total_seconds" in clock.ran_out().message


@pytest.mark.parametrize("off", ["first_byte_seconds", "idle_seconds", "total_seconds"])
async def test_zero_turns_a_clock_off(off: str, autojump_clock: MockClock) -> None:
    clock = EngineClock(msgspec.structs.replace(SETTINGS, **{off: 0}))
    start = trio.current_time()
    clock.called(trio.current_time())
    seconds = {"total_seconds": clock.scope.deadline - start}
    clock.connected()
    seconds["first_byte_seconds"] = clock.scope.deadline - start
    clock.next_read()
    seconds["idle_seconds"] = clock.scope.deadline - start
    expected = {"total_seconds": 20, "first_byte_seconds": 10, "idle_seconds": pytest.approx(3 * 65 / 64)}
    assert seconds == {**expected, off: inf if off == "total_seconds" else 20}


async def test_each_call_has_clocks_of_its_own(autojump_clock: MockClock) -> None:
    first = EngineClock(SETTINGS)
    first.called(trio.current_time())
    await trio.sleep(15)
    second = EngineClock(SETTINGS)
    second.called(trio.current_time())
    assert await seconds_until_it_rings(second) == 20
