"""Which engines may be given requests: healthy, ejected for a backoff, on probation by one trial.

Pure and synchronous; ``now`` is an argument. Two witnesses feed one state: requests (what became
of them before their first byte, and answers that broke off) and probes. What a client did says
nothing of an engine: it is neutral, and frees a trial like anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import StrEnum
from math import inf

from gateway.config import Health as Settings

_MOST_DOUBLINGS = 30


class State(StrEnum):
    """What an engine may be given."""

    HEALTHY = "healthy"
    EJECTED = "ejected"
    """Nothing, until its backoff is over."""
    PROBATION = "probation"
    """One request, as a trial."""


class Change(StrEnum):
    """What listeners are told of."""

    EJECTED = "ejected"
    BACK = "back"
    RESTS = "rests"
    OPEN = "open"
    """It may be given something again: its trial is free."""


class Health:
    """The health of one engine. ``changed`` is told of each change."""

    def __init__(self, settings: Settings, changed: Callable[[Change], None] = lambda _: None) -> None:
        self.settings = settings
        self.changed = changed
        self.drained = False
        """An operator keeps requests from it."""
        self.resting_until = -inf
        """The engine has asked to be left alone until then (``Retry-After``)."""
        self.until = inf
        """When the backoff of an ejected engine is over."""
        self.ejected = False
        self.ejections = 0
        """How often it was ejected."""
        self.reason = ""
        """Why it was ejected last."""
        self._in_a_row = 0
        self._broken_in_a_row = 0
        """Answers that had begun, and failed then."""
        self._probes_in_a_row = 0
        self._doublings = 0
        self._ejected_at = -inf
        self._back_at = -inf
        self._unreachable = False
        """Probes have found it dead: it is for them to find it alive."""
        self._trial: Hashable | None = None

    def __repr__(self) -> str:
        return f"<Health ejected={self.ejected} drained={self.drained} failures={self._in_a_row}>"

    # What it may be given.

    def state(self, now: float) -> State:
        """Return its state."""
        if not self.ejected:
            return State.HEALTHY
        return State.EJECTED if now < self.until else State.PROBATION

    def takes(self, now: float) -> bool:
        """Whether it may be given a request."""
        if self.drained or now < self.resting_until:
            return False
        return not self.ejected or (now >= self.until and self._trial is None)

    def rests(self, now: float) -> bool:
        """Whether it is well, and has only asked to be left alone for a while."""
        return not (self.drained or self.ejected) and now < self.resting_until

    def takes_in_panic(self, now: float) -> bool:
        """Whether it may be given a request when no engine takes any: never all are ejected."""
        return not self.drained and now >= self.resting_until

    def opens_at(self, now: float) -> float:
        """Return when time alone will have it take requests again; inf if it won't."""
        instants = [self.resting_until] + ([self.until] if self.ejected else [])
        return min((instant for instant in instants if instant > now), default=inf)

    # What requests say.

    def granted(self, trial: Hashable, now: float) -> None:
        """It is given a request."""
        if self.ejected and now >= self.until and self._trial is None:
            self._trial = trial

    def succeeded(self, trial: Hashable, called: float, now: float) -> None:
        """It has begun to answer a request, which it was sent at ``called``."""
        self._in_a_row = 0
        if self.ejected and called >= self._ejected_at:
            self.ejected, self.until, self._trial, self._unreachable = False, inf, None, False
            self._back_at = now
            self.changed(Change.BACK)
        self.neutral(trial)

    def completed(self) -> None:
        """It has answered a request to the end."""
        self._broken_in_a_row = 0

    def failed(
        self, trial: Hashable, now: float, reason: str, *, absent: bool = False, begun: bool = False
    ) -> None:
        """It has failed a request; ``absent``: nobody listens there; ``begun``: it had begun to answer."""
        on_trial = self._trial is not None and trial == self._trial
        self._in_a_row += not begun
        self._broken_in_a_row += begun
        most = max(self._in_a_row, self._broken_in_a_row)
        if on_trial or (not self.ejected and (absent or most >= self.settings.failures)):
            self._eject(now, reason, absent=absent)
        else:
            self.neutral(trial)

    def neutral(self, trial: Hashable) -> None:
        """A request is over and says nothing of it."""
        if self._trial is not None and trial == self._trial:
            self._trial = None
            self.changed(Change.OPEN)

    def rest(self, now: float, seconds: float) -> None:
        """It has asked to be left alone."""
        self.resting_until = max(self.resting_until, now + min(seconds, self.settings.backoff_most_seconds))
        self.changed(Change.RESTS)

    # What probes say.

    def probed_well(self, now: float) -> None:
        """A probe has found it well."""
        self._probes_in_a_row = 0
        if self.ejected and self._unreachable:
            # It was down, and isn't: no reason to wait for the backoff's end.
            self._unreachable = False
            self.until = min(self.until, now)
            self.changed(Change.OPEN)

    def probed_ill(self, now: float, reason: str, *, absent: bool, alive: bool) -> None:
        """A probe has failed; ``alive``: its answers flow, which is the better witness."""
        if alive:
            self._probes_in_a_row = 0
            return
        self._probes_in_a_row += 1
        dead = absent or self._probes_in_a_row >= self.settings.failures
        if dead and not self.ejected:
            self._eject(now, reason, absent=True)
        elif dead:
            # No client has to find out by a trial what the probes know.
            self._unreachable = True
            self.until = max(self.until, now + 2 * self.settings.probe_seconds)

    def _eject(self, now: float, reason: str, *, absent: bool) -> None:
        if now - self._back_at > self.settings.backoff_most_seconds and not self.ejected:
            self._doublings = 0
        backoff = self.settings.backoff_seconds * 2 ** min(self._doublings, _MOST_DOUBLINGS)
        self._doublings += 1
        self.ejected, self._trial = True, None
        self._in_a_row = self._broken_in_a_row = 0
        self._unreachable |= absent and bool(self.settings.probe_seconds)
        self._ejected_at, self.reason = now, reason
        self.until = now + min(backoff, self.settings.backoff_most_seconds)
        self.ejections += 1
        self.changed(Change.EJECTED)
