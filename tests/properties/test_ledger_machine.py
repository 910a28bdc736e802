"""After every step the books of an engine hold: what is held and free is all, and all that was acquired."""

from __future__ import annotations

import pytest
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from gateway.ledger import Ledger, Slot


class Books(RuleBasedStateMachine):
    """A ledger beside the simplest one there could be: a list of costs."""

    held = Bundle("held")
    returned = Bundle("returned")

    @initialize(slots=st.integers(1, 12))
    def open(self, slots: int) -> None:
        self.slots = slots
        self.ledger = Ledger(slots)
        self.costs: list[int] = []
        self.acquired = 0

    @rule(target=held, cost=st.integers(1, 14))
    def grant(self, cost: int) -> object:
        if cost > self.slots - sum(self.costs):
            before = self.ledger.statement()
            with pytest.raises(trio.WouldBlock):
                self.ledger.grant(cost)
            assert self.ledger.statement() == before
            return multiple()
        slot = self.ledger.grant(cost)
        assert slot.cost == cost
        self.costs.append(cost)
        self.acquired += cost
        return slot

    @rule(target=returned, slot=consumes(held))
    def give_back(self, slot: Slot) -> Slot:
        self.ledger.give_back(slot)
        self.costs.remove(slot.cost)
        return slot

    @rule(slot=returned)
    def give_back_again(self, slot: Slot) -> None:
        with pytest.raises(KeyError):
            self.ledger.give_back(slot)

    @rule(slot=held)
    def give_back_elsewhere(self, slot: Slot) -> None:
        with pytest.raises(KeyError):
            Ledger(self.slots).give_back(slot)

    @invariant()
    def holds(self) -> None:
        now = self.ledger.statement()
        assert now.running == sum(self.costs) <= now.slots == self.slots
        assert now.running + now.reclaiming + now.ghosts + now.free == now.slots
        assert now.acquired - now.released == now.running + now.reclaiming + now.ghosts
        assert now.acquired == self.acquired
        assert now.balanced


TestBooks = Books.TestCase
TestBooks.settings = settings(deadline=None, derandomize=True, max_examples=60, stateful_step_count=40)
