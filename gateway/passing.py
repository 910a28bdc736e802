"""What is done with each piece of a body on its way from the engine into the spool.

It is run for every token, and until a stream's next one the processor's caches have forgotten what its
objects hold: a line fetched anew costs as much as twenty calls. So what a token needs is together in
few objects with slots, and what most tokens don't need isn't touched.
"""

from __future__ import annotations

from gateway.clocks import EngineClock
from gateway.intake import Intake
from gateway.request import Request
from gateway.spool import Spool

_LAST_BYTES = 4096
"""Of a stream's end at least that much is looked at, however small its pieces."""

_MOST_KEPT_BYTES = 2 * _LAST_BYTES

_CUT = b"\0"
"""Stands for the beginning of a line: what is in the middle of one is no error."""

_WORD = b"error"
"""It stands in every error that is told in a stream: :func:`gateway.events.error_in`."""

_WHOLE = (b"}\n\n", b"}\n", b"}\r\n\r\n", b"}\r\n")
"""Behind these no error can have begun: JSON of several lines could behind others."""


class Passing:
    """One answer's way into ``spool``; :meth:`take` is what :meth:`gateway.engine.Answer.relay` takes."""

    __slots__ = ("_begun", "_clock", "_intake", "_meter", "_request", "_sifts", "_spool", "_tail", "end")

    def __init__(self, request: Request, intake: Intake, spool: Spool, clock: EngineClock) -> None:
        self._request = request
        self._intake = intake
        self._meter = intake.meter
        self._spool = spool
        self._clock = clock
        self._tail = request.tail
        self._begun = False
        """There has been content: nothing of a token is news to the request any more."""
        self._sifts = intake.sifts
        self.end = b""
        """The last bytes, from the first piece on that may belong to an error."""

    def take(self, data: bytes) -> int:
        """Pass on what one read brought; return how much the next may bring, 0 to have no more for now."""
        tail, spool = self._tail, self._spool
        if self.end or not data.endswith(_WHOLE) or data.find(_WORD, -_LAST_BYTES) >= 0:
            self._keep(data)
        self._meter.feed(data)
        if self._sifts:
            data = self._intake.sift(data)
            self._sifts = self._intake.sifts
        if self._begun and data:
            tail.feed(data)
            spool.push(data, tail.done)
        elif data:
            self.pass_on(data)
        self._clock.next_read()
        return 0 if tail.done or spool.held >= spool.limit else spool.piece_bytes

    def begin(self, data: bytes) -> None:
        """Pass on what the answer begins with, which is measured and sifted already."""
        self._keep(data)
        self.pass_on(data)

    def _keep(self, data: bytes) -> None:
        """Keep the next piece of a possible error; let go of all if it is whole lines without the word."""
        end = self.end + data if len(data) <= _LAST_BYTES else _CUT + data[-_LAST_BYTES:]
        if end.endswith(_WHOLE) and end.find(_WORD) < 0:
            end = b""
        elif len(end) > _MOST_KEPT_BYTES:
            line = end.rfind(b"\n", -_MOST_KEPT_BYTES, -_LAST_BYTES) + 1
            end = end[line:] if line else _CUT + end[-_LAST_BYTES:]
        self.end = end

    def pass_on(self, data: bytes) -> None:
        """Have the client get ``data``, which is measured and sifted."""
        self._request.passed(data)
        self._begun = self._tail.content_seen
        self._spool.push(data, self._tail.done)
