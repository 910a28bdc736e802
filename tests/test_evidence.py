"""The arithmetic of what an engine says: who has stopped, whose load it is, what was made for nobody."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.evidence import FOREIGN_OVER_SECONDS, FOREIGN_SECONDS, Foreign, Look, Suspect, Waste, weigh
from gateway.profiles import Load, Looks

LOOKS = Looks(decode=0.02, prefill=0.02, confirm=0.03, busy=0.03, slowest=0.25, uncounted=1.0)


def look(at: float, busy: int, own: int = 0, *, most: int | None = None, tokens: float | None = None) -> Look:
    """A look that is answered at once, at a time when ``own`` of ours are running."""
    return Look(Load(busy, 0, tokens=tokens), at, at, own=own, most=own if most is None else most)


def suspect(closed: float = 0.0, cost: int = 1, *, counted: bool = True) -> Suspect:
    return Suspect(closed=closed, cost=cost, counted=counted)


def seen(suspects: list[Suspect], *looks: Look, ghosts: int = 0) -> list[list[int]]:
    """Which suspects each look proves to have stopped, by their place; the proven ones are taken away."""
    left, proven = list(suspects), []
    for one in looks:
        stopped = weigh(one, left, ghosts, LOOKS)
        left = [each for each in left if each not in stopped]
        proven.append([suspects.index(each) for each in stopped])
    return proven


def test_it_has_to_be_seen_twice_a_step_apart() -> None:
    assert seen([suspect()], look(1, 0), look(1.02, 0), look(1.03, 0)) == [[], [], [0]]


def test_a_busy_look_in_between_begins_anew() -> None:
    assert seen([suspect()], look(1, 0), look(2, 1), look(3, 0), look(4, 0)) == [[], [], [], [0]]


def test_both_looks_have_to_be_after_the_close() -> None:
    assert seen([suspect(closed=1.0)], look(0.5, 0), look(1.0, 0), look(1.5, 0), look(2, 0)) == [
        [],
        [],
        [],
        [0],
    ]


def test_the_running_ones_are_not_taken_for_it() -> None:
    assert seen([suspect()], look(1, 3, 2), look(2, 3, 2)) == [[], []]
    assert seen([suspect()], look(1, 2, 2), look(2, 2, 2)) == [[], [0]]


def test_a_look_that_finds_fewer_than_ours_says_nothing() -> None:
    assert seen([suspect()], look(1, 1, 2), look(2, 1, 2), look(3, 2, 2), look(4, 0, 1)) == [[], [], [], []]


def test_waiting_ones_count() -> None:
    waiting = [Look(Load(1, 1), at, at, own=1, most=1) for at in (1.0, 2.0)]
    assert seen([suspect()], *waiting) == [[], []]


def test_of_several_the_oldest_count_as_stopped() -> None:
    three = [suspect(0.3), suspect(0.1), suspect(0.2)]
    assert seen(three, look(1, 1), look(2, 1), look(3, 0), look(4, 0)) == [[], [1, 2], [], [0]]


def test_a_request_of_several_sequences_needs_all_of_them_to_stop() -> None:
    assert seen([suspect(cost=3)], look(1, 1), look(2, 1)) == [[], []]
    assert seen([suspect(cost=3)], look(1, 0), look(2, 0)) == [[], [0]]


def test_ghosts_account_for_what_goes_on() -> None:
    assert seen([suspect()], look(1, 2), look(2, 2), ghosts=2) == [[], [0]]
    assert seen([suspect()], look(1, 3), look(2, 3), ghosts=2) == [[], []]


def test_what_may_not_be_counted_yet_has_to_look_stopped_for_longer() -> None:
    unseen = [suspect(counted=False)]
    assert seen(unseen, look(0.1, 0), look(0.5, 0), look(1.0, 0), look(1.1, 0)) == [[], [], [], [0]]
    assert seen([suspect(counted=False)], look(0.1, 1), look(0.2, 0), look(0.3, 0)) == [[], [], [0]]


def test_one_of_two_that_is_seen_does_not_vouch_for_the_other() -> None:
    two = [suspect(counted=False), suspect(counted=False)]
    assert seen(two, look(0.1, 1), look(0.2, 0), look(0.3, 0), look(1.3, 0)) == [[], [], [], [0, 1]]


@given(
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=5),
    st.integers(0, 3),
    st.integers(0, 3),
)
@settings(derandomize=True, deadline=None, max_examples=300)
def test_never_fewer_slots_are_kept_than_sequences_go_on(
    own: int, requests: list[tuple[int, bool]], ghosts: int, foreign: int
) -> None:
    """Whatever goes on, of requests that stop as wholes: as many slots are kept, ghosts and reclaims."""
    suspects = [suspect(cost=cost) for cost, _ in requests]
    going_on = sum(cost for cost, goes_on in requests if goes_on)
    busy = own + going_on + ghosts + foreign
    proven = [each for at in (1.0, 2.0) for each in weigh(look(at, busy, own), suspects, ghosts, LOOKS)]
    kept = sum(each.cost for each in suspects if each not in proven)
    assert kept >= going_on
    if not foreign and all(cost == 1 for cost, _ in requests):
        assert kept == going_on


# Load that isn't ours.


def test_foreign_load_is_certain_after_a_while() -> None:
    foreign = Foreign()
    for at in (0.0, 0.5, FOREIGN_SECONDS - 0.1):
        foreign.take(look(at, 5, 2), ours=1)
        assert (foreign.suspected, foreign.sequences) == (True, 0)
    foreign.take(look(FOREIGN_SECONDS, 6, 2), ours=1)
    assert foreign.sequences == 3


@pytest.mark.parametrize("ours", [look(1, 4, 2, most=4), look(1, 3, 3), look(1, 0, 3)])
def test_our_own_is_not_foreign(ours: Look) -> None:
    """Those that began or ended between asking and answer are ours too."""
    foreign = Foreign()
    foreign.take(look(0, 9), ours=0)
    foreign.take(ours, ours=0)
    assert not foreign.suspected


def test_foreign_load_has_to_be_gone_for_a_minute() -> None:
    foreign = Foreign()
    for at in (0.0, 1.0, 2.0):
        foreign.take(look(at, 1), ours=0)
    for at in (3.0, 3.0 + FOREIGN_OVER_SECONDS - 1):
        foreign.take(look(at, 0), ours=0)
        assert (foreign.suspected, foreign.sequences) == (False, 1)
    foreign.take(look(40.0, 1), ours=0)
    foreign.take(look(50.0, 0), ours=0)
    foreign.take(look(50.0 + FOREIGN_OVER_SECONDS - 1, 0), ours=0)
    assert foreign.sequences == 1
    foreign.take(look(50.0 + FOREIGN_OVER_SECONDS, 0), ours=0)
    assert foreign.sequences == 0


# Tokens made for nobody.


@pytest.mark.parametrize(
    ("before", "after", "granted", "wasted"),
    [
        (look(0, 1, tokens=10), look(1, 1, tokens=25), (3, 3), 15),
        (look(0, 1, tokens=10), look(1, 0, tokens=12), (3, 3), 2),
        (look(0, 0, tokens=10), look(1, 0, tokens=25), (3, 3), 0),
        (look(0, 2, 1, tokens=10), look(1, 1, tokens=25), (3, 3), 0),
        (look(0, 1, tokens=10), look(1, 2, 1, tokens=25), (3, 3), 0),
        (look(0, 1, tokens=10), look(1, 1, tokens=25), (3, 4), 0),
        (look(0, 1), look(1, 1, tokens=25), (3, 3), 0),
        (look(0, 1, tokens=10), look(1, 1), (3, 3), 0),
        (look(0, 1, tokens=10), look(1, 1, tokens=9), (3, 3), 0),
    ],
)
def test_only_what_nobody_can_have_waited_for_is_wasted(
    before: Look, after: Look, granted: tuple[int, int], wasted: float
) -> None:
    waste = Waste()
    waste.take(before, granted[0])
    waste.take(after, granted[1])
    assert waste.tokens == wasted
    waste.forget()
    waste.take(look(2, 1, tokens=1000), granted[1])
    assert waste.tokens == wasted
