"""The sending side of one HTTP/2 connection.

Each stream's writer takes from the windows itself, and one task per connection writes the
frames that have gathered in a turn. The data of large ones isn't copied into them: it is
what the stream's spool counts, for as long as the client doesn't take it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import h2.exceptions
import trio

from gateway.server.abuse import A_DATA_FRAME, Allowance
from gateway.server.frames import Frames

MOST_UNWRITTEN_BYTES = 64 * 1024
"""Frames that wait for the socket, beyond which streams wait before they add more. Also the
largest frame, whatever the client allows."""

MOST_CONTROL_BYTES = 1 << 20
"""Frames that wait for the socket, beyond which a client that makes us answer without
reading the answers is cut off."""

A_SHARE_BYTES = 2048
"""What each open stream may have waiting for the socket that nobody counts as its own any more."""

_SMALL_BYTES = 2048
"""Data that is copied behind the head of its frame. More of it is left where it is."""


Buffer = bytes | bytearray | memoryview


class Sending:
    """What waits for the client's windows, and what waits for the socket.

    ``write`` takes bytes to the socket; ``too_much`` is called when the client makes us
    answer more than it reads.
    """

    def __init__(
        self,
        frames: Frames,
        allowance: Allowance,
        write: Callable[[Buffer], Awaitable[None]],
        too_much: Callable[[], None],
    ) -> None:
        self.blocked: dict[int, float] = {}
        """Streams with data that the client's windows don't let out, and since when."""
        self._frames = frames
        self._allowance = allowance
        self._write = write
        self._too_much = too_much
        self._ended = False
        self._pieces: list[Buffer] = []
        self._tail = bytearray()
        """The last piece, if it is one that can grow."""
        self._added = self._written = 0
        self._something = trio.Event()
        self._waiting: dict[int, trio.Event] = {}
        """Streams that want to add."""
        self._leaving: dict[int, trio.Event] = {}
        """Streams whose last bytes wait for the socket; 0 is the connection."""

    @property
    def unwritten(self) -> int:
        """Bytes that the socket hasn't taken yet."""
        return self._added - self._written

    async def run(self) -> None:
        """Write what has gathered, until :meth:`end`. Nobody else writes."""
        while True:
            await self._something.wait()
            self._something = trio.Event()
            if self._ended:
                return
            pieces, self._pieces, self._tail = self._pieces, [], bytearray()
            until = self._added
            while pieces:
                await self._write(pieces.pop(0))
            self._written = until
            _set(self._leaving)
            self.go_on()

    def end(self) -> None:
        """Nothing more is written, and nobody waits any more."""
        self._ended = True
        self._write, self._too_much = _lost, _nothing  # The connection's own: a cycle.
        self._something.set()
        _set(self._waiting)
        _set(self._leaving)

    def wake(self) -> None:
        """Have what h2 has to say written."""
        if control := self._frames.data_to_send():
            self._append(control)
        if self.unwritten:
            self._something.set()
        if self.unwritten > MOST_CONTROL_BYTES:
            self._too_much()

    async def flush(self, seconds: float) -> bool:
        """Wait so long until all that was said has been written; whether it has, or can't be."""
        self.wake()
        with trio.move_on_after(seconds):
            await self.settled(0, lambda: True)
            return True
        return False

    def body_now(self, stream_id: int, data: bytes, *, streams: int) -> bool:
        """Send data if the windows let it out at once and little waits; say whether they did.

        ``streams`` is how many are open. All the data waits for the socket if that is stuck,
        and nobody's account holds it.
        """
        frames = self._frames
        if stream_id in self._waiting or stream_id in self._leaving:
            return False
        if self.unwritten >= min(streams * A_SHARE_BYTES, MOST_UNWRITTEN_BYTES):
            return False
        if len(data) > min(frames.max_outbound_frame_size, frames.local_flow_control_window(stream_id)):
            return False
        self._add_frame(stream_id, data)
        return True

    async def body(self, stream_id: int, data: bytes, wanted: Callable[[], bool]) -> None:
        """Send data as far as the windows go, and wait for the rest, while it is ``wanted``.

        Raises h2's ProtocolError when the stream is closed.
        """
        at, frames, view = 0, self._frames, memoryview(data)
        try:
            while at < len(data) and wanted():
                most = min(frames.max_outbound_frame_size, MOST_UNWRITTEN_BYTES, len(data) - at)
                room = min(frames.local_flow_control_window(stream_id), most)
                if room > 0 and self.unwritten < MOST_UNWRITTEN_BYTES:
                    self._add_frame(stream_id, view[at : at + room])
                    at += room
                    self.blocked.pop(stream_id, None)
                    continue
                if room <= 0:
                    self.blocked.setdefault(stream_id, trio.current_time())
                self._waiting[stream_id] = turn = trio.Event()
                await turn.wait()
        finally:
            self.blocked.pop(stream_id, None)
            self._waiting.pop(stream_id, None)
        await trio.lowlevel.checkpoint_if_cancelled()

    def _add_frame(self, stream_id: int, data: Buffer) -> None:
        self.wake()  # What h2 has to say comes before it.
        self._append(self._frames.data_head(stream_id, len(data)))
        self._append(data)
        self._allowance.earn(A_DATA_FRAME)
        self._something.set()

    def _append(self, data: Buffer) -> None:
        self._added += len(data)
        if len(data) > _SMALL_BYTES:
            self._pieces.append(data)
            self._tail = bytearray()
            return
        if not self._tail:
            self._pieces.append(self._tail)
        self._tail += data

    async def settled(self, stream_id: int, wanted: Callable[[], bool]) -> None:
        """Wait until the socket has taken what is there now, while that is ``wanted``."""
        mark = self._added
        try:
            while self._written < mark and not self._ended and wanted():
                self._leaving[stream_id] = turn = trio.Event()
                await turn.wait()
        finally:
            self._leaving.pop(stream_id, None)

    def go_on(self, stream_id: int = 0) -> None:
        """Have a stream look again whether it can send; 0 is all whose windows are open."""
        if stream_id == 0:
            _set({waiting: turn for waiting, turn in self._waiting.items() if self._may_send(waiting)})
        for turns in (self._waiting, self._leaving):
            if stream_id in turns:
                turns[stream_id].set()

    def _may_send(self, stream_id: int) -> bool:
        try:
            return self._frames.local_flow_control_window(stream_id) > 0
        except h2.exceptions.ProtocolError:
            return True  # It is closed, which it has to be told.


async def _lost(_data: Buffer) -> None:
    """Write nothing: there is no connection any more."""


def _nothing() -> None:
    """Have nothing to do."""


def _set(turns: dict[int, trio.Event]) -> None:
    for turn in turns.values():
        turn.set()
