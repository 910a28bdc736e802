"""Whatever clients and engines do, and whenever: no slot is lost, none is given twice, and an honest engine
never gets more than it has slots for.

A plan is a list of things that happen, with the pauses between them. It is carried out in virtual time by a
whole gateway in front of engines that are reckoned (:mod:`tests.simulated`). After each change of an engine's
books, and whenever a request is written to an engine, all that must hold is looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any
from unittest import mock

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from gateway import config
from gateway.engine import Engine
from gateway.gateway import Gateway
from gateway.ghosts import Reclaim
from gateway.ledger import Ledger, Slot
from gateway.request import Request
from gateway.words import ReclaimedBy
from tests.fakes import CANCELLED, FakeClient, Rig
from tests.simulated import LONGER, Gauges, Job, SimulatedEngine

PLAIN = settings(deadline=None, derandomize=True, max_examples=80)

STEP = 0.015
"""Of the engines. A request is in their gauges within two of these, which is what a profile takes for one."""
BOUND = 1.5
SETTLED = LONGER + 2 * BOUND + 15
"""Then everything is over, and the poller has looked again."""
TINY = 1e-6


# What may happen.


@dataclass(frozen=True)
class Come:
    """A request for one engine, or for whichever is free."""

    job: Job
    to: int | None = None


@dataclass(frozen=True)
class Leave:
    """One of the clients that are there goes, or an operator ends its request."""

    which: int
    operator: bool = False


@dataclass(frozen=True)
class Storm:
    """All clients go at once."""


@dataclass(frozen=True)
class Restart:
    engine: int
    down: float = 0.0


@dataclass(frozen=True)
class Change:
    """What an engine says of itself, and what others have it do."""

    engine: int
    gauges: Gauges = "true"
    foreign: int = 0


Event = Come | Leave | Storm | Restart | Change


@dataclass(frozen=True)
class Plan:
    slots: tuple[int, ...]
    modes: tuple[config.Reclaim, ...]
    kinds: tuple[config.Kind, ...]
    events: list[tuple[float, Event]]


class Books(Ledger):
    """A ledger that is looked at after each change."""

    def __init__(self, slots: int, changed: Callable[[str, Slot], None]) -> None:
        super().__init__(slots)
        self._tell = changed

    def grant(self, cost: int, tokens: int = 0) -> Slot:
        slot = super().grant(cost, tokens)
        self._tell("grant", slot)
        return slot

    def hand_over(self, slot: Slot) -> None:
        super().hand_over(slot)
        self._tell("hand over", slot)

    def haunt(self, slot: Slot) -> None:
        super().haunt(slot)
        self._tell("haunt", slot)

    def give_back(self, slot: Slot) -> None:
        super().give_back(slot)
        self._tell("give back", slot)


@dataclass
class Side:
    """One engine, and what was seen of it."""

    engine: Engine
    real: SimulatedEngine
    mode: config.Reclaim
    handed_over: dict[Slot, float] = field(default_factory=dict)
    excused: float = 0
    """Sequences it may have beyond its slots: what was let go unproven. It is 0 again once it is idle."""
    lied: bool = False


class World:
    """A gateway, its engines and its clients."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.jobs: list[Job] = []
        self.clients: list[FakeClient] = []
        self.ended: Counter[Request] = Counter()
        self.over: dict[Reclaim, ReclaimedBy] = {}
        self.facts: dict[int, set[str]] = {}
        self.seen: Counter[str] = Counter()
        self.sides: list[Side] = []
        for number, slots in enumerate(plan.slots):
            self.sides.append(self._side(number, slots))
        self.gateway = Gateway(
            config.Config(engine=tuple(each.engine.settings for each in self.sides)),
            [each.engine for each in self.sides],
            ended=lambda request: self.ended.update([request]),
            reclaimed=self.reclaimed,
        )
        self.rig = Rig(self.gateway, [], [])

    def _side(self, number: int, slots: int) -> Side:
        real = SimulatedEngine(self.jobs, step=STEP)
        made = config.Engine(
            name=f"e{number}",
            kind=self.plan.kinds[number],
            url="http://e",
            slots=slots,
            models=("m", f"m{number}"),
            reclaim=self.plan.modes[number],
            reclaim_seconds=BOUND,
        )
        side = Side(Engine(made, real, host=b"e", prefix=b""), real, made.reclaim)
        side.engine.ledger = Books(slots, lambda what, slot: self.changed(side, what, slot))
        real.written = lambda which: self.written(side, which)
        real.sent = lambda which, what: self.facts[which].add(what)
        return side

    # Carrying it out.

    async def run(self) -> None:
        with trio.fail_after(1000):
            async with trio.open_nursery() as nursery:
                for reclaimer in self.gateway.reclaimers.values():
                    nursery.start_soon(reclaimer.run)
                for pause, event in self.plan.events:
                    await trio.sleep(pause)
                    self.happen(event, nursery)
                await self.settle()
                nursery.cancel_scope.cancel()
        self.check_the_end()

    def happen(self, event: Event, nursery: trio.Nursery) -> None:
        match event:
            case Come(job, to):
                self.come(job, "m" if to is None else f"m{to % len(self.sides)}", nursery)
            case Leave(which, operator):
                there = self.there()
                if there and operator:
                    there[which % len(there)].request.stop(CANCELLED)
                elif there:
                    there[which % len(there)].leave()
            case Storm():
                for each in self.there():
                    each.leave()
            case Restart(number, down):
                self.sides[number % len(self.sides)].real.restart(down=down)
            case Change(number, gauges, foreign):
                side = self.sides[number % len(self.sides)]
                side.real.gauges, side.real.foreign = gauges, foreign
                side.lied |= gauges == "zero"

    def come(self, job: Job, model: str, nursery: trio.Nursery) -> None:
        number = len(self.jobs)
        self.jobs.append(job)
        self.facts[number] = set()
        body = f'{{"model":"{model}","stream":true,"n":{job.cost},"user":"{number}"}}'
        client = FakeClient(body.encode())
        self.clients.append(client)
        nursery.start_soon(self.rig.serve, client)

    def there(self) -> list[FakeClient]:
        return [each for each in self.clients if hasattr(each, "request") and not each.ended.is_set()]

    async def settle(self) -> None:
        """Have everything be well, everybody go, and time pass."""
        await trio.sleep(0.5)
        for side in self.sides:
            side.real.gauges, side.real.foreign = "true", 0
        for each in self.there():
            each.leave()
        await trio.sleep(SETTLED)

    # What must hold.

    def changed(self, side: Side, what: str, slot: Slot) -> None:
        self.check_books(side)
        now = trio.current_time()
        self.seen[what] += 1
        if what == "hand over":
            assert side.mode == "enforce", "kept though nothing is enforced"
            assert slot.written < inf, "kept though the engine has nothing of it"
            side.handed_over[slot] = now
        elif what in ("haunt", "give back"):
            since = side.handed_over.pop(slot, now)
            assert now <= since + BOUND + TINY, f"it was reclaimed for {now - since} s"
        for since in side.handed_over.values():
            assert now <= since + BOUND + TINY, "it is overdue"

    def check_books(self, side: Side) -> None:
        now = side.engine.ledger.statement()
        assert now.balanced, now
        assert now.running + now.reclaiming + now.ghosts + now.free == now.slots, now
        assert now.acquired - now.released == now.running + now.reclaiming + now.ghosts, now
        assert min(now.running, now.reclaiming, now.ghosts, now.free) >= 0, now

    def written(self, side: Side, number: int) -> None:
        busy, cost = side.real.busy, self.jobs[number].cost
        if busy == cost:
            side.excused = 0
        if self.gateway.reclaimers[side.engine].foreign:
            side.excused = inf
        if side.mode == "enforce" and not side.lied:
            assert busy <= side.engine.ledger.slots + side.excused, (
                f"{busy} sequences on {side.engine}, {side.excused} excused"
            )

    def reclaimed(self, engine: Engine, reclaim: Reclaim) -> None:
        assert reclaim not in self.over, "a reclaim ended twice"
        assert reclaim.by is not None
        self.over[reclaim] = reclaim.by
        self.seen[reclaim.by] += 1
        side = self.sides[self.gateway.engines.index(engine)]
        if reclaim.by is ReclaimedBy.BOUND:
            side.excused += reclaim.cost
            assert abs(trio.current_time() - reclaim.closed - BOUND) < TINY
        if reclaim.by is ReclaimedBy.ENGINE_IDLE:
            assert reclaim.seconds is not None
            assert 0 <= reclaim.seconds <= BOUND

    def check_the_end(self) -> None:
        for side in self.sides:
            self.check_books(side)
            now = side.engine.ledger.statement()
            assert (now.free, now.acquired) == (now.slots, now.released), now
            looks = side.real.looks
            closest = min((b - a for a, b in pairwise(looks)), default=inf)
            assert closest > STEP - TINY, f"two looks within {closest} s"
        assert self.gateway.admission.waiting == len(self.gateway.requests) == 0
        assert set(self.ended.values()) <= {1}
        assert len(self.ended) == len(self.clients)
        known = set(self.over)
        for number, client in enumerate(self.clients):
            known -= {self.check_record(client.request, self.facts[number])}
        assert not known, "more reclaims than requests"

    def check_record(self, request: Request, facts: set[str]) -> Any:
        record, reclaim = request.record(), request.reclaim
        self.seen[f"{record['phase']} {record['outcome']}"] += 1
        cut = "written" in facts and not facts & {"refused", "last event", "end"}
        assert (reclaim is not None) == cut, f"{record}: {facts}"
        if reclaim is not None:
            assert isinstance(reclaim, Reclaim)
            assert record["reclaimed_by"] == self.over[reclaim]
            assert (record["reclaim_ms"] is None) == (reclaim.by is ReclaimedBy.NONE)
        return reclaim


