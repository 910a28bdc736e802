"""The books of one engine: nothing is granted that isn't free, nothing is returned twice."""

from __future__ import annotations

import pytest
import trio

from gateway.ledger import Largest, Ledger, Slot, Statement


def test_an_idle_ledger() -> None:
    ledger = Ledger(4)
    assert ledger.statement() == Statement(
        slots=4, running=0, reclaiming=0, ghosts=0, free=4, acquired=0, released=0, balanced=True
    )


def test_a_grant_takes_its_cost_and_its_return_gives_all_of_it_back() -> None:
    ledger = Ledger(4)
    slot = ledger.grant(3)
    assert slot.cost == 3
    assert (ledger.running, ledger.free) == (3, 1)
    ledger.give_back(slot)
    assert (ledger.running, ledger.free) == (0, 4)
    now = ledger.statement()
    assert (now.acquired, now.released, now.balanced) == (3, 3, True)


def test_what_doesnt_fit_takes_nothing() -> None:
    ledger = Ledger(4)
    ledger.grant(2)
    before = ledger.statement()
    for cost in (3, 4, 100):
        with pytest.raises(trio.WouldBlock):
            ledger.grant(cost)
    assert ledger.statement() == before
    ledger.grant(2)
    assert ledger.free == 0
    with pytest.raises(trio.WouldBlock):
        ledger.grant(1)


def test_nothing_is_returned_twice() -> None:
    ledger = Ledger(2)
    slot, other = ledger.grant(1), ledger.grant(1)
    ledger.give_back(slot)
    with pytest.raises(KeyError):
        ledger.give_back(slot)
    assert (ledger.running, ledger.free) == (1, 1)
    ledger.give_back(other)
    assert ledger.statement().balanced


def test_a_slot_of_another_engine_is_not_taken() -> None:
    ledger, other = Ledger(2), Ledger(2)
    ledger.grant(1)
    with pytest.raises(KeyError):
        ledger.give_back(other.grant(1))
    assert (ledger.statement().balanced, other.statement().balanced) == (True, True)
    assert (ledger.free, other.free) == (1, 1)


def test_the_two_ways_of_keeping_the_books_are_compared() -> None:
    ledger = Ledger(2)
    slot = ledger.grant(1)
    assert ledger.statement().balanced
    # What a mistake would do: one way of keeping them is forgotten.
    ledger._running.discard(slot)
    assert not ledger.statement().balanced
    ledger._running.add(slot)
    ledger._limiter.release_on_behalf_of(slot.seats[0])
    assert not ledger.statement().balanced


def test_slots_are_told_apart_and_shown() -> None:
    ledger = Ledger(2)
    one, two = ledger.grant(1), ledger.grant(1)
    assert one != two
    assert isinstance(one, Slot)
    assert repr(ledger) == "<Ledger 2 running, 0 free of 2>"


def test_the_largest_of_late_is_known_and_forgotten_in_time() -> None:
    largest = Largest()
    assert (largest.slots, largest.tokens) == (0, 0)
    largest.note(3, 10)
    largest.note(1, 500)
    assert (largest.slots, largest.tokens) == (3, 500)
    for _ in range(1998):
        largest.note(1, 7)
    assert (largest.slots, largest.tokens) == (3, 500)
    largest.note(2, 7)
    assert (largest.slots, largest.tokens) == (2, 7)
