"""How much of what only costs a client may send."""

from __future__ import annotations

BURST = 2000.0
PER_SECOND = 200.0
"""Resets, pings, settings and empty frames of one HTTP/2 connection. An honest client that
cancels all its 256 streams a few times a second stays below; a flood (CVE-2023-44487 and
its kin) is over it in a moment."""

A_REQUEST = 2.0
A_DATA_FRAME = 0.2
"""What a request that was answered to its end, and a DATA frame that was sent to the client,
earn: some clients send a PRIORITY for the one, and two WINDOW_UPDATEs for the other."""


class FloodError(Exception):
    """The client floods the connection with frames that only cost."""


class Allowance:
    """A token bucket: fills at ``PER_SECOND``, holds ``BURST``."""

    def __init__(self) -> None:
        self._left = BURST
        self._at: float | None = None

    @property
    def overdrawn(self) -> bool:
        """Whether more was taken than there was."""
        return self._left < 0

    def spend(self, amount: float, now: float) -> None:
        """Take ``amount`` at the time ``now`` (seconds)."""
        if self._at is not None:
            self._left = min(BURST, self._left + (now - self._at) * PER_SECOND)
        self._at = now
        self._left -= amount

    def earn(self, amount: float) -> None:
        """Put ``amount`` back."""
        self._left = min(BURST, self._left + amount)
