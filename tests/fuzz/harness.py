"""Plays batches of cases against a gateway in this process, with bystanders, and looks whom they harmed.

After each batch: the bystanders' streams came whole and in order, the ledger is balanced and idle, the gauges
are zero, engines were spoken to in plain HTTP and never above their slots, and nobody had to be contained:
the log holds no warning but that of a flood. After all of them no descriptor, task or label set is left over.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import h2.exceptions
import trio

from tests.conftest import Tls
from tests.fuzz.cases import PLAIN, TLS, TO_THE_END, Case, make
from tests.fuzz.engines import Engine, Misbehave, Steady, obey
from tests.fuzz.oracles import FLOOD, Harm, Logs, check_answer, is_body, leaves, listening, same_stream
from tests.fuzz.seeds import MAX_BODY_BYTES
from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import GONE, Http1, Truncated, connect, http1
from tests.support.http2 import Http2, http2
from tests.support.routes import CHAT

BATCH = 24
LATEST_SECONDS = 2.0
"""A bystander's longest wait between two events. (Its engine's gap is 5 ms, but the machine may be busy.)"""

CLIENT_SECONDS = 2.0
"""How long a hostile client's sending may take: the gateway's back-pressure may have stopped it."""

BATCH_SECONDS = 20.0
RECORD_SECONDS = 1.0
LEFT_SECONDS = 15.0
"""How long connections may linger after their end."""

MOST_SERIES = 150


@dataclass
class Summary:
    """What a run came to."""

    cases: int = 0
    batches: int = 0
    floods: int = 0
    events: int = 0
    longest_wait: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        ended = ", ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items()))
        return (
            f"{self.cases} cases in {self.batches} batches, {self.floods} floods; records: {ended}; "
            f"bystanders: {self.events} events, longest wait {self.longest_wait * 1000:.0f} ms"
        )


class Fuzz:
    """One gateway and its cases."""

    def __init__(self, seed: int, *, tls: Tls | None = None) -> None:
        self.seed = seed
        self.tls = tls
        self.trusted = tls.trusted if tls else None  # made once: it reads the system's authorities
        self.kinds = TLS if tls else PLAIN
        self.summary = Summary()
        self.batch: list[Case] = []
        self.gateway: Gateway
        self.logs: Logs
        self.asking = trio.Lock()
        self.steady, self.misbehave = Steady(), Misbehave()
        self.hostile = Engine(self.misbehave, name="hostile", slots=8, kind="ollama", models=("hostile",))
        self.engines = (
            self.hostile,
            Engine(self.misbehave, name="content", slots=4, kind="ollama", models=("content",)),
            Engine(obey, name="model", slots=8, kind="ollama", models=("model",)),
            Engine(self.steady, name="bystander", slots=2, models=("bystander",)),
        )

    async def run(
        self, *, seconds: float = 0.0, batches: int = sys.maxsize, only: Iterable[int] | None = None
    ) -> Summary:
        """Play cases for so long, but no more than so many batches, or those ``only``. Raises Harm."""
        server: dict[str, Any] = {"max_body_bytes": MAX_BODY_BYTES, "body_seconds": 0.5}
        if self.tls:
            server["tls"] = self.tls.section
        try:
            with listening() as self.logs:
                async with running_gateway(
                    *self.engines,
                    server=server,
                    stream={"first_byte_seconds": 3, "idle_seconds": 3, "stall_seconds": 3},
                    admission={"queue": 16, "queue_seconds": 0.2},
                    seconds=seconds + 120,
                ) as self.gateway:
                    if only is not None:
                        await self._play(only)
                    else:
                        await self._play_for(seconds, batches)
        except (Harm, AssertionError, ExceptionGroup) as error:
            raise Harm(leaves(error)) from error
        return self.summary

    async def _play_for(self, seconds: float, batches: int) -> None:
        until = time.monotonic() + seconds
        before = None
        while time.monotonic() < until and self.summary.batches < batches:
            first = self.summary.batches * BATCH
            await self._play(range(first, first + BATCH))
            before = before or _left()
        if before:
            await self._nothing_more_than(before)

    async def _play(self, numbers: Iterable[int]) -> None:
        """Play one batch and look what it did."""
        self.batch = [make(self.seed, number, self.kinds) for number in numbers]
        self.misbehave.cases = {str(case.number): case for case in self.batch}
        self.gateway.records.clear()
        try:
            with trio.fail_after(BATCH_SECONDS):
                async with self._bystanders() as connection, trio.open_nursery() as nursery:
                    for case in self.batch:
                        nursery.start_soon(self._play_one, case, connection)
                await self._look()
        except (Harm, trio.TooSlowError, ExceptionGroup) as error:
            raise Harm(leaves(error)) from error
        self.summary.cases += len(self.batch)
        self.summary.batches += 1
        self.summary.outcomes.update(str(record["outcome"]) for record in self.gateway.records)

    async def _look(self) -> None:
        """Whether anything is left of a batch, or anybody had to be saved from it."""
        try:
            await self.gateway.idle()
        except AssertionError as error:
            raise Harm(f"not idle after the batch: {error}") from None
        with trio.move_on_after(RECORD_SECONDS):
            while self._unknown_calls() > 0:  # noqa: ASYNC110 - records are written a moment later
                await trio.sleep(0.01)
        if (unknown := self._unknown_calls()) > 0:
            raise Harm(f"engines were called {unknown} times more often than the records know of")
        if faults := [fault for engine in self.engines for fault in engine.look()]:
            raise Harm("; ".join(faults))
        lines = self.logs.take()
        floods = [line for line in lines if line.startswith(FLOOD)]
        self.summary.floods += len(floods)
        if len(lines) > len(floods):
            raise Harm(f"in the log: {[line for line in lines if line not in floods][:5]}")

    def _unknown_calls(self) -> int:
        calls = sum(call.method == "POST" for engine in self.engines for call in engine.calls)
        attempts: int = sum(record["attempts"] for record in self.gateway.records)
        return calls - attempts

    # Who mustn't be harmed.

    @asynccontextmanager
    async def _bystanders(self) -> AsyncIterator[Http2]:
        """A stream over each protocol. The HTTP/2 connection is lent to clients of the hostile engine."""
        payload = {**CHAT.payload(stream=True), "model": "bystander"}
        self.steady.enough = trio.Event()
        url = self.gateway.url
        async with http1(url, tls=self.trusted) as client, http2(url, tls=self.trusted) as connection:
            connection.h2.config.header_encoding = "latin-1"  # an engine's header may hold any byte
            await client.post(CHAT.path, payload)
            stream = await connection.post(CHAT.path, payload)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._follow, client)
                yield connection
                if connection.gone:
                    raise Harm("the bystanders' HTTP/2 connection has ended")
                await self._ask_plainly(connection)
                self.steady.enough.set()
                same_stream("HTTP/2", await stream.rest())

    async def _follow(self, client: Http1) -> None:
        """Read a bystander's stream to its end, and note its pauses."""
        await client.head()
        last = trio.current_time()
        while await client.piece() is not None:
            now = trio.current_time()
            self.summary.longest_wait = max(self.summary.longest_wait, now - last)
            last = now
        self.summary.events += client.got.count(b" tk")
        same_stream("HTTP/1.1", bytes(client.got))
        if self.summary.longest_wait > LATEST_SECONDS:
            raise Harm(f"a bystander waited {self.summary.longest_wait:.1f} s for its next event")

    async def _ask_plainly(self, connection: Http2) -> None:
        """What the hostile engine said to others mustn't be the answer to a plain question."""
        with trio.move_on_after(2):
            await self.hostile.until(lambda: self.misbehave.playing == 0)
        payload = {**CHAT.payload(stream=False), "model": "hostile"}
        for _ in range(3):
            answer = await connection.ask(CHAT.path, payload)
            if answer.body != CHAT.whole_bytes():
                raise Harm(f"a plain question was answered {answer.status} {answer.body[:300]!r}")

    # Who harms.

    async def _play_one(self, case: Case, connection: Http2) -> None:
        try:
            if case.kind in ("engine", "content"):
                await self._ask_hostile(case, connection)
            else:
                await self._send(case)
        except Harm as harm:
            raise Harm(f"{harm}\nby {case}") from None

    async def _send(self, case: Case) -> None:
        """Be the client of a case."""
        address, got = self.gateway.url, bytearray()
        if case.kind == "hello":
            address = address.replace("https", "http")
        alpn = ["h2" if case.kind == "http2" else "http/1.1"]
        client = Http1(await connect(address, tls=self.trusted, alpn=alpn))
        try:
            async with trio.open_nursery() as nursery:
                if case.reads:
                    nursery.start_soon(_drain, client, got)
                await self._say(case, client)
                await trio.sleep(case.dwell)
                nursery.cancel_scope.cancel()
        finally:
            await (client.reset() if case.ending == "reset" else client.close())
        if case.kind != "hello":
            check_answer(bytes(got))

    async def _say(self, case: Case, client: Http1) -> None:
        with trio.move_on_after(CLIENT_SECONDS), suppress(*GONE):
            for data, pause in zip(case.segments, case.pauses, strict=True):
                await client.send(data)
                await trio.sleep(pause)
            if case.ending == "half_close" and not self.tls:
                await client.half_close()

    async def _ask_hostile(self, case: Case, connection: Http2) -> None:
        """Be a client of the engine of a case, every other time over the bystanders' connection."""
        model = "content" if case.kind == "content" else "hostile"
        payload = {**case.route.payload(stream=True), "model": model}
        ask = self._ask_over_http2 if case.number % 2 else self._ask_over_http1
        got = b""
        with trio.move_on_after(case.dwell) as staying:
            got = await ask(case, payload, connection)
        if staying.cancelled_caught and case.dwell >= TO_THE_END:
            raise Harm(f"no end of the answer within {case.dwell} s")
        if case.kind == "content" and not is_body(case.body, got):
            raise Harm(f"the client got {got[:2000]!r} instead of the body {case.body[:2000]!r}")

    async def _ask_over_http1(self, case: Case, payload: Any, _connection: Http2) -> bytes:
        async with http1(self.gateway.url, tls=self.trusted) as client:
            try:
                await client.post(case.route.path, payload, {"x-case": str(case.number)})
                answer = await client.answer()
            except Truncated as cut:
                return cut.got
            except (AssertionError, ValueError) as error:
                raise Harm(f"the client got a malformed answer: {error!r}") from None
            if client.buffer:
                raise Harm(f"bytes behind the answer: {bytes(client.buffer[:300])!r}")
            return answer.body

    async def _ask_over_http2(self, case: Case, payload: Any, connection: Http2) -> bytes:
        # Frames that are made must be sent: what comes after them counts on their header table.
        async with self.asking:
            with trio.CancelScope(shield=True):
                stream = await connection.post(case.route.path, payload, {"x-case": str(case.number)})
        try:
            with suppress(Truncated):
                await stream.answer()
        except trio.Cancelled:
            with trio.CancelScope(shield=True), suppress(h2.exceptions.ProtocolError):
                await stream.reset()  # It may have ended in the same moment.
            raise
        return bytes(stream.got)

    # What is left over at the end.

    async def _nothing_more_than(self, before: tuple[int, int]) -> None:
        """Wait until descriptors and tasks are as they were, but for kept connections to engines."""
        kept = sum(engine.slots for engine in self.engines) * 2  # both ends are in this process
        with trio.move_on_after(LEFT_SECONDS):
            while not _at_most(left := _left(), before, kept):  # noqa: ASYNC110
                await trio.sleep(0.1)
        if not _at_most(left, before, kept):
            raise Harm(f"left over: {left} descriptors and tasks; after the first batch it was {before}")
        series = sum(name.startswith("gateway_requests_total") for name in await self.gateway.metrics())
        if series > MOST_SERIES:
            raise Harm(f"{series} label sets of gateway_requests_total")


