"""What the dashboard shows besides the present: the last quarter of an hour, and what leavers didn't cost.

A sample each second, and the spans of the last requests. Everything is bounded. The present itself is read
from where it is kept, so that it can't differ from the metrics.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from gateway.engine import Engine
from gateway.gateway import Gateway
from gateway.request import Request
from gateway.words import Outcome

SAMPLE_SECONDS = 1.0
SAMPLES = 900
"""A quarter of an hour of them."""

SPANS = 1000
"""The requests whose times to first token (and teardowns) the quantiles are of."""

_CUT_SHORT = frozenset({Outcome.CLIENT_GONE, Outcome.CLIENT_STALLED, Outcome.CANCELLED, Outcome.DRAINED})
"""Ends that stopped an engine in the middle."""

_ANSWERS_KEPT = 0.05
"""What one answer more counts in the mean length of an engine's answers."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The second before ``at`` (Trio's clock): tokens made, requests ended by outcome, and at its end who
    waits and which slots are held.
    """

    at: float
    tokens: float
    waiting: int
    running: int
    ended: Mapping[str, int]


@dataclass(slots=True)
class Savings:
    """What one engine was spared by those who left: an estimate.

    A request that was cut short is taken to have gone on to the mean length of this engine's whole answers,
    or to what it asked for at most if that is less. A token is taken to cost the seconds in which the engine
    had anything of ours to do, divided by the tokens that it made in them: many share a second of the GPU.
    """

    busy_seconds: float = 0.0
    tokens: int = 0
    unmade: float = 0.0
    seconds: float = 0.0
    """The seconds of the GPU that were saved, each by what a token cost at that time: it never falls."""
    _mean: float | None = None

    def completed(self, tokens: int) -> None:
        """It has made a whole answer of so many tokens."""
        self.tokens += tokens
        mean = tokens if self._mean is None else self._mean
        self._mean = mean + _ANSWERS_KEPT * (tokens - mean)

    def cut_short(self, tokens: int, at_most: int) -> None:
        """A request was cut short after so many tokens; it had asked for ``at_most``."""
        self.tokens += tokens
        if self._mean is not None:
            unmade = max(0.0, min(self._mean, at_most) - tokens)
            self.unmade += unmade
            self.seconds += unmade * self.busy_seconds / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class Spans:
    """Times of the last requests, in seconds."""

    kept: deque[float] = field(default_factory=lambda: deque(maxlen=SPANS))

    def quantiles(self, *shares: float) -> list[float | None]:
        """Return these quantiles (the nearest rank); None while there is nothing."""
        ordered = sorted(self.kept)
        last = len(ordered) - 1
        return [ordered[min(last, int(share * len(ordered)))] if ordered else None for share in shares]


class History:
    """Collects. :meth:`run` has to be running for samples to be taken."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)
        self.outcomes: Counter[str] = Counter()
        """Requests ended, by outcome."""
        self.tokens: Counter[str] = Counter()
        """Tokens of requests that have ended, by direction: ``prompt`` and ``completion``."""
        self.savings: dict[str, Savings] = {}
        """By engine."""
        self.ttft = Spans()
        self.teardown = Spans()
        self._made = 0
        self._last: tuple[float, float] = (0.0, 0.0)
        self._ended: Counter[str] = Counter()

    def ended(self, request: Request) -> None:
        """Note the end of a request."""
        self.outcomes[request.outcome] += 1
        usage = request.usage
        made = usage.completion or 0
        if request.meter is not None:
            self.tokens["prompt"] += usage.prompt or 0
            self.tokens["completion"] += made
        # What has been seen of it while it lived is taken for tokens, and put right now.
        self._made += made or request.tail.events
        for spans, seconds in ((self.ttft, request.ttft_seconds), (self.teardown, request.teardown_seconds)):
            if seconds is not None:
                spans.kept.append(seconds)
        if request.engine is not None and request.meter is not None:
            self._account(request, made)

    def _account(self, request: Request, made: int) -> None:
        savings = self.savings.setdefault(request.engine or "", Savings())
        if request.outcome is Outcome.COMPLETED:
            savings.completed(made)
        elif request.outcome in _CUT_SHORT:
            savings.cut_short(made, request.asked_tokens or 0)

    def look(self, now: float, live: Iterable[Request], engines: Sequence[Engine], waiting: int) -> Sample:
        """Take a sample."""
        made = self._made + sum(request.tail.events for request in live)
        at, before = self._last
        span = now - at if self.samples else SAMPLE_SECONDS
        self._last = now, made
        running = 0
        for engine in engines:
            held = engine.ledger.held
            running += held
            if held:
                self.savings.setdefault(engine.name, Savings()).busy_seconds += span
        ended = {name: count - self._ended[name] for name, count in self.outcomes.items()}
        self._ended = self.outcomes.copy()
        sample = Sample(
            now,
            max(0.0, made - before) / max(span, 1e-3),
            waiting,
            running,
            {name: count for name, count in ended.items() if count},
        )
        self.samples.append(sample)
        return sample

    async def run(self, gateway: Gateway, looked: Any) -> None:
        """Take a sample each second until cancelled, and call ``looked`` after each."""
        while True:
            await trio.sleep(SAMPLE_SECONDS)
            now = trio.current_time()
            self.look(now, gateway.requests, gateway.known_engines, gateway.admission.waiting)
            looked()
