"""Rates: what passes in a minute, what is given back, and no clock that jumps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.limits import MINUTE, Rate


def test_a_minute_s_allowance_at_once_and_then_as_it_grows() -> None:
    rate = Rate(60)
    for _ in range(60):
        assert rate.wait(1, 0.0) == 0
        rate.take(1, 0.0)
    assert rate.wait(1, 0.0) == pytest.approx(1)
    assert rate.wait(5, 0.5) == pytest.approx(4.5)
    assert (rate.left(0.0), rate.left(10.0), rate.left(600.0)) == (0, 10, 60)
    assert rate.full_in(0.0) == pytest.approx(60)


def test_what_is_given_back_may_be_taken() -> None:
    rate = Rate(10)
    rate.take(10, 5.0)
    assert rate.wait(1, 5.0) > 0
    rate.settle(10, 6, 5.0)
    assert rate.left(5.0) == 4
    assert rate.wait(4, 5.0) == pytest.approx(0, abs=1e-9)


def test_what_was_taken_long_ago_pays_for_nothing_that_was_used_since() -> None:
    """Ten requests are held, one a minute; then each that is let go is to pay for one that really uses."""
    rate, now, used = Rate(1000), 0.0, 0
    for _ in range(10):
        assert rate.wait(1000, now) == 0
        rate.take(1000, now)
        now += 61
    for _ in range(10):
        if rate.wait(1000, now) == 0:
            rate.take(1000, now)
            rate.settle(1000, 1000, now)
            used += 1000
        rate.settle(1000, 0, now)
        now += 1
    assert used == 1000


def test_many_at_once_that_use_little_are_owed_little_for() -> None:
    rate = Rate(1000)
    for _ in range(10):
        rate.take(1000, 0.0)
    for _ in range(10):
        rate.settle(1000, 100, 60.0)
    assert rate.left(60.0) == 0
    assert rate.wait(1, 60.0) == pytest.approx(0.06, abs=0.01)


def test_more_than_a_minute_s_allowance_passes_when_nothing_is_owed() -> None:
    rate = Rate(100)
    assert rate.wait(1000, 0.0) == 0
    rate.take(1000, 0.0)
    assert rate.wait(1, 0.0) == pytest.approx(540.6)
    assert rate.wait(1000, 599.0) == pytest.approx(1.0)


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 50)), min_size=1, max_size=60),
)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_in_no_minute_passes_more_than_two_allowances(
    per_minute: int, asked: list[tuple[float, int]]
) -> None:
    """One that had grown, and one that grows meanwhile (and the one that may be larger than it)."""
    rate, now, taken = Rate(per_minute), 0.0, list[tuple[float, int]]()
    for gap, amount in asked:
        now += gap
        if rate.wait(amount, now) == 0:
            rate.take(amount, now)
            taken.append((now, amount))
        else:
            before = rate.left(now)
            assert rate.wait(amount, now) > 0
            assert rate.left(now) == before, "asking costs nothing"
    for start, _ in taken:
        within = sum(amount for at, amount in taken if start <= at < start + MINUTE)
        assert within <= 2 * per_minute + 50
