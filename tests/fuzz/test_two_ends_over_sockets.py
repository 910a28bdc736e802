"""Ends of a request within two milliseconds, over real sockets: one outcome, one record, no slot lost.

`tests/properties/test_two_ends_at_once.py` knows the order to the checkpoint; here the kernel decides it, and
what the client saw tells which outcomes are possible.
"""

from __future__ import annotations

import os
import random
import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import h2.exceptions
import pytest
import trio

from tests.support.gateway import Gateway, Record, running_gateway
from tests.support.http1 import GONE, Truncated
from tests.support.routes import CHAT
from tests.support.scripted import Call, ScriptedEngine
from tests.support.scripts import Ending, Step, Stream, Whole
from tests.support.visitors import WAYS, Visitor, visit

SEED = int(os.environ.get("GATEWAY_TEST_SEED", "1"))
WITHIN_SECONDS = 0.002

FAILS = {Ending.NO_MARKER, Ending.FIN, Ending.RST}
WELL = {Ending.CLEAN, Ending.HELD}


@dataclass
class Meeting:
    """A request, and the ends that meet on it."""

    number: str
    ends: list[str] = field(default_factory=list)
    status: int = 0
    body: bytes = b""
    whole: bool = False
    """Whether the client saw the answer's clean end."""
    left: bool = False

    def __post_init__(self) -> None:
        dice = random.Random(f"{SEED}:{self.number}")
        self.dice = dice
        self.way = dice.choice(WAYS)
        self.ends = self.ends or dice.sample(["leaves", "operator", "engine"], dice.choice([2, 2, 3]))
        self.ending = dice.choice(list(Ending))
        self.streams = dice.random() < 0.8
        self.retried = dice.random() < 0.2
        self.opening = dice.choice([0, 2])
        self.go_on = trio.Event()

    def __str__(self) -> str:
        engine = self.ending if self.streams else "whole"
        return (
            f"{self.number}: {self.way}, {self.ends}, engine {engine} after {self.opening}; saw {self.body!r}"
        )

    async def answer(self, call: Call) -> None:
        """Be its engine."""
        if self.retried and call.nth > 0:
            self.retried = False
            await Step(self.go_on)()
            await (call.rst() if self.dice.random() < 0.5 else call.fin())
        elif self.streams:
            await Stream(tokens=3, pause_after=self.opening, until=self.go_on, ending=self.ending)(call)
        else:
            await Whole(takes=self.go_on)(call)

    async def take_part(self, gateway: Gateway, *, reached: trio.Event | None = None) -> None:
        """Be its client, and make the ends meet."""
        payload = {**CHAT.payload(stream=self.streams), "model": self.number}
        async with (
            visit(self.way, gateway.url, CHAT.path, payload) as visitor,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._read, visitor)
            request_id = await self._request_id(gateway)
            if reached is not None:
                await reached.wait()
            async with trio.open_nursery() as ends:
                for end in self.ends:
                    ends.start_soon(self._end, end, visitor, gateway, request_id)
            if self.left:
                nursery.cancel_scope.cancel()

    async def _request_id(self, gateway: Gateway) -> str:
        with trio.fail_after(3):
            while True:
                for request in gateway.service.gateway.requests:
                    if request.model == self.number and request.phase in ("queued", "prefill", "streaming"):
                        return request.id
                await trio.sleep(0.001)

    async def _read(self, visitor: Visitor) -> None:
        try:
            self.status = (await visitor.head()).status
            self.body = await visitor.rest()
            self.whole = True
        except Truncated as cut:
            self.body = cut.got
        except GONE:
            pass

    async def _end(self, end: str, visitor: Visitor, gateway: Gateway, request_id: str) -> None:
        await trio.sleep(self.dice.random() * WITHIN_SECONDS)
        if end == "leaves":
            with suppress(h2.exceptions.ProtocolError):  # It may have ended in the same moment.
                self.left = not self.whole
                await visitor.leave()
        elif end == "operator":
            await gateway.admin(f"/admin/requests/{request_id}", "DELETE")
        elif end == "engine":
            self.go_on.set()

    def check(self, records: list[Record]) -> None:
        (record,) = [record for record in records if record["model"] == self.number]
        outcome = record["outcome"]
        told = re.search(rb'"code": ?"(\w+)"', self.body)
        if self.left:
            assert outcome in self._possible(), f"{self}: {record}"
        elif self.whole and self.status == 200:
            assert (outcome, record["status"]) == ("completed", 200), f"{self}: {record}"
        else:
            assert outcome in self._possible() - {"completed", "client_gone"}, f"{self}: {record}"
            assert told is None or told[1].decode() == record["code"], f"{self}: {record}"

    def _possible(self) -> set[str]:
        """What it can come to, whoever is first."""
        possible = {"client_gone"} if "leaves" in self.ends else set()
        if "operator" in self.ends:
            possible.add("cancelled")
        if "deadline" in self.ends:
            possible.add("drained")
        if "engine" in self.ends:
            ends_well = not self.streams or self.ending in WELL
            possible |= {"completed"} if ends_well else {"engine_failed"} if self.ending in FAILS else set()
        return possible


