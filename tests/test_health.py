"""Healthy, ejected, on probation: what requests and probes make of an engine."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import config
from gateway.health import Change, Health, State

SETTINGS = config.Health(failures=3, probe_seconds=5, backoff_seconds=1, backoff_most_seconds=8)


def ill(health: Health, times: int = 3, now: float = 0.0) -> None:
    for number in range(times):
        health.failed(f"r{number}", now, "no")


def test_so_many_failures_in_a_row_eject() -> None:
    health = Health(SETTINGS)
    ill(health, 2)
    health.succeeded("a", 0, 0)
    ill(health, 2)
    assert health.takes(0)
    ill(health, 1)
    assert (health.state(0), health.takes(0), health.reason) == (State.EJECTED, False, "no")


def test_answers_that_begin_and_break_off_eject_as_well() -> None:
    health = Health(SETTINGS)
    for number in range(3):
        health.succeeded(number, 0, 0)
        health.failed(number, 0, "broke off", begun=True)
    assert health.ejected
    health = Health(SETTINGS)
    for number in range(9):
        health.succeeded(number, 0, 0)
        health.failed(number, 0, "broke off", begun=True)
        health.completed()
    assert not health.ejected


def test_a_refused_connection_ejects_at_once() -> None:
    health = Health(SETTINGS)
    health.failed("a", 0, "refused", absent=True)
    assert health.state(0) is State.EJECTED


def test_after_the_backoff_one_request_is_the_trial() -> None:
    health = Health(SETTINGS)
    ill(health)
    assert health.opens_at(0) == 1
    assert (health.state(1), health.takes(1)) == (State.PROBATION, True)
    health.granted("trial", 1)
    assert not health.takes(1)
    health.neutral("another")
    assert not health.takes(1)
    health.succeeded("trial", 1, 1.5)
    assert (health.state(2), health.takes(2)) == (State.HEALTHY, True)


@pytest.mark.parametrize(("trials", "backoff"), [(0, 1), (1, 2), (2, 4), (3, 8), (9, 8)])
def test_the_backoff_grows_with_each_trial_that_fails(trials: int, backoff: float) -> None:
    health, now = Health(SETTINGS), 0.0
    ill(health)
    for _ in range(trials):
        now = health.until
        health.granted("trial", now)
        health.failed("trial", now, "still")
    assert health.until == now + backoff


def test_after_a_long_time_of_health_it_begins_anew() -> None:
    health = Health(SETTINGS)
    ill(health)
    health.granted("trial", 1)
    health.failed("trial", 1, "no")
    health.granted("trial", 3)
    health.succeeded("trial", 3, 3)
    ill(health, now=4)
    assert health.until == 4 + 4
    health.granted("trial", 8)
    health.succeeded("trial", 8, 8)
    ill(health, now=20)
    assert health.until == 21


def test_a_trial_whose_client_leaves_frees_the_place() -> None:
    told: list[Change] = []
    health = Health(SETTINGS, told.append)
    ill(health)
    health.granted("trial", 1)
    health.neutral("trial")
    assert health.takes(1)
    assert told == [Change.EJECTED, Change.OPEN]


def test_what_was_sent_before_it_was_ejected_says_nothing_of_it_now() -> None:
    health = Health(SETTINGS)
    ill(health, now=5)
    health.succeeded("old", 4, 5.5)
    assert health.ejected
    health.succeeded("in a panic", 5.2, 5.6)
    assert not health.ejected


def test_a_probe_brings_back_what_was_down_before_its_backoff_is_over() -> None:
    health = Health(SETTINGS)
    health.failed("a", 0, "refused", absent=True)
    health.probed_ill(0.5, "refused", absent=True, alive=False)
    assert not health.takes(5)
    health.probed_well(6)
    assert health.state(6) is State.PROBATION
    assert health.takes(6)


def test_a_page_that_answers_doesnt_shorten_the_backoff_of_one_that_fails_requests() -> None:
    health = Health(SETTINGS)
    ill(health)
    health.probed_well(0.1)
    assert not health.takes(0.9)
    assert health.takes(1)


def test_probes_count_only_while_no_bytes_flow() -> None:
    health = Health(SETTINGS)
    for _ in range(10):
        health.probed_ill(0, "silent", absent=False, alive=True)
        health.probed_ill(0, "silent", absent=False, alive=False)
    assert not health.ejected
    for _ in range(3):
        health.probed_ill(0, "silent", absent=False, alive=False)
    assert health.ejected


def test_one_that_rests_is_well_but_takes_nothing() -> None:
    health = Health(SETTINGS)
    health.rest(0, 2)
    assert (health.takes(1), health.rests(1), health.takes_in_panic(1)) == (False, True, False)
    assert health.opens_at(0) == 2
    assert health.takes(2)
    health.rest(2, 1e9)
    assert health.opens_at(2) == 10, "no longer than backoff_most_seconds"


def test_one_that_is_drained_takes_nothing_whatever_happens() -> None:
    health = Health(SETTINGS)
    health.drained = True
    assert (health.takes(0), health.takes_in_panic(0), health.rests(0)) == (False, False, False)


EVENTS = st.sampled_from(["grant", "ok", "bad", "absent", "neutral", "well", "ill", "rest", "wait"])


def happens(health: Health, what: str, trial: int, now: float, seconds: float) -> None:
    {
        "grant": lambda: health.granted(trial, now),
        "ok": lambda: health.succeeded(trial, now, now),
        "bad": lambda: health.failed(trial, now, what),
        "absent": lambda: health.failed(trial, now, what, absent=True),
        "neutral": lambda: health.neutral(trial),
        "well": lambda: health.probed_well(now),
        "ill": lambda: health.probed_ill(now, what, absent=False, alive=False),
        "rest": lambda: health.rest(now, seconds),
        "wait": lambda: None,
    }[what]()


@given(st.lists(st.tuples(EVENTS, st.integers(0, 4), st.floats(0, 5)), max_size=80))
def test_whatever_happens_it_can_come_back(events: list[tuple[str, int, float]]) -> None:
    health, now = Health(SETTINGS), 0.0
    for what, trial, seconds in events:
        now += seconds if what == "wait" else 0
        if what != "grant" or health.takes(now):
            happens(health, what, trial, now, seconds)
        assert health.until == inf if not health.ejected else health.until <= now + 2 * 5 + 8
    for trial in range(5):
        health.neutral(trial)
    assert health.takes(now + 20), "nothing is out for longer than its backoff, or two probes"
