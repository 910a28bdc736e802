"""Whether requests that were cut short have stopped, worked out from what an engine says of itself.

Gauges count the whole engine, so nothing is said of a single request; but numbers add up. An
engine that has ``busy`` sequences, ``own`` of them of our running requests for certain, has
``busy - own`` others at most. If ``owed`` requests were cut short and there are fewer others than
that, some have stopped. Which ones makes no difference to what may be given to the engine next; the
oldest count as them.

For certain are requests whose answers have begun, and those that have been there for long; a new
one may not be in the gauges yet, and one whose answer we have stopped reading, because its client is
slow, may be out of them already. One look isn't enough: it has to be seen twice, at least a step of
the engine apart, both times after the close. A look that finds fewer than our own is older than they
are, and void.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from gateway.profiles import Load, Looks

FOREIGN_SECONDS = 2.0
"""How long an engine must have more than all of ours before somebody else is taken to use it too:
requests that have just ended are in its gauges for a moment."""

_FOREIGN_LOOKS = 3

_LATELY_SECONDS = 5.0
"""Longer than a look and a step."""

_MOST_STARTS = 64

FOREIGN_OVER_SECONDS = 60.0
"""How long such load must be gone until the engine is believed again."""


@dataclass(frozen=True, slots=True)
class Look:
    """What an engine said, when it was asked and when it had answered (seconds of one clock).

    ``own`` is how many sequences of our running requests it has counted for certain, ``most``
    how many it may have counted at most.
    """

    load: Load
    asked: float
    answered: float
    own: int
    most: int

    @property
    def void(self) -> bool:
        """Whether it says less than there is for certain: it is older than our requests."""
        return self.load.busy < self.own

    @property
    def others(self) -> int:
        """Sequences that may not be those of our running requests."""
        return max(0, self.load.busy - self.own)

    @property
    def strangers(self) -> int:
        """Sequences that can't be those of our running requests."""
        return max(0, self.load.busy - self.most)


@dataclass(eq=False, slots=True)
class Suspect:
    """A request that was cut short at ``closed``, of ``cost`` sequences, and what was seen of it.

    ``counted``: the engine's gauges have it for certain. ``stopped_since``: when it was first
    seen to have stopped, in looks that have all said so. ``said_busy``: what the last one said.
    """

    closed: float
    cost: int
    counted: bool
    stopped_since: float = inf
    said_busy: bool = False


AnySuspect = TypeVar("AnySuspect", bound=Suspect)


def weigh(look: Look, suspects: Sequence[AnySuspect], ghosts: int, looks: Looks) -> list[AnySuspect]:
    """Return those of ``suspects``, oldest first, that have now been seen to have stopped.

    ``ghosts`` sequences are known to go on and keep their slots: they account for so many others.
    """
    if look.void:
        for each in suspects:
            each.said_busy = False
        return []
    closed = [each for each in suspects if each.closed < look.asked]
    owed = sum(each.cost for each in closed)
    stopped = owed - max(0, look.others - ghosts)
    perhaps = owed - max(0, look.strangers - ghosts)
    if look.strangers >= owed + ghosts:
        for each in closed:
            each.counted = True
    # What isn't in the gauges yet must not count as the end of something that is.
    uncounted = sum(each.cost for each in closed if not each.counted)
    proven = []
    for each in sorted(closed, key=lambda one: (not one.counted, one.closed)):
        stopped -= each.cost
        perhaps -= each.cost
        if stopped < (uncounted if each.counted else 0):
            if perhaps < 0:
                each.said_busy, each.stopped_since = True, inf
            continue
        each.said_busy = False
        if look.asked - each.stopped_since >= (looks.confirm if each.counted else looks.uncounted):
            proven.append(each)
        each.stopped_since = min(each.stopped_since, look.answered)
    return proven


class Foreign:
    """Load on an engine that isn't ours: it makes the arithmetic worthless."""

    def __init__(self) -> None:
        self.sequences = 0
        """Of others, for a while now."""
        self._looks = 0
        self._since = 0.0
        self._gone_since = inf

    @property
    def suspected(self) -> bool:
        """Whether the last look found more than ours."""
        return self._looks > 0

    def take(self, look: Look, ours: int) -> None:
        """Consider a look. ``ours`` are all sequences that are being reclaimed, ghosts too."""
        more = look.load.busy - look.most - ours
        if more <= 0:
            self._looks = 0
            self._gone_since = min(self._gone_since, look.answered)
            if look.answered - self._gone_since >= FOREIGN_OVER_SECONDS:
                self.sequences = 0
            return
        self._gone_since = inf
        if not self._looks:
            self._since = look.answered
        self._looks += 1
        if self.sequences or (
            self._looks >= _FOREIGN_LOOKS and look.answered - self._since >= FOREIGN_SECONDS
        ):
            self.sequences = more


class Lately:
    """Sequences that have ended well: they are in the engine's gauges for a moment yet."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque()

    def add(self, now: float, cost: int) -> None:
        """Some have ended ``now``."""
        self._ends.append((now, cost))
        while self._ends[0][0] < now - _LATELY_SECONDS:
            self._ends.popleft()

    def since(self, instant: float) -> int:
        """Return how many have ended since then."""
        return sum(cost for ended, cost in self._ends if ended >= instant)


class Waste:
    """Counts tokens that were made while nobody waited for any."""

    def __init__(self) -> None:
        self.tokens = 0.0
        self._before: tuple[Look, int] | None = None

    def forget(self) -> None:
        """The engine's counter has begun anew."""
        self._before = None

    def take(self, look: Look, granted: int) -> None:
        """Consider a look; ``granted`` counts the slots ever granted.

        Between two looks in which no request of ours was on the engine, nor one granted, all that
        it made was for nobody.
        """
        before, self._before = self._before, (look, granted)
        if before is None or before[0].load.tokens is None or look.load.tokens is None:
            return
        earlier, granted_earlier = before
        if earlier.strangers and granted_earlier == granted and not (earlier.most or look.most):
            self.tokens += max(0.0, look.load.tokens - before[0].load.tokens)


class Process:
    """Which process of the engine answers: another one has nothing of what was asked of the last.

    ``seen_before`` is when the last one was met for the last time (when it was asked).
    """

    def __init__(self) -> None:
        self.seen_before = -inf
        self._last: Look | None = None
        self._starts: set[float] = set()

    def forget(self) -> None:
        """It has gone: the next one is met for the first time."""
        self._last = None

    def take(self, look: Look) -> bool:
        """Consider what it said; return whether it has been started anew.

        Several behind one address answer by turns: one that was met before isn't new.
        """
        last, self._last, load = self._last, look, look.load
        known = load.started in self._starts
        if load.started is not None and len(self._starts) < _MOST_STARTS:
            self._starts.add(load.started)
        if last is None:
            return False
        self.seen_before = last.asked
        return load.is_after_restart(last.load) and not known