class Meetings:
    """The engine of all meetings that are going on."""

    def __init__(self, *, slots: int) -> None:
        self.all: dict[str, Meeting] = {}
        self.engine = ScriptedEngine(self._script, slots=slots, models=("*",))

    async def _script(self, call: Call) -> None:
        await self.all[call.json["model"]].answer(call)

    def make(self, name: str, ends: list[str] | None = None) -> Meeting:
        self.all[name] = Meeting(name, ends or [])
        return self.all[name]

    async def check(self, gateway: Gateway) -> None:
        await gateway.recorded(len(self.all))
        if not gateway.ended.is_set():
            await gateway.live(0)  # Nobody is left who could write a second one.
        assert len(gateway.records) == len(self.all)
        for meeting in self.all.values():
            meeting.check(gateway.records)


async def test_ends_that_meet_on_running_requests() -> None:
    meetings = Meetings(slots=6)
    numbers = iter(range(120))

    async def meet(gateway: Gateway) -> None:
        for number in numbers:
            await meetings.make(f"running-{number}").take_part(gateway)

    async with running_gateway(meetings.engine, seconds=30) as gateway:
        async with trio.open_nursery() as nursery:
            for _ in range(meetings.engine.slots):
                nursery.start_soon(meet, gateway)
        await meetings.check(gateway)


async def test_ends_that_meet_while_the_queue_grants() -> None:
    meetings = Meetings(slots=1)
    async with running_gateway(meetings.engine, seconds=30) as gateway:
        for number in range(30):
            ahead = meetings.make(f"ahead-{number}", ["engine"])
            ahead.streams = False
            queued = meetings.make(f"queued-{number}")
            queued.go_on.set()  # It is answered as soon as it is granted, if it is.
            arrived = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(ahead.take_part, gateway, reached=arrived))
                with trio.fail_after(3):
                    await meetings.engine.until(lambda: meetings.engine.running == 1)
                nursery.start_soon(partial(queued.take_part, gateway, reached=arrived))
                await gateway.in_phase("queued")
                arrived.set()
            if "engine" not in queued.ends:
                queued.ends.append("engine")
        await meetings.check(gateway)


@pytest.mark.parametrize("round_", range(4))
async def test_ends_that_meet_as_the_drain_deadline_falls(round_: int) -> None:
    meetings = Meetings(slots=8)
    drain_seconds = 0.05
    async with running_gateway(meetings.engine, server={"drain_seconds": drain_seconds}) as gateway:
        all_there = trio.Event()
        async with trio.open_nursery() as nursery:
            for number in range(meetings.engine.slots):
                ends = ["leaves"] if number % 2 else ["engine"]
                meeting = meetings.make(f"drain-{round_}-{number}", [*ends])
                nursery.start_soon(partial(meeting.take_part, gateway, reached=all_there))
            with trio.fail_after(3):
                await meetings.engine.until(lambda: meetings.engine.running == meetings.engine.slots)
            gateway.service.drain()
            await trio.sleep(drain_seconds - WITHIN_SECONDS / 2)
            all_there.set()
        for meeting in meetings.all.values():
            meeting.ends.append("deadline")
        await gateway.ended.wait()
        await meetings.check(gateway)
