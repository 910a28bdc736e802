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

    def answer(self) -> None:
        """Take an answer."""
        if self._unanswered:
            self._unanswered.popleft().set()
