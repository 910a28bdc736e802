"""HTTP/2's PING: is the client there, and has it read what went before?"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

import h2.exceptions
import trio

from gateway.server.frames import Frames

_PAYLOAD = b"alive?  "


class Pings:
    """The pings of one connection. Their answers come in their order (RFC 9113, 6.7)."""

    def __init__(self, frames: Frames, wake: Callable[[], None]) -> None:
        self._frames = frames
        self._wake = wake
        self._unanswered: deque[trio.Event] = deque()

    def ask(self) -> trio.Event:
        """Send a ping; the event is set by its answer."""
        answered = trio.Event()
        self._unanswered.append(answered)
        with suppress(h2.exceptions.ProtocolError):
            self._frames.ping(_PAYLOAD)
        self._wake()
        return answered

    async def all_is_read(self, seconds: float) -> None:
        """Wait until the client has read what has been sent, so long at most.

        Clients (curl's library among them) drop data that they read together with the reset behind it,
        and with it the reason. A ping's answer tells that they have read it before.
        """
        with trio.move_on_after(seconds):
            await self.ask().wait()

    def answer(self) -> bool:
        """Take an answer; say whether it was asked for."""
        if self._unanswered:
            self._unanswered.popleft().set()
            return True
        return False
