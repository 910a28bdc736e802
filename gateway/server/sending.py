"""The sending side of one HTTP/2 connection.

Each stream's writer takes from the windows itself, frames gather in h2's buffer, and one
task per connection writes what has gathered in a turn.
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


class Sending:
    """What waits for the client's windows, and what waits for the socket.

    ``write`` takes bytes to the socket; ``too_much`` is called when the client makes us
    answer more than it reads.
    """

    def __init__(
        self,
        frames: Frames,
        allowance: Allowance,
        write: Callable[[bytes], Awaitable[None]],
        too_much: Callable[[], None],
    ) -> None:
        self.blocked: dict[int, float] = {}
        """Streams with data that the client's windows don't let out, and since when."""
        self._frames = frames
        self._allowance = allowance
        self._write = write
        self._too_much = too_much
        self._ended = False
        self._unwritten = bytearray()
        self._something = trio.Event()
        self._waiting: dict[int, trio.Event] = {}

    async def run(self) -> None:
        """Write what has gathered, until :meth:`end`."""
        while True:
            await self._something.wait()
            self._something = trio.Event()
            if self._ended:
                return
            data = self.take()
            if data:
                await self._write(data)
                self.go_on()

    def end(self) -> None:
        """Nothing more is written, and nobody waits any more."""
        self._ended = True
        self._something.set()
        for turn in self._waiting.values():
            turn.set()

    def wake(self) -> None:
        """Have what h2 has to say written."""
        self._unwritten += self._frames.data_to_send()
        if self._unwritten:
            self._something.set()
        if len(self._unwritten) > MOST_CONTROL_BYTES:
            self._too_much()

    def take(self) -> bytes:
        """Take all that waits for the socket."""
        data = bytes(self._unwritten) + self._frames.data_to_send()
        self._unwritten.clear()
        return data

    def body_now(self, stream_id: int, data: bytes) -> bool:
        """Send data if the windows let it out at once and little waits; say whether they did."""
        frames = self._frames
        if stream_id in self._waiting or len(self._unwritten) >= MOST_UNWRITTEN_BYTES:
            return False
        if len(data) > min(frames.max_outbound_frame_size, frames.local_flow_control_window(stream_id)):
            return False
        frames.send_data(stream_id, data)
        self._allowance.earn(A_DATA_FRAME)
        self.wake()
        return True

    async def body(self, stream_id: int, data: bytes, wanted: Callable[[], bool]) -> None:
        """Send data as far as the windows go, and wait for the rest, while it is ``wanted``.

        Raises h2's ProtocolError when the stream is closed.
        """
        at, frames = 0, self._frames
        try:
            while at < len(data) and wanted():
                most = min(frames.max_outbound_frame_size, MOST_UNWRITTEN_BYTES, len(data) - at)
                room = min(frames.local_flow_control_window(stream_id), most)
                if room > 0 and len(self._unwritten) < MOST_UNWRITTEN_BYTES:
                    frames.send_data(stream_id, data[at : at + room])
                    self._allowance.earn(A_DATA_FRAME)
                    at += room
                    self.blocked.pop(stream_id, None)
                    self.wake()
                    continue
                if room <= 0:
                    self.blocked.setdefault(stream_id, trio.current_time())
                self._waiting[stream_id] = turn = trio.Event()
                await turn.wait()
        finally:
            self.blocked.pop(stream_id, None)
            self._waiting.pop(stream_id, None)
        await trio.lowlevel.checkpoint_if_cancelled()

    def go_on(self, stream_id: int = 0) -> None:
        """Have a stream look again whether it can send; 0 is all whose windows are open."""
        for waiting, turn in self._waiting.items():
            if stream_id == waiting or (stream_id == 0 and self._may_send(waiting)):
                turn.set()

    def _may_send(self, stream_id: int) -> bool:
        try:
            return self._frames.local_flow_control_window(stream_id) > 0
        except h2.exceptions.ProtocolError:
            return True  # It is closed, which it has to be told.
