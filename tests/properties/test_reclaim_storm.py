"""Ten thousand requests on real tasks, most of them cut short: capacity is exact, then and afterwards."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gateway.admission import Admission
from gateway.config import Engine as Settings
from gateway.config import Kind
from gateway.engine import Call, Engine
from gateway.errors import Code, EngineError, GatewayError
from gateway.ghosts import Reclaim
from gateway.ledger import Slot
from gateway.profiles import Work
from gateway.reclaim import Reclaimer
from gateway.words import ReclaimedBy
from tests.simulated import Answer, pieces
from tests.tickets import ticket_for

VISITS = 10_000
SECONDS = 200.0
BOUND = 1.0
KINDS: tuple[tuple[Kind, int], ...] = (("vllm", 8), ("vllm", 3), ("ollama", 4))


class Way:
    """An engine that counts, without lag; sometimes it can't be asked, sometimes it has gone."""

    def __init__(self, dice: random.Random) -> None:
        self.until: list[tuple[float, int]] = []
        self.running = 0
        self.well = False
        self._dice = dice

    @property
    def busy(self) -> int:
        """What it runs now, for us and for nobody."""
        now = trio.current_time()
        self.until = [each for each in self.until if each[0] > now]
        return self.running + sum(cost for _, cost in self.until)

    @asynccontextmanager
    async def open(self, call: Call) -> AsyncIterator[Answer]:
        await trio.lowlevel.checkpoint()
        mood = 1.0 if self.well else self._dice.random()
        if mood < 0.02:
            self.until.clear()
            raise EngineError(Code.NO_ENGINE, "The engine can't be reached.", absent=True)
        if mood < 0.05:
            await trio.sleep(3)
        page = f"vllm:num_requests_running {self.busy}\nvllm:num_requests_waiting 0\n"
        yield Answer(500 if mood < 0.2 else 200, pieces(page.encode()), b"text/plain")

    def connect_within(self, seconds: float) -> None: ...

    async def aclose(self) -> None:
        """Nothing is idle here."""


class Storm:
    """Visits to all engines, and what came of them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.admission = Admission(queue=100, queue_seconds=1)
        self.ways: dict[Engine, Way] = {}
        self.reclaimers: dict[Engine, Reclaimer] = {}
        self.happened: Counter[str] = Counter()
        self.taken = 0
        for number, (kind, slots) in enumerate(KINDS):
            way = Way(random.Random(f"{seed} way {number}"))
            made = Settings(
                name=f"e{number}",
                kind=kind,
                url="http://e",
                slots=slots,
                models=("*",),
                reclaim_seconds=BOUND,
            )
            engine = Engine(made, way, host=b"e", prefix=b"")
            self.ways[engine] = way
            self.reclaimers[engine] = Reclaimer(engine, give_back=self.give_back, known=self.known)

    async def rage(self) -> None:
        async with trio.open_nursery() as poll:
            for reclaimer in self.reclaimers.values():
                poll.start_soon(reclaimer.run)
            async with trio.open_nursery() as nursery:
                for number in range(VISITS):
                    nursery.start_soon(self.visit, random.Random(f"{self.seed} {number}"))
            for way in self.ways.values():
                way.well = True
            with trio.fail_after(BOUND + 0.1):
                for reclaimer in self.reclaimers.values():
                    await reclaimer.none_left()
            await trio.sleep(20)  # The longest of the ghosts end, and are seen to have.
            poll.cancel_scope.cancel()

    async def visit(self, dice: random.Random) -> None:
        await trio.sleep(dice.random() * SECONDS)
        engines = dice.sample(list(self.ways), dice.randint(1, len(self.ways)))
        ticket = ticket_for(self.admission, engines, dice.choice([1, 1, 1, 2]))
        with trio.move_on_after(dice.choice([0, 0.01, 0.1, 0.3, 0.6, 8])) as scope:
            try:
                async with self.admission.slot(ticket, waiting=lambda: None) as (engine, slot):
                    await self.work(engine, slot, dice)
            except GatewayError as error:
                self.happened[error.code] += 1
        if scope.cancelled_caught:
            self.happened["cancelled"] += 1

    async def work(self, engine: Engine, slot: Slot, dice: random.Random) -> None:
        way = self.ways[engine]
        self.check(engine)
        await trio.sleep(dice.choice([0, 0, 0.01]))
        slot.written = trio.current_time()
        way.running += slot.cost
        try:
            await trio.sleep(dice.choice([0.05, 0.2, 0.5]))
        except trio.Cancelled:
            goes_on = dice.choice([0, 0, 0, 0.05, 0.3, 8 if dice.random() < 0.2 else 0])
            way.until.append((trio.current_time() + goes_on, slot.cost))
            way.running -= slot.cost
            self.taken += 1
            self.reclaimers[engine].take(slot, Work("/", "x", slot.cost), decoding=dice.random() < 0.7)
            self.check(engine)
            raise
        way.running -= slot.cost
        self.reclaimers[engine].ended.add(trio.current_time(), slot.cost)
        self.happened["ended"] += 1

    def give_back(self, engine: Engine, slot: Slot) -> None:
        self.admission.give_back(engine, slot)
        self.check(engine)

    def known(self, engine: Engine, reclaim: Reclaim) -> None:
        assert reclaim.by is not None
        self.happened[reclaim.by] += 1
        late = trio.current_time() - reclaim.closed - BOUND
        assert late < 1e-6 if reclaim.by is ReclaimedBy.ENGINE_IDLE else abs(late) < 1e-6
        self.check(engine)

    def check(self, engine: Engine) -> None:
        now = engine.ledger.statement()
        assert now.balanced, now
        assert 0 <= now.running + now.reclaiming + now.ghosts <= now.slots, now

    def check_the_end(self) -> None:
        assert self.admission.waiting == 0
        assert sum(self.happened[by] for by in ReclaimedBy) == self.taken
        for engine in self.ways:
            now = engine.ledger.statement()
            assert (now.running, now.reclaiming, now.ghosts, now.free) == (0, 0, 0, now.slots), now
            assert now.balanced
            for _ in range(now.slots):
                engine.ledger.grant(1)
            with pytest.raises(trio.WouldBlock):
                engine.ledger.grant(1)


@pytest.mark.parametrize("seed", [1, 2])
async def test_after_a_storm_of_aborts_capacity_is_exact(
    seed: int, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = trio._core._run
    monkeypatch.setattr(run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    run._r.seed(seed)
    storm = Storm(seed)
    await storm.rage()
    storm.check_the_end()
    # Everything that can happen has happened, and often.
    for what in ("cancelled", "ended", *ReclaimedBy):
        assert storm.happened[what] > 20, storm.happened
