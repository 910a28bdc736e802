"""How long an engine may be silent: the clocks of ``[stream]``, in one cancel scope.

One scope whose deadline is moved costs a fraction of a scope per read, and moving it costs as
much as framing a token: between reads it is moved only when it would come too early, and then
to a little later than it has to be.
The first-byte and idle clocks measure the engine's silence, so they stand still while
we don't read because the client is slow. The total clock never stands still.
"""

from __future__ import annotations

from math import inf

import trio

from gateway.config import Stream
from gateway.errors import Code, EngineError

_SLACK = 1 / 64
"""The idle clock may ring so much late, as a part of ``idle_seconds``; never early."""


class EngineClock:
    """The deadline of one call of an engine. All of ``settings``' values are seconds, 0 is off."""

    __slots__ = (
        "_clock",
        "_end",
        "_first_byte",
        "_idle",
        "_idling",
        "_rings",
        "_total",
        "_waiting_for",
        "scope",
    )

    def __init__(self, settings: Stream) -> None:
        self.scope = trio.CancelScope()
        self._first_byte = settings.first_byte_seconds or inf
        self._idle = settings.idle_seconds or inf
        self._total = settings.total_seconds or inf
        self._end = self._rings = inf
        self._clock = trio.lowlevel.current_clock()
        self._waiting_for = ""
        self._idling = False

    def called(self, since: float) -> None:
        """The engine is being called; the total clock has run ``since`` an engine was called first."""
        self._end = since + self._total
        self.stand_still()

    def connected(self) -> None:
        """There is a connection: from now on the engine may take ``first_byte_seconds``."""
        self._expect(self._first_byte, f"no body byte within first_byte_seconds ({self._first_byte:g})")

    def next_read(self) -> None:
        """A read after the first begins. (It is told for every token, past Trio's layers above the clock.)"""
        if not self._idling:
            self._idling = True
            self._waiting_for = ""
        elif self._rings >= self._end or self._rings >= self._clock.current_time() + self._idle:
            return
        self._move(self._idle * (1 + _SLACK))

    def stand_still(self) -> None:
        """We don't read: only the total clock runs."""
        self._expect(inf, "")

    def ran_out(self) -> EngineError:
        """Return the error for the clock that ran out, once the scope has been cancelled by it."""
        too_long = trio.current_time() >= self._end
        if too_long:
            what = f"the answer took longer than total_seconds ({self._total:g})"
        else:
            what = self._waiting_for or f"silent for idle_seconds ({self._idle:g})"
        return EngineError(Code.ENGINE_TIMEOUT, f"The engine was too slow: {what}.", blames=not too_long)

    def _expect(self, seconds: float, waiting_for: str) -> None:
        self._idling = False
        self._waiting_for = waiting_for
        self._move(seconds)

    def _move(self, seconds: float) -> None:
        rings = min(self._clock.current_time() + seconds, self._end)
        if rings != self._rings:  # Moving the scope's deadline costs as much as a small function.
            self.scope.deadline = self._rings = rings
