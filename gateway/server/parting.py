"""How an HTTP/2 connection ends that always has a stream open, when another process takes over.

A connection may end while no stream is open: its client sends what comes next over a new one. Where
streams overlap there is no such moment, and most clients would do with an early GOAWAY (RFC 9113, 6.8).
Those that are built on Python's h2 (4.4.1) take nothing more after one, and lose their running streams.
So for a while new streams are kept back, neither begun nor refused: when the others have ended, GOAWAY names
the last one that was begun, and clients send the rest again, elsewhere. Where the others don't end
in that time, GOAWAY goes all the same, and they have what is left of it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import h2.exceptions
import trio

from gateway.server.frames import Frames
from gateway.server.pings import Pings
from gateway.server.shared import Context

QUIET_SECONDS = 0.05
"""Who has begun no stream for so long, and for two round trips, isn't about to send one."""

READ_SECONDS = 1.0
"""How long such a moment is waited for, besides the time that pings are on their way."""

_MOST_SECONDS = 10.0
"""How long it is waited for however far away the client is."""


class Parting:
    """What is kept back on one connection."""

    def __init__(self, connection: Frames, context: Any, pings: Pings) -> None:
        self._connection = connection
        self._pings = pings
        self._ends = False
        self._begins_nothing = False
        self._context: Context = context
        self._held: set[int] = set()
        self._unfinished: set[int] = set()

    def __len__(self) -> int:
        return len(self._held)

    def keeps_back(self, stream_id: int, *, beside_others: bool) -> bool:
        """Say whether a new stream isn't to be begun, nor anything said of it."""
        if not (self._begins_nothing or (self._context.holding and beside_others)):
            return False
        self._begins_nothing = True
        self._held.add(stream_id)
        self._unfinished.add(stream_id)
        return True

    def is_whole(self, stream_id: int) -> None:
        """Note that a request that may be kept back has arrived."""
        self._unfinished.discard(stream_id)

    def forget(self, stream_id: int) -> None:
        """The client has reset a stream."""
        self._held.discard(stream_id)
        self._unfinished.discard(stream_id)

    def go_away(self) -> None:
        """Say GOAWAY, and let the streams that were begun come to their ends."""
        self._begins_nothing = True
        self._connection.say_goaway()

    def ends(self) -> bool:
        """No stream is open, and from now on none is begun: say whether that is new."""
        self._begins_nothing = True
        before, self._ends = self._ends, True
        return not before

    async def say_goodbye(self) -> None:
        """Say GOAWAY, at a moment when the client neither sends anything nor has anything to read.

        Else httpcore (1.0.9) fails. A request of which it has sent only the head it can't send again. And one
        of the waiting streams' tasks reads at a time, in turn: one that gets its turn after the GOAWAY
        has lost what was read for it before, so there is a ping for each of them.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._until_the_end, nursery.cancel_scope)
            await self._quiet_moment()
            nursery.cancel_scope.cancel()
        with suppress(h2.exceptions.ProtocolError):
            self._connection.close_connection()

    async def _until_the_end(self, waiting: trio.CancelScope) -> None:
        await self._context.terminated.wait()
        waiting.cancel()

    async def _quiet_moment(self) -> None:
        with trio.move_on_after(READ_SECONDS) as patience:
            since = trio.current_time()
            await self._pings.ask().wait()
            round_trip = trio.current_time() - since
            quiet = max(QUIET_SECONDS, 2 * round_trip)
            patience.deadline += min(_MOST_SECONDS, 8 * round_trip)
            while True:
                last = self._connection.highest_inbound_stream_id
                await trio.sleep(quiet)
                if self._nothing_came(last):
                    patience.deadline += min(_MOST_SECONDS, quiet + 3 * round_trip * len(self._held))
                    for _ in range(len(self._held) + 1):
                        await self._pings.ask().wait()
                    # One whose answer's end was among what has been read may be about to ask again.
                    await trio.sleep(quiet)
                    if self._nothing_came(last):
                        return

    def _nothing_came(self, last: int) -> bool:
        return last == self._connection.highest_inbound_stream_id and not self._unfinished
