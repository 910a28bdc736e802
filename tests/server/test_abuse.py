"""The allowance for frames that only cost."""

from __future__ import annotations

from gateway.server.abuse import BURST, PER_SECOND, Allowance


def test_a_burst_is_covered_and_one_more_is_not() -> None:
    allowance = Allowance()
    allowance.spend(BURST, 0)
    assert not allowance.overdrawn
    allowance.spend(0.1, 0)
    assert allowance.overdrawn


def test_it_fills_with_time_up_to_a_burst() -> None:
    allowance = Allowance()
    allowance.spend(BURST, 0)
    allowance.spend(PER_SECOND, 1)
    allowance.spend(BURST, 10_000)
    assert not allowance.overdrawn
    allowance.spend(1, 10_000)
    assert allowance.overdrawn


def test_what_is_earned_can_be_spent_but_not_hoarded() -> None:
    allowance = Allowance()
    allowance.earn(100)
    allowance.spend(BURST, 0)
    assert not allowance.overdrawn
    allowance.earn(2)
    allowance.spend(2, 0)
    assert not allowance.overdrawn
    allowance.spend(1, 0)
    assert allowance.overdrawn


def test_a_pace_below_the_rate_goes_on_for_ever() -> None:
    allowance = Allowance()
    for second in range(100_000):
        allowance.spend(PER_SECOND, second)
        assert not allowance.overdrawn