# Plans.

SOON = st.sampled_from([0.0, 0.0, 0.001, 0.004, 0.009, 0.016, 0.02, 0.033])
PAUSES = st.one_of(SOON, SOON, SOON, st.sampled_from([0.06, 0.12, 0.4, 1.1, 1.6, 2.5]))

JOBS = st.builds(
    Job,
    cost=st.sampled_from([1, 1, 1, 2]),
    connect=st.sampled_from([0.0, 0.0, 0.01]),
    prefill=st.sampled_from([0.0, 0.005, 0.04, 0.3]),
    tokens=st.sampled_from([1, 3, 40, 400]),
    gap=st.sampled_from([0.005, 0.02]),
    ends=st.sampled_from(["well", "well", "well", "refused", "stale", "breaks off", "without a last event"]),
    stops=st.sampled_from([0.0, 0.0, 0.03, 0.2, 0.7, "never"]),
    lingers=st.sampled_from([0.0, 0.05]),
)
COMES = st.builds(Come, JOBS, st.sampled_from([None, 0, 0, 1]))
LEAVES = st.builds(Leave, st.integers(0, 9), st.sampled_from([False, False, True]))
RESTARTS = st.builds(Restart, st.integers(0, 1), st.sampled_from([0.0, 0.0, 0.05, 2.0]))
BROKEN = st.builds(Change, st.integers(0, 1), st.sampled_from(["true", "slow", "hang", "500", "garbage"]))
LYING = st.builds(
    Change, st.integers(0, 1), st.sampled_from(["true", "high", "zero"]), st.sampled_from([0, 0, 1, 3])
)
HONEST = st.one_of(COMES, COMES, COMES, LEAVES, LEAVES, st.just(Storm()), RESTARTS)
ANYTHING = st.one_of(COMES, COMES, COMES, LEAVES, LEAVES, st.just(Storm()), RESTARTS, BROKEN, LYING)


