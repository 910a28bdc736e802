"""Whatever ends a request at one instant, and in whichever order that comes about: one outcome, one record.

Each race brings a request to a point of its life. Then several things happen at the same instant, a few
checkpoints apart, while Trio shuffles who runs first. What must be true is told from what the client was sent
and from what had happened when it was first said why the request ends: of that the first in the order of the
contract decides. A failure names its race; GATEWAY_TEST_SEED and the race's number make it again.
"""

from __future__ import annotations

import gc
import os
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import trio
from trio.testing import MockClock

from gateway.engine import Call
from gateway.errors import Code, EngineError, GatewayError
from gateway.words import Outcome, RawHeaders, first_outcome
from tests.fakes import (
    CANCELLED,
    CONNECTED,
    END,
    EVENT,
    HALF,
    LAST,
    OPENING,
    FakeCall,
    FakeClient,
    FakeTransport,
    Head,
    Script,
    broke_off,
    make_rig,
    stale,
)

SEED = int(os.environ.get("GATEWAY_TEST_SEED", "1"))
RACES = 10_000
PARTS = 4
SIDE_BY_SIDE = 10

INSTANT = 5.0
"""Seconds after a race's start: everything happens, and the deadline falls if that is one of the ends."""
NEVER = 50.0

JSON = Head(media=b"application/json")
REST = b"1}\n\n"
PIECE = b"data: %s\n\n" % (b"x" * 3000)


class Situation(NamedTuple):
    """How the engine brings a request there, and what it may do next."""

    before: Script
    next: tuple[Script, ...]
    failed: Script = ()
    """The call before this one, where this is the second try."""
    reads: bool = True
    queued: bool = False


UNREACHABLE = EngineError(Code.NO_ENGINE, "The engine can't be reached: refused.")

GOES_ON: tuple[Script, ...] = (
    (EVENT, LAST, END),
    (LAST, broke_off()),
    (broke_off(),),
    (END,),
    (EVENT, broke_off()),
    (HALF, broke_off()),
)
ANSWERS: tuple[Script, ...] = (
    *((Head(), *more) for more in GOES_ON),
    (Head(500, b"application/json"), b"{}", END),
)
CALLS: tuple[Script, ...] = (*((CONNECTED, *answer) for answer in ANSWERS), (UNREACHABLE,))

SITUATIONS = {
    "queued": Situation((), CALLS, queued=True),
    "connecting": Situation((), CALLS),
    "connecting once more": Situation((), CALLS, failed=(CONNECTED, stale())),
    "about to connect once more": Situation((CONNECTED,), ((stale(),),)),
    "before the head": Situation((CONNECTED,), ANSWERS),
    "before the first byte": Situation(OPENING, GOES_ON),
    "between two events": Situation((*OPENING, EVENT), GOES_ON),
    "within an event": Situation(
        (*OPENING, HALF), ((REST, LAST, END), (broke_off(),), (END,), (REST, broke_off()))
    ),
    "before the last event": Situation((*OPENING, EVENT), ((LAST, END), (LAST,), (LAST, broke_off()))),
    "in a whole answer": Situation((CONNECTED, JSON, b"["), ((b"]", END), (broke_off(),))),
    "with a full spool": Situation((*OPENING, EVENT, PIECE, PIECE), GOES_ON, reads=False),
    "all in the spool": Situation((*OPENING, EVENT, LAST), ((END,), (broke_off(),)), reads=False),
}

ENDS = ("leaves", "stalls", "operator", "drain", "deadline", "engine", "timeout", "reads on")
OFTEN = ("leaves", "engine")


