"""Whoever comes, goes, gives up or retries, in whatever order: nobody waits who could go or is overtaken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.admission import Admission
from gateway.config import Engine as Settings
from gateway.engine import Engine
from gateway.errors import Code, GatewayError
from gateway.tickets import Ticket
from tests.tickets import ticket_for

PLAIN = settings(deadline=None, derandomize=True, max_examples=100)
QUEUE, QUEUE_SECONDS = 6, 9


@dataclass(frozen=True)
class Come:
    engines: frozenset[int]
    cost: int


@dataclass(frozen=True)
class Leave:
    """One of those inside goes, and may come back with its ticket."""

    who: int
    retries: bool


@dataclass(frozen=True)
class GiveUp:
    """One of those who wait is cancelled."""

    who: int


@dataclass(frozen=True)
class Pass:
    seconds: int


class AtOnce:
    """The next thing happens in the same tick."""


WANTED = st.sampled_from([{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 1, 2}]).map(frozenset[int])
STEPS = st.lists(
    st.one_of(
        st.builds(Come, WANTED, st.integers(1, 4)),
        st.builds(Come, WANTED, st.sampled_from([1, 2])),
        st.builds(Come, WANTED, st.just(1)),
        st.builds(Leave, st.integers(0, 20), st.booleans()),
        st.builds(GiveUp, st.integers(0, 20)),
        st.builds(Pass, st.integers(1, 3)),
        st.builds(AtOnce),
    ),
    min_size=30,
    max_size=60,
)


@dataclass(eq=False)
class Guest:
    ticket: Ticket
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    may_go: trio.Event = field(default_factory=trio.Event)
    engine: Engine | None = None
    left: bool = False
    refused: GatewayError | None = None

    @property
    def inside(self) -> bool:
        return self.engine is not None and not self.left

    @property
    def waits(self) -> bool:
        return self.engine is None and not self.left


class House:
    def __init__(self, nursery: trio.Nursery, slots: list[int]) -> None:
        way: Any = object()
        self.nursery = nursery
        self.admission = Admission(queue=QUEUE, queue_seconds=QUEUE_SECONDS)
        self.engines = [
            Engine(
                Settings(name=f"e{n}", kind="vllm", url="http://e", slots=count, models=("*",)),
                way,
                host=b"e",
                prefix=b"",
            )
            for n, count in enumerate(slots)
        ]
        self.guests: list[Guest] = []

    async def visit(self, guest: Guest) -> None:
        with guest.scope:
            try:
                async with self.admission.slot(guest.ticket, waiting=lambda: None) as (engine, _):
                    self.nobody_was_overtaken(guest, engine)
                    guest.engine = engine
                    await guest.may_go.wait()
            except GatewayError as error:
                guest.refused = error
        guest.left = True

    def nobody_was_overtaken(self, guest: Guest, engine: Engine) -> None:
        for other in self.guests:
            if other.ticket.queued and engine in other.ticket.engines:
                assert other.ticket.number > guest.ticket.number

    def start(self, ticket: Ticket) -> None:
        guest = Guest(ticket)
        self.guests.append(guest)
        self.nursery.start_soon(self.visit, guest)

    async def do(self, step: object) -> None:
        match step:
            case Come(engines, cost):
                wanted = [self.engines[n] for n in sorted(engines)]
                if cost <= max(engine.ledger.slots for engine in wanted):
                    self.start(ticket_for(self.admission, wanted, cost))
            case Leave(who, retries):
                inside = [guest for guest in self.guests if guest.inside]
                if inside:
                    guest = inside[who % len(inside)]
                    guest.may_go.set()
                    if retries:
                        await wait_all_tasks_blocked()
                        self.start(guest.ticket)
            case GiveUp(who):
                waiting = [guest for guest in self.guests if guest.waits]
                if waiting:
                    waiting[who % len(waiting)].scope.cancel()
            case Pass(seconds):
                await trio.sleep(seconds)

    def check(self) -> None:
        """What holds whenever everything stands still."""
        for engine in self.engines:
            now = engine.ledger.statement()
            assert now.balanced
            assert now.running == sum(g.ticket.cost for g in self.guests if g.inside and g.engine is engine)
            assert now.running <= now.slots
        waiting = [guest for guest in self.guests if guest.waits]
        assert self.admission.waiting == len(waiting)
        waiting.sort(key=lambda guest: guest.ticket.number)
        held_up: set[Engine] = set()
        for guest in waiting:
            assert trio.current_time() <= guest.ticket.deadline
            for engine in guest.ticket.engines:
                # No lost wake-up: whoever waits, waits behind somebody or for more than is free.
                assert engine in held_up or engine.ledger.free < guest.ticket.cost
            held_up.update(guest.ticket.engines)

    def check_the_end(self) -> None:
        self.check()
        assert not any(guest.waits or guest.inside for guest in self.guests)
        for engine in self.engines:
            now = engine.ledger.statement()
            assert (now.free, now.acquired) == (now.slots, now.released)
        for guest in self.guests:
            if guest.refused is not None:
                assert guest.engine is None
                assert guest.refused.code in (Code.QUEUE_FULL, Code.QUEUE_TIMEOUT)


@PLAIN
@given(st.lists(st.integers(1, 4), min_size=3, max_size=3), STEPS)
def test_order_and_books_hold_after_every_step(slots: list[int], steps: list[object]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            house = House(nursery, slots)
            for number, step in enumerate(steps, 1):
                await house.do(step)
                if not any(isinstance(then, AtOnce) for then in steps[number : number + 1]):
                    await wait_all_tasks_blocked()
                    house.check()
            await wait_all_tasks_blocked()
            while any(guest.inside for guest in house.guests):
                for guest in house.guests:
                    guest.may_go.set()
                await wait_all_tasks_blocked()
                house.check()
            await trio.sleep(QUEUE_SECONDS + 1)
        house.check_the_end()

    trio.run(main, clock=MockClock(autojump_threshold=0))
