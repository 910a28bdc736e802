"""Ten thousand visits, cancelled in every phase, refused, late, failing: capacity is exact afterwards."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gateway.admission import Admission
from gateway.config import Engine as Settings
from gateway.engine import Engine
from gateway.errors import GatewayError
from tests.tickets import ticket_for

VISITS = 10_000
SECONDS = VISITS // 8
SLOTS = (1, 2, 5, 8)


class BrokenError(Exception):
    """What an engine's side may raise while the slot is held."""


class Storm:
    """All times are whole seconds, so that much happens in one and the same tick."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.admission = Admission(queue=25, queue_seconds=6)
        way: Any = object()
        self.engines = [
            Engine(
                Settings(name=f"e{n}", kind="vllm", url="http://e", slots=slots, models=("*",)),
                way,
                host=b"e",
                prefix=b"",
            )
            for n, slots in enumerate(SLOTS)
        ]
        self.running: Counter[Engine] = Counter()
        self.happened: Counter[str] = Counter()

    async def rage(self) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(VISITS):
                nursery.start_soon(self.visit, random.Random(f"{self.seed} {number}"))
            await trio.sleep(SECONDS - 20)
            self.admission.close()

    async def visit(self, dice: random.Random) -> None:
        await trio.sleep(dice.randrange(SECONDS))
        engines = dice.sample(self.engines, dice.randint(1, len(self.engines)))
        most = min(4, max(engine.ledger.slots for engine in engines))
        ticket = ticket_for(self.admission, engines, dice.randint(1, most))
        with trio.move_on_after(dice.choice([0, 1, 2, 3, 5, 8, 100])) as scope:
            for _ in range(dice.choice([1, 1, 1, 2, 3])):
                try:
                    async with self.admission.slot(ticket, waiting=self.note_waiting) as (engine, _):
                        await self.work(engine, ticket.cost, dice)
                except GatewayError as error:
                    self.happened[error.code] += 1
                    break
                except BrokenError:
                    self.happened["broke off"] += 1
        if scope.cancelled_caught:
            self.happened["cancelled"] += 1

    def note_waiting(self) -> None:
        self.happened["waited"] += 1

    async def work(self, engine: Engine, cost: int, dice: random.Random) -> None:
        self.running[engine] += cost
        try:
            self.happened["admitted"] += 1
            self.check(engine)
            await trio.sleep(dice.choice([0, 1, 1, 2, 4]))
            if dice.random() < 0.1:
                raise BrokenError
        finally:
            self.running[engine] -= cost

    def check(self, engine: Engine) -> None:
        now = engine.ledger.statement()
        assert self.running[engine] <= now.slots
        assert now.balanced
        # Granted and not yet entered counts as running too.
        assert now.running >= self.running[engine]

    def check_the_end(self) -> None:
        assert self.admission.waiting == 0
        for engine in self.engines:
            now = engine.ledger.statement()
            assert now.balanced
            assert (now.free, now.running, now.acquired) == (now.slots, 0, now.released)
            for _ in range(now.slots):
                engine.ledger.grant(1)
            with pytest.raises(trio.WouldBlock):
                engine.ledger.grant(1)


@pytest.mark.parametrize("seed", [1, 2])
async def test_after_a_storm_capacity_is_exact(seed: int, autojump_clock: MockClock) -> None:
    storm = Storm(seed)
    await storm.rage()
    storm.check_the_end()
    # Everything that can happen has happened, and often.
    for what in ("admitted", "waited", "cancelled", "broke off", "queue_full", "queue_timeout", "draining"):
        assert storm.happened[what] > 20, storm.happened