BUSY_JOBS = st.builds(
    Job,
    cost=st.sampled_from([1, 1, 2]),
    prefill=st.sampled_from([0.0, 0.005, 0.02, 0.04]),
    tokens=st.sampled_from([1, 3, 400]),
    gap=st.sampled_from([0.005, 0.02]),
    stops=st.sampled_from([0.2, 0.7, "never"]),
)
BUSY = st.one_of(st.builds(Come, BUSY_JOBS), st.builds(Come, BUSY_JOBS), LEAVES)
BUSY_PLANS = st.builds(
    Plan,
    slots=st.tuples(st.integers(3, 6)),
    modes=st.just(("enforce",)),
    kinds=st.just(("vllm",)),
    events=st.lists(st.tuples(SOON, BUSY), min_size=40, max_size=120),
)


@st.composite
def plans(draw: st.DrawFn, events: st.SearchStrategy[Event], *modes: config.Reclaim) -> Plan:
    engines = draw(st.integers(1, 2))
    many = st.lists(st.tuples(PAUSES, events), min_size=20, max_size=80)
    return Plan(
        slots=tuple(draw(st.integers(2, 4)) for _ in range(engines)),
        modes=tuple(draw(st.sampled_from(modes)) for _ in range(engines)),
        kinds=tuple(draw(st.sampled_from(["vllm", "vllm", "vllm", "ollama"])) for _ in range(engines)),
        events=draw(many),
    )


def carry_out(plan: Plan) -> Counter[str]:
    async def main() -> Counter[str]:
        run._r.seed(0)
        world = World(plan)
        await world.run()
        return world.seen

    run: Any = trio._core._run  # Who goes first at one instant is its to say; here always in the same way.
    with mock.patch.object(run, "_ALLOW_DETERMINISTIC_SCHEDULING", True):
        return trio.run(main, clock=MockClock(autojump_threshold=0))


@PLAIN
@given(BUSY_PLANS)
def test_nor_where_requests_come_and_go_faster_than_its_gauges(plan: Plan) -> None:
    carry_out(plan)


@PLAIN
@given(plans(HONEST, "enforce"))
def test_an_honest_engine_never_gets_more_than_its_slots(plan: Plan) -> None:
    carry_out(plan)


@PLAIN
@given(plans(ANYTHING, "enforce", "enforce", "observe", "off"))
def test_no_slot_is_lost_or_given_twice_whatever_engines_do(plan: Plan) -> None:
    carry_out(plan)
