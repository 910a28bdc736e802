"""The stall clock: when a client that takes nothing has stalled, and when it is only slow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.server.stall import StallClock

SECONDS = 5.0


def test_a_write_that_is_stuck_for_so_long_has_stalled() -> None:
    clock = StallClock(SECONDS, 100.0)
    assert not clock.stalled(101.0, stuck=True, taken=1000)
    assert not clock.stalled(105.9, stuck=True, taken=1000)
    assert clock.stalled(106.0, stuck=True, taken=1000)


def test_a_client_that_owes_nothing_hasn_t_stalled() -> None:
    clock = StallClock(SECONDS, 0.0)
    assert not clock.stalled(50.0, stuck=False, taken=1000)
    assert not clock.stalled(100.0, stuck=False, taken=1000)
    assert not clock.stalled(104.9, stuck=True, taken=1000)
    assert clock.stalled(105.0, stuck=True, taken=1000)


def test_an_idle_connection_is_only_noted() -> None:
    clock = StallClock(SECONDS, 0.0)
    assert not clock.stalled(1.0, stuck=False, taken=1000)
    clock.rest(100.0)
    assert not clock.stalled(104.9, stuck=True, taken=1000)
    assert clock.stalled(105.0, stuck=True, taken=1000)


def test_without_seconds_nobody_stalls() -> None:
    clock = StallClock(0.0, 0.0)
    assert not clock.stalled(1e6, stuck=True, taken=0)


def test_what_a_kernel_takes_at_first_prolongs_nothing() -> None:
    clock = StallClock(SECONDS, 0.0)
    assert not clock.stalled(0.5, stuck=True, taken=100_000)
    assert not clock.stalled(1.0, stuck=True, taken=140_000)
    assert clock.stalled(6.0, stuck=True, taken=140_000)


def slow_reader() -> StallClock:
    """It has taken something after two pauses, the last time at 8.5 s."""
    clock = StallClock(SECONDS, 0.0)
    for now, taken in (0.5, 100_000), (4.5, 102_000), (8.5, 104_000):
        assert not clock.stalled(now, stuck=True, taken=taken)
    return clock


def test_a_reader_known_to_be_slow_has_twice_the_time() -> None:
    clock = slow_reader()
    assert not clock.stalled(8.5 + 9.9, stuck=True, taken=104_000)
    assert clock.stalled(8.5 + 10.0, stuck=True, taken=104_000)


def test_one_late_progress_makes_half_a_reader() -> None:
    """A full kernel may take a little more when it is asked again."""
    clock = StallClock(SECONDS, 0.0)
    for now, taken in (0.5, 100_000), (2.0, 100_100), (2.5, 100_200):
        assert not clock.stalled(now, stuck=True, taken=taken)
    assert not clock.stalled(2.5 + 7.4, stuck=True, taken=100_200)
    assert clock.stalled(2.5 + 7.5, stuck=True, taken=100_200)


def test_a_reader_that_has_caught_up_is_slow_no_more() -> None:
    clock = slow_reader()
    assert not clock.stalled(9.0, stuck=False, taken=104_000)
    assert clock.stalled(14.0, stuck=True, taken=104_000)


@pytest.mark.parametrize("sign", [1, -1], ids=["tcp", "unix"])
@given(pauses=st.lists(st.floats(0.5, 4.9), min_size=1, max_size=50))
def test_whoever_takes_something_in_time_lives(sign: int, pauses: list[float]) -> None:
    clock, now = StallClock(SECONDS, 0.0), 0.0
    for number, pause in enumerate(pauses, 1):
        now += pause
        assert not clock.stalled(now, stuck=True, taken=sign * number)


@given(looks=st.lists(st.tuples(st.floats(0.1, 2.0), st.integers(0, 50_000)), max_size=50))
def test_whoever_takes_nothing_more_is_cut_off_in_time(looks: list[tuple[float, int]]) -> None:
    clock, now, taken = StallClock(SECONDS, 0.0), 0.0, 0
    for pause, size in looks:
        now, taken = now + pause, taken + size
        clock.stalled(now, stuck=True, taken=taken)
    clock.stalled(now, stuck=True, taken=taken + 1)
    assert clock.stalled(now + 2 * SECONDS + 0.001, stuck=True, taken=taken + 1)
