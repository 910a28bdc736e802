"""An engine that is reckoned, not run: what it does at an instant follows from what it was sent and when.

It works in steps of a fixed length. A request that arrives is taken up by the next step, and is in the
gauges from that step's end; one that ends is in them until the end of its step. So an honest engine's
gauges lag by a step in both directions, as vLLM's do.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import ceil, floor, inf
from typing import Literal

import trio

from gateway.engine import Call, relay_each
from gateway.errors import Code, EngineError
from gateway.words import RawHeaders

EVENT = b'data: {"x":1}\n\n'
LAST = b"data: [DONE]\n\n"

Stops = float | Literal["never"]
Ends = Literal["well", "refused", "stale", "breaks off", "without a last event"]
Gauges = Literal["true", "slow", "hang", "500", "garbage", "high", "zero"]

LONGER = 6.0
"""How long the engine goes on with what it never stops, past the close."""


@dataclass
class Job:
    """What the engine is to do with one request. All in seconds.

    ``stops``: how long it goes on after the close, then to the end of the step; in the prefill it
    doesn't notice before that is over. ``lingers``: from its last event, or the
    beginning of a refusal, to the body's end.
    """

    cost: int = 1
    connect: float = 0.0
    prefill: float = 0.0
    tokens: int = 2
    gap: float = 0.02
    ends: Ends = "well"
    stops: Stops = 0.0
    lingers: float = 0.0


@dataclass(eq=False)
class Sequence:
    """A request on the engine, until ``over``."""

    job: Job
    since: float
    process: int
    over: float = inf
    reset: trio.Event = field(default_factory=trio.Event)


class Answer:
    """An answer that was written down beforehand, pauses and all (`gateway.engine.Answer`)."""

    def __init__(self, status: int, body: AsyncIterator[bytes], media: bytes) -> None:
        self.status = status
        self.headers: RawHeaders = [(b"Content-Type", media)]
        self._body = body

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return await anext(self._body, b"")

    async def relay(self, take: Callable[[bytes], int], most: int) -> bool:
        return await relay_each(self, take)


class SimulatedEngine:
    """The way to it, too (`gateway.engine.Transport`). ``jobs`` are found by a request's "user"."""

    def __init__(self, jobs: list[Job], *, step: float) -> None:
        self.gauges: Gauges = "true"
        self.foreign = 0
        self.looks: list[float] = []
        self.written: Callable[[int], None] = lambda number: None
        self.sent: Callable[[int, str], None] = lambda number, what: None
        self._jobs = jobs
        self._step = step
        self._process = 1
        self._started = trio.current_time()
        self._down_until = -inf
        self._all: list[Sequence] = []

    @property
    def busy(self) -> int:
        """Sequences that it really has."""
        now = trio.current_time()
        return sum(each.job.cost for each in self._all if each.over > now)

    def restart(self, *, down: float = 0.0) -> None:
        """Drop everything; listen again after ``down`` seconds."""
        now = trio.current_time()
        for each in self._all:
            each.over = min(each.over, now)
            each.reset.set()
        self._process += 1
        self._started = now + down
        self._down_until = now + down

    def connect_within(self, seconds: float) -> None: ...

    async def aclose(self) -> None:
        """Nothing is idle here."""

    @asynccontextmanager
    async def open(self, call: Call) -> AsyncIterator[Answer]:
        await trio.lowlevel.checkpoint()
        self._be_there()
        if call.target == b"/metrics":
            yield await self._metrics()
        elif call.method == b"GET":
            yield Answer(404, pieces(b"{}"), b"application/json")
        else:
            number = int(json.loads(call.body)["user"])
            async with self._chat(number, self._jobs[number], call) as answer:
                yield answer

    def _be_there(self) -> None:
        if trio.current_time() < self._down_until:
            raise EngineError(Code.NO_ENGINE, "The engine can't be reached.", absent=True)

    # Chats.

    @asynccontextmanager
    async def _chat(self, number: int, job: Job, call: Call) -> AsyncIterator[Answer]:
        await trio.sleep(job.connect)
        self._be_there()
        one = Sequence(job, trio.current_time(), self._process)
        call.connected()
        if job.ends == "stale" and not call.fresh:
            raise EngineError(Code.ENGINE_FAILED, "The engine failed before it answered.", stale=True)
        self.sent(number, "written")
        if job.ends == "refused":
            await self._pause(one, job.prefill)
            self.sent(number, "refused")
            refusal = self._refusal(one)
            try:
                yield Answer(400, refusal, b"application/json")
            finally:
                await refusal.aclose()
            return
        self._all.append(one)
        self.written(number)
        stream = self._stream(number, one)
        try:
            await trio.lowlevel.checkpoint()
            yield Answer(200, stream, b"text/event-stream")
        finally:
            await stream.aclose()
            if one.over == inf:
                one.over = self._end_after_close(one)

    async def _stream(self, number: int, one: Sequence) -> AsyncGenerator[bytes, None]:
        job = one.job
        await self._pause(one, job.prefill)
        for _ in range(job.tokens):
            yield EVENT
            await self._pause(one, job.gap)
        one.over = trio.current_time()
        if job.ends == "breaks off":
            one.over = inf  # The connection is lost, the engine works on.
            raise EngineError(Code.ENGINE_FAILED, "The engine's answer broke off: reset.")
        if job.ends == "without a last event":
            self.sent(number, "end")
            return
        self.sent(number, "last event")
        yield LAST
        await self._pause(one, job.lingers)

    async def _refusal(self, one: Sequence) -> AsyncGenerator[bytes, None]:
        yield b'{"error":'
        await self._pause(one, one.job.lingers)
        yield b"{}}"

    async def _pause(self, one: Sequence, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await one.reset.wait()
            raise EngineError(Code.ENGINE_FAILED, "The engine's answer broke off: reset.")

    def _end_after_close(self, one: Sequence) -> float:
        now = trio.current_time()
        if one.job.stops == "never":
            return now + LONGER
        noticed = max(now, one.since + one.job.prefill) + one.job.stops
        return self._step * ceil(noticed / self._step - 1e-9)

    # Gauges.

    def _counted(self) -> int:
        """What the step that ended last has published."""
        end = self._step * floor(trio.current_time() / self._step + 1e-9) + 1e-9
        return sum(
            each.job.cost
            for each in self._all
            if each.process == self._process
            and self._step * (ceil(each.since / self._step - 1e-9) + 1) <= end < each.over
        )

    async def _metrics(self) -> Answer:
        self.looks.append(trio.current_time())
        if self.gauges == "hang":
            await trio.Event().wait()
        if self.gauges == "500":
            return Answer(500, pieces(b"no"), b"text/plain")
        if self.gauges == "garbage":
            return Answer(200, pieces(b"vllm:num_requests_running many\n"), b"text/plain")
        if self.gauges == "slow":
            await trio.sleep(0.01)
        now, busy = trio.current_time(), self._counted() + self.foreign
        if self.gauges == "slow":
            await trio.sleep(0.01)
        elif self.gauges == "high":
            busy += 3
        elif self.gauges == "zero":
            busy = 0
        page = (
            f"vllm:num_requests_running {busy}\nvllm:num_requests_waiting 0\n"
            f"vllm:generation_tokens_total {(now - self._started) * 100}\n"
            f"process_start_time_seconds {self._started + 1e9}\n"
        )
        return Answer(200, pieces(page.encode()), b"text/plain")


async def pieces(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        await trio.lowlevel.checkpoint()
        yield piece
