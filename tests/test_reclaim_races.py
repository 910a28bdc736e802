"""Reclaims where two things meet: a bound and a look, a restart and new work, new work and old gauges."""

from __future__ import annotations

from contextlib import suppress
from math import inf

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway import config
from gateway.attempt import Attempt
from gateway.clocks import EngineClock
from gateway.config import Stream
from gateway.engine import Engine
from gateway.errors import Code, EngineError
from gateway.events import Tail
from gateway.evidence import Lately, Look, Suspect, weigh
from gateway.ghosts import Reclaim
from gateway.ledger import Slot
from gateway.profiles import Load, Looks, Work
from gateway.reclaim import BACKGROUND_SECONDS, Reclaimer
from gateway.words import ReclaimedBy
from tests.fakes import make_request
from tests.simulated import Answer, Job, SimulatedEngine, pieces

LOOKS = Looks(decode=0.02, prefill=0.02, confirm=0.03, busy=0.03, slowest=0.25, uncounted=1.0)
BOUND = 1.0
WORK = Work("/v1/chat/completions", "x")


class Bench:
    """One reclaimer, and an engine that nobody but the test uses."""

    def __init__(self, slots: int = 4) -> None:
        self.jobs: list[Job] = []
        self.real = SimulatedEngine(self.jobs, step=0.01)
        made = config.Engine(
            name="e", kind="vllm", url="http://e", slots=slots, models=("*",), reclaim_seconds=BOUND
        )
        self.engine = Engine(made, self.real, host=b"e", prefix=b"")
        self.reclaimer = Reclaimer(
            self.engine, give_back=lambda engine, slot: engine.ledger.give_back(slot), known=self.note
        )
        self.known: list[tuple[float, ReclaimedBy | None]] = []

    def note(self, engine: Engine, reclaim: Reclaim) -> None:
        self.known.append((trio.current_time() - reclaim.closed, reclaim.by))

    def grant(self, cost: int = 1) -> Slot:
        slot = self.engine.ledger.grant(cost)
        slot.written = trio.current_time()
        return slot

    def cut(self, slot: Slot | None = None) -> Reclaim:
        return self.reclaimer.take(slot or self.grant(), WORK, decoding=True)


async def start(nursery: trio.Nursery) -> Bench:
    bench = Bench()
    nursery.start_soon(bench.reclaimer.run)
    await wait_all_tasks_blocked()
    return bench


