"""The engines of the harness: one obeys the request, one plays a case, one streams to the bystanders."""

from __future__ import annotations

import re
from typing import Any

import trio

from tests.fuzz.cases import Case
from tests.support.http1 import GONE
from tests.support.routes import BY_PATH, CHAT
from tests.support.scripted import Call, Connection, ScriptedEngine
from tests.support.scripts import Stream, Whole

HOLD_SECONDS = 0.5


class Engine(ScriptedEngine):
    """Notes what is wrong with the requests it gets: the gateway's are plain HTTP whatever came in."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.faults: list[str] = []

    async def _serve_one(self, connection: Connection) -> None:
        try:
            await super()._serve_one(connection)
        except* GONE:
            pass  # The script's own write, after the gateway has gone.
        except* (ValueError, AssertionError, LookupError, RecursionError) as group:
            self.faults.append(f"{self.name} can't read its request: {group.exceptions[0]!r}")

    def look(self) -> list[str]:
        """What was wrong with the requests so far, which are then forgotten."""
        for call in self.calls:
            names = [name.lower() for name, _ in call.headers]
            lengths = [value for name, value in call.headers if name.lower() == "content-length"]
            expected = [str(len(call.body))] if call.method == "POST" else lengths
            # The next request may come before the script has noticed that its answer is out.
            smuggled = call.stray and not call.stray.startswith((b"POST /", b"GET /"))
            if "transfer-encoding" in names or names.count("host") != 1 or lengths != expected or smuggled:
                self.faults.append(f"{self.name} got {call!r}, {call.headers}, behind it {call.stray!r}")
        self.calls.clear()
        return self.faults


async def obey(call: Call) -> None:
    """Answer as the body asks, however broken that is."""
    route = BY_PATH[call.path]
    if b"silent" in call.body:
        await call.closed()
        return
    wanted = re.search(rb'"max_tokens":\s*(\d{1,3})\b', call.body)
    tokens = min(200, int(wanted[1])) if wanted else 5
    streams = b'"stream": true' in call.body and route.parts is not None
    await (Stream(tokens, gap=0.001 if tokens > 10 else 0)(call) if streams else Whole()(call))


class Steady:
    """Streams numbered events until there are enough."""

    def __init__(self) -> None:
        self.enough = trio.Event()

    async def __call__(self, call: Call) -> None:
        assert CHAT.parts is not None
        await call.head(200, [("Content-Type", CHAT.media)])
        for part in CHAT.parts.opening:
            await call.send(part)
        number = 0
        while not self.enough.is_set():
            await call.send(CHAT.parts.token(number))
            number += 1
            with trio.move_on_after(0.005):
                await self.enough.wait()
        call.done()
        for part in CHAT.parts.closing:
            await call.send(part)
        await call.end()


class Misbehave:
    """Plays the case whose number the request names; without one it answers well.

    Its calls don't count as running: an engine that says it has ended and goes on isn't held to its slots.
    """

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}
        self.playing = 0

    async def __call__(self, call: Call) -> None:
        call.done()
        number = call.header("x-case")
        if number is None:
            await Whole(body=CHAT.whole_bytes())(call)
            return
        self.playing += 1
        try:
            await self._play(self.cases[number], call)
        finally:
            self.playing -= 1
            call.engine.notes.changed()

    async def _play(self, case: Case, call: Call) -> None:
        for data, pause in zip(case.segments, case.pauses, strict=True):
            await call.write(data)
            await trio.sleep(pause)
        if case.ending == "reset":
            await call.rst()
        elif case.ending == "close":
            await call.fin()
        elif case.ending == "hold":
            with trio.move_on_after(HOLD_SECONDS):
                await call.closed()
            await call.fin()