async def fuzz(seed: int, *, tls: Tls | None, seconds: float, batches: int = sys.maxsize) -> Summary:
    """Play cases for so long, but no more than so many batches.

    Raises Harm with the bytes that did it, and how to send them again.
    """
    run = Fuzz(seed, tls=tls)
    try:
        return await run.run(seconds=seconds, batches=batches)
    except Harm as harm:
        found = [str(harm)]
        for case in run.batch:
            try:
                await Fuzz(seed, tls=tls).run(only=[case.number])
            except Harm as alone:
                found.append(f"Alone: {alone}\nby {case}")
        if len(found) == 1:
            found += [
                "No case of the batch does it alone; these are all:",
                *(case.tell(200) for case in run.batch),
            ]
        numbers = ",".join(str(case.number) for case in run.batch)
        found.append(f"python -m tests.fuzz --seed {seed}{' --tls' if tls else ''} --only {numbers}")
        raise Harm("\n".join(found)) from harm


def _left() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), trio.lowlevel.current_statistics().tasks_living


def _at_most(now: tuple[int, int], then: tuple[int, int], more: int) -> bool:
    return now[0] <= then[0] + more and now[1] <= then[1] + more


async def _drain(client: Http1, got: bytearray) -> None:
    with suppress(*GONE):
        while data := await client.stream.receive_some(65536):
            if len(got) < 1 << 20:
                got += data