async def test_the_bound_holds_though_a_look_from_before_still_waits(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    bench = await start(nursery)
    await trio.sleep(1)
    bench.real.gauges = "hang"
    await trio.sleep(BACKGROUND_SECONDS - 0.5)  # That look takes another second and a half.
    bench.cut()
    await trio.sleep(BOUND + 0.01)
    assert [(round(seconds, 6), by) for seconds, by in bench.known] == [(BOUND, ReclaimedBy.BOUND)]


async def test_bounds_one_after_the_other_dont_end_a_look(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    bench = await start(nursery)
    bench.real.gauges = "hang"
    for _ in range(4):
        bench.cut()
        await trio.sleep(0.05)
    await trio.sleep(BOUND)
    assert len(bench.known) == 4
    assert len(bench.real.looks) == 2, "it was asked anew for each"


async def test_a_new_process_goes_on_with_what_was_cut_on_it(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    bench = await start(nursery)
    await trio.sleep(1)
    bench.real.restart()
    bench.real.foreign = 1  # As the sequence that is cut now, on the new process.
    bench.cut()
    await trio.sleep(BOUND - 0.01)
    assert bench.known == []
    assert bench.engine.ledger.reclaiming == 1


async def test_a_restart_ends_what_was_cut_before_the_last_look(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    bench = await start(nursery)
    await trio.sleep(1)
    bench.real.foreign = 1
    bench.cut()
    await trio.sleep(0.5)
    bench.real.restart()
    await trio.sleep(0.3)
    assert [by for _, by in bench.known] == [ReclaimedBy.ENGINE_IDLE]


async def test_who_waits_for_all_reclaims_is_told_though_one_came_meanwhile(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    bench = await start(nursery)
    bench.cut()
    over = trio.Event()

    async def wait() -> None:
        await bench.reclaimer.none_left()
        over.set()

    nursery.start_soon(wait)
    await wait_all_tasks_blocked()
    bench.cut()
    with trio.fail_after(BOUND + 1):
        await over.wait()


async def test_what_was_just_written_doesnt_stand_for_what_was_cut(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    """The engine goes on with one sequence; each look finds a new request that isn't in its gauges yet."""
    bench = await start(nursery)
    await trio.sleep(1)
    bench.real.foreign = 1
    bench.cut()
    for _ in range(90):
        slot = bench.grant()
        await trio.sleep(0.01)
        bench.engine.ledger.give_back(slot)
    assert bench.known == []


async def test_what_has_just_ended_doesnt_stand_for_what_isnt_counted_yet(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    bench = await start(nursery)
    await trio.sleep(1)
    bench.real.foreign = 1  # As the sequence that ends now, in gauges a step old.
    bench.reclaimer.ended.add(trio.current_time(), 1)
    reclaim = bench.reclaimer.take(bench.grant(), WORK, decoding=False)
    await trio.sleep(0.029)
    assert len(bench.real.looks) == 2
    assert not reclaim.counted


async def test_an_engine_that_answers_with_errors_has_no_ghosts(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    bench = await start(nursery)
    bench.real.gauges = "500"
    bench.cut()
    await trio.sleep(BOUND + 0.1)
    assert [by for _, by in bench.known] == [ReclaimedBy.BOUND]


async def test_a_ghost_of_several_sequences_is_as_many(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    bench = await start(nursery)
    bench.real.foreign = 2
    bench.cut(bench.grant(2))
    await trio.sleep(BOUND + 10)
    assert bench.engine.ledger.ghosts == 2
    assert not bench.reclaimer.foreign


@pytest.mark.parametrize("how", ["refused", "done", "stale", "cut"])
async def test_only_what_was_cut_is_reclaimed(how: str, autojump_clock: MockClock) -> None:
    bench, request = Bench(), make_request()
    error = EngineError(Code.ENGINE_FAILED, "It is over.", stale=how == "stale")
    attempt = Attempt(request, bench.reclaimer, bench.grant(), ())
    attempt.open(b"{}", False, EngineClock(Stream()))
    attempt.answered(Answer(400 if how == "refused" else 200, pieces(), b"text/event-stream"), Tail())
    request.tail.done = how == "done"
    with suppress(EngineError), attempt:
        raise error
    assert (request.reclaim is not None) == (how == "cut")
    assert bench.engine.ledger.reclaiming == (how == "cut")


def look(busy: int, asked: float, *, own: int = 0, most: int = 0) -> Look:
    return Look(Load(busy, 0), asked, asked, own=own, most=most)


def test_what_isnt_counted_yet_isnt_taken_for_the_end_of_what_is() -> None:
    decoding = Suspect(closed=0.0, cost=1, counted=True)
    unseen = Suspect(closed=0.01, cost=1, counted=False)
    for asked in (0.1, 0.2, 0.3, 0.4):
        assert weigh(look(1, asked), [decoding, unseen], 0, LOOKS) == []
    assert weigh(look(0, 0.5), [decoding, unseen], 0, LOOKS) == []
    assert weigh(look(0, 0.6), [decoding, unseen], 0, LOOKS) == [decoding]


def test_a_look_that_new_requests_make_doubtful_says_nothing() -> None:
    suspect = Suspect(closed=0.0, cost=1, counted=True)
    assert weigh(look(0, 0.1), [suspect], 0, LOOKS) == []
    assert weigh(look(1, 0.2, own=0, most=1), [suspect], 0, LOOKS) == []
    assert not suspect.said_busy
    assert weigh(look(1, 0.3, own=1, most=1), [suspect], 0, LOOKS) == [suspect]


def test_what_has_ended_counts_for_a_while() -> None:
    lately = Lately()
    lately.add(1.0, 2)
    lately.add(2.0, 1)
    assert [lately.since(instant) for instant in (0.5, 1.5, 2.5)] == [3, 1, 0]
    lately.add(100.0, 1)
    assert lately.since(0.0) == 1


def test_a_look_older_than_our_requests_says_nothing() -> None:
    suspect = Suspect(closed=0.0, cost=1, counted=True)
    assert weigh(look(0, 0.1, own=1, most=1), [suspect], 0, LOOKS) == []
    assert weigh(look(0, 0.2, own=1, most=1), [suspect], 0, LOOKS) == []
    assert suspect.stopped_since == inf


def test_what_was_closed_since_a_look_began_isnt_in_it() -> None:
    suspect = Suspect(closed=0.1, cost=1, counted=True)
    assert weigh(look(0, 0.1), [suspect], 0, LOOKS) == []
    assert suspect.stopped_since == inf


def test_ghosts_account_for_as_many_others() -> None:
    suspect = Suspect(closed=0.0, cost=1, counted=True)
    assert weigh(look(1, 0.1), [suspect], 1, LOOKS) == []
    assert weigh(look(1, 0.2), [suspect], 1, LOOKS) == [suspect]
