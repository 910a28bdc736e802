"""Rates, by the generic cell rate algorithm (ITU-T I.371): one number a limit, and no window to fall off.

Pure: ``now`` is an argument, in seconds of a clock that doesn't jump.
"""

from __future__ import annotations

MINUTE = 60.0


class Rate:
    """So much a minute, all of it at once if nothing was taken for a minute.

    What is larger than a minute's whole allowance passes when nothing is owed, and is owed from then on.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._interval = MINUTE / per_minute
        self._owed_until = 0.0  # the theoretical arrival time
        self._used_until = 0.0  # the same, of what has been used for certain

    def wait(self, amount: float, now: float) -> float:
        """Return in how many seconds ``amount`` may be taken; 0: now."""
        start = max(self._owed_until, now)
        return max(0.0, start + min(amount, self.per_minute) * self._interval - MINUTE - now)

    def take(self, amount: float, now: float) -> None:
        """Take ``amount`` in advance, whether it may be taken or not."""
        self._owed_until = max(self._owed_until, now) + amount * self._interval

    def settle(self, taken: float, used: float, now: float) -> None:
        """Of what was ``taken`` so much was ``used``.

        What wasn't used is given back, but no more than is still owed for it: what others have used
        meanwhile stays owed, however long ago this was taken.
        """
        self._used_until = max(self._used_until, now) + used * self._interval
        owed = max(self._owed_until, now) + (used - taken) * self._interval
        self._owed_until = max(owed, self._used_until)

    def left(self, now: float) -> int:
        """Return how much could be taken now."""
        return max(0, int(self.per_minute - max(0.0, self._owed_until - now) / self._interval + 1e-9))

    def full_in(self, now: float) -> float:
        """Return in how many seconds all of it could be taken."""
        return max(0.0, self._owed_until - now)
