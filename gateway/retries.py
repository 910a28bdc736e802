"""How many retries there may be: a share of the requests that came lately or are live, with a floor.

A budget and not a count for each request: when every engine fails, retries would otherwise
multiply the load just when there is too much of it. Pure; ``now`` is an argument.
"""

from __future__ import annotations

from collections import deque

from gateway.config import Retry as Settings

WINDOW_SECONDS = 10
_BUCKET_SECONDS = 1.0


class Budget:
    """Counts requests and retries of the last ten seconds."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.retries = 0
        """Retries ever allowed."""
        self.refused = 0
        """Retries ever refused."""
        self._buckets: deque[list[float]] = deque()

    def request(self, now: float) -> None:
        """One more request has come."""
        self._bucket(now)[1] += 1

    def take(self, now: float, *, live: int = 0) -> bool:
        """Take one retry out of the budget, if there is one left; ``live`` requests there are now."""
        bucket = self._bucket(now)
        came = max(live, sum(each[1] for each in self._buckets))
        taken = sum(each[2] for each in self._buckets)
        if taken + 1 > max(self.settings.floor, self.settings.budget * came):
            self.refused += 1
            return False
        bucket[2] += 1
        self.retries += 1
        return True

    def _bucket(self, now: float) -> list[float]:
        buckets = self._buckets
        if not buckets or now - buckets[-1][0] >= _BUCKET_SECONDS:
            buckets.append([now, 0, 0])
            while now - buckets[0][0] > WINDOW_SECONDS:
                buckets.popleft()
        return buckets[-1]
