"""The stall clock of one connection."""

from __future__ import annotations

SLOWEST_BYTES_PER_SECOND = 2048
"""A reader of this pace isn't taken for one that has stalled."""

PAUSE_SECONDS = 1.0
"""A reader that takes nothing for longer isn't quick."""


class StallClock:
    """Says when a client has stalled: it took nothing for ``seconds`` although a write is stuck.

    A kernel makes a slow reader's progress known in uneven steps (see
    :mod:`gateway.server.outgoing`). So who has taken something after a pause is given half as
    much time again, and after another pause twice the time. (Once may have been the kernel alone:
    its buffer full, it can take a little more when it is asked again.) 0 ``seconds`` is off.
    """

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self._taken = 0
        self._since = now
        self._late = 0
        """Pauses that were followed by progress."""

    def rest(self, now: float) -> None:
        """Note that there is nothing to be had."""
        self._late = 0
        self._since = now

    def stalled(self, now: float, *, stuck: bool, taken: int) -> bool:
        """Look: whether a write is stuck, and how many bytes the client's TCP has acknowledged."""
        pause = now - self._since
        if stuck and taken == self._taken:
            return 0 < self._seconds * min(2.0, 1 + self._late / 2) <= pause
        self._late = self._late + (pause > PAUSE_SECONDS) if stuck else 0
        self._taken, self._since = taken, now
        return False