class Client(FakeClient):
    """Is sent what the gateway writes until the gateway knows that it has left, as with a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = False
        """Whether the answer was written to its end."""

    @property
    def told(self) -> str | None:
        """The code in an answer or event of the gateway's own."""
        found = re.search(rb'"code":"(\w+)"', self.got)
        return found[1].decode() if found else None

    async def watch(self, request: object) -> None:
        """It doesn't read its request any more: that it has left is told by the server."""
        await trio.Event().wait()

    async def begin(self, status: int, headers: RawHeaders) -> None:
        await self._room()
        self.status = status
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def send(self, data: bytes) -> None:
        await self._room()
        self.sent.append(data)
        self.taken = self.taken or self.got.endswith(LAST) or (self.status != 200 and self.told is not None)
        # What is written stays written, also if the request is cancelled while the write returns.
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def settled(self) -> None:
        await self._room()

    async def finish(self) -> None:
        await self._room()
        self.finished = self.taken = True
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def _room(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._flowing.wait()


class Transport(FakeTransport):
    """Plays a script for each request, whenever it comes: the first for its first call, and so on."""

    def __init__(self) -> None:
        super().__init__([], [], "e0")
        self.scripts_of: dict[str, list[Script]] = {}

    @asynccontextmanager
    async def open(self, call: Call) -> AsyncIterator[FakeCall]:
        self.scripts = [self.scripts_of[_name_of(call)].pop(0)]
        async with super().open(call) as answer:
            yield answer

    def calls_of(self, name: str) -> int:
        return sum(_name_of(one.call) == name for one in self.calls)


def _name_of(call: Call) -> str:
    return dict(call.headers)[b"X-Name"].decode()


@dataclass
class Participant:
    """A request, and what it may come to."""

    client: FakeClient
    outcomes: set[Outcome]


class Race:
    """One request with its neighbours, and what happens to it at `INSTANT`."""

    def __init__(self, number: str) -> None:
        self.number = number
        self.dice = random.Random(number)
        self.name = self.dice.choice(sorted(SITUATIONS))
        self.situation = SITUATIONS[self.name]
        self.ends = {self.dice.choice(OFTEN), *self.dice.sample(ENDS, self.dice.choice([1, 1, 2, 3]))}
        if self.situation.reads:
            self.ends -= {"stalls", "reads on"}
        self.next = self.dice.choice(self.situation.next)
        self.happened: list[str] = []
        self.client = Client()
        self.go_on, self.others_end = trio.Event(), trio.Event()
        self.calls_when_over: int | None = None
        self.goes_on_for_nobody = False
        seconds = INSTANT if "timeout" in self.ends else NEVER
        self.rig = make_rig(
            slots=2,
            stream={"first_byte_seconds": seconds, "idle_seconds": seconds, "spool_bytes": 4096},
            admission={"queue_seconds": seconds if self.situation.queued else NEVER},
        )
        self.transport = Transport()
        self.rig.engine.transport = self.transport
        self.rig.transports[:] = [self.transport]
        self.all: dict[str, Participant] = {}

    def __str__(self) -> str:
        ends = ", ".join(sorted(self.ends))
        return f"race {self.number}: {self.name}, {ends}, the engine {self.next}; happened: {self.happened}"

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            await self._set(nursery)
            start = trio.current_time()
            async with trio.open_nursery() as now:
                for end in sorted(self.ends):
                    now.start_soon(self._happen, end, start + INSTANT, self.dice.randrange(7))
            await trio.sleep(0.5)  # Within it nothing falls due.
            away = {"gone", "stalled"} & set(self.happened)
            self.goes_on_for_nobody = bool(away) and not self.client.ended.is_set()
            self.go_on.set()
            self.others_end.set()
            self.client.read_on()

    async def _set(self, nursery: trio.Nursery) -> None:
        situation = self.situation
        drains, deadline = bool({"drain", "deadline"} & self.ends), "deadline" in self.ends
        waits: Script = (*OPENING, EVENT, 2.0, EVENT, self.others_end, LAST, END)
        whole: Script = (*OPENING, EVENT, EVENT, LAST, END)
        running = {Outcome.COMPLETED, *({Outcome.DRAINED} if deadline else ())}
        queueing = running | {*({Outcome.DRAINED} if drains else ())}
        if situation.queued and "timeout" in self.ends:
            queueing |= {Outcome.SHED}
        own: list[Script] = [(*situation.before, self.go_on, *self.next), whole]
        if situation.failed:
            own.insert(0, situation.failed)
        if not situation.reads:
            self.client.stop_reading()
        crowded = self.dice.random() < 0.15
        if crowded or situation.queued:
            await self._come(nursery, "bystander", FakeClient(), [waits], running)
        if situation.queued:
            await self._come(nursery, "ahead", FakeClient(), [waits], running)
        await self._come(nursery, "racer", self.client, own, set(Outcome))
        if crowded:
            await self._come(nursery, "successor", FakeClient(), [whole], queueing)
        self._listen()

    async def _come(
        self, nursery: trio.Nursery, name: str, client: FakeClient, scripts: list[Script], may: set[Outcome]
    ) -> None:
        self.all[name] = Participant(client, may)
        self.transport.scripts_of[name] = scripts

        async def serve() -> None:
            await self.rig.serve(client, headers=[(b"X-Name", name.encode())])

        nursery.start_soon(serve)
        await trio.testing.wait_all_tasks_blocked()

    def _listen(self) -> None:
        """Note when it is first said why the request ends: what comes later doesn't decide."""
        request = self.client.request
        say = request.failed

        def failed(error: GatewayError) -> None:
            if not any(each.startswith("said") for each in self.happened):
                self.happened.append(f"said {error.outcome}")
            say(error)

        request.failed = failed  # type: ignore[method-assign]

    # What happens.

    async def _happen(self, end: str, at: float, checkpoints: int) -> None:
        await trio.sleep_until(at)
        if end == "timeout":
            return  # The clocks do it.
        for _ in range(checkpoints):
            await trio.lowlevel.checkpoint()
        getattr(self, "_" + end.replace(" ", "_"))()

    def _note(self, what: str) -> bool:
        if self.client.ended.is_set():
            return False
        self.happened.append(what)
        if self.calls_when_over is None:
            self.calls_when_over = self.transport.calls_of("racer")
        return True

    def _leaves(self) -> None:
        if self._note("gone"):
            self.client.request.client_left()

    def _stalls(self) -> None:
        if self._note("stalled"):
            self.client.request.client_stalled()

    def _operator(self) -> None:
        if self._note("cancelled"):
            self.client.request.stop(CANCELLED)

    def _drain(self) -> None:
        if not self.client.request.dispatched_to_engine:
            self._note("drained")
        self.rig.gateway.drain()

    def _deadline(self) -> None:
        self._note("drained")
        self.rig.gateway.drain()
        self.rig.gateway.end_streams()

    def _engine(self) -> None:
        (self.others_end if self.situation.queued else self.go_on).set()

    def _reads_on(self) -> None:
        self.client.read_on()

    # What must be true.

    def check(self) -> Outcome:
        try:
            return self._check()
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"{self}: {error}") from error

    def _check(self) -> Outcome:
        rig, request = self.rig, self.client.request
        ids = [each.id for each in rig.ended]
        assert sorted(ids) == sorted(one.client.request.id for one in self.all.values())
        rig.assert_idle()
        assert not self.goes_on_for_nobody
        for name, one in self.all.items():
            other = one.client.request
            assert other.outcome in one.outcomes, f"the {name} was {other.outcome}: {other.error}"
            if name != "racer" and other.outcome is Outcome.COMPLETED:
                assert one.client.got == EVENT + EVENT + LAST
        if self.calls_when_over is not None:
            assert self.transport.calls_of("racer") == self.calls_when_over, "it was called for nobody"
        self._check_outcome(request.record())
        return request.outcome

    def _check_outcome(self, record: dict[str, object]) -> None:
        client, told = self.client, self.client.told
        outcome = record["outcome"]
        said = next((each for each in self.happened if each.startswith("said")), None)
        decisive = self.happened[: self.happened.index(said)] if said else self.happened
        stops = [Outcome(each) for each in decisive if each in ("cancelled", "drained")]
        away = next((each for each in self.happened if each in ("gone", "stalled")), None)
        if client.taken and told is None:
            assert (outcome, record["status"]) == (Outcome.COMPLETED, client.status)
        elif away is not None and not client.taken:
            assert outcome == "client_" + away
            assert record["status"] == 499
        elif stops:
            assert outcome == first_outcome(stops)
        else:
            assert said is not None
            assert outcome == said.removeprefix("said ")
        if told is not None and outcome not in (Outcome.CLIENT_GONE, Outcome.CLIENT_STALLED):
            assert told == record["code"], "the client was told another reason than the record"


async def run_side_by_side(races: list[Race]) -> None:
    """Each has a gateway of its own; together they cost half as much."""
    trio._core._run._r.seed(races[0].number)
    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            for race in races:
                nursery.start_soon(race.run)


@pytest.fixture
def light_collections() -> Iterator[None]:
    """Keep the collector from looking through all that pytest has loaded, again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("light_collections")
@pytest.mark.parametrize("part", range(PARTS))
async def test_of_ends_at_one_instant_the_first_of_the_order_decides(
    part: int, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: object = trio._core._run
    monkeypatch.setattr(run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    outcomes: Counter[Outcome] = Counter()
    for first in range(part * SIDE_BY_SIDE, RACES, PARTS * SIDE_BY_SIDE):
        races = [Race(f"{SEED}:{first + number}") for number in range(SIDE_BY_SIDE)]
        await run_side_by_side(races)
        outcomes.update(race.check() for race in races)
    assert set(outcomes) == set(Outcome) - {Outcome.REJECTED}, outcomes
