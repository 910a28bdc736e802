"""One completion as its client sees it, streamed or whole, checked token by token."""

from __future__ import annotations

import json
import time
from array import array
from urllib.parse import urlsplit

from bench.client import Exchange, json_body
from bench.plan import Plan

now = time.monotonic
GAPS = 2_000_000
GOLDEN = 0.6180339887  # spreads leavers evenly over the requests, without randomness


class Completion(Exchange):
    """A completion, and when its first and last events came."""

    def __init__(self, plan: Plan, number: int, gaps: array[float]) -> None:
        self.user, self.gaps = f"{plan.name}-{number}", gaps
        self.leave_at = plan.leave_after if number * GOLDEN % 1 < plan.leave_fraction else 0
        self.events = self.bad = self.bytes = self.errors = self.reads = 0
        self.first = self.last = 0.0
        self.marker, self.rest = False, b""
        sim = {"tps": plan.tps, "prefill_ms": plan.prefill_ms, "batch": plan.batch, "pad": plan.pad}
        fields: dict[str, object] = {
            "model": plan.model,
            "messages": [{"role": "user", "content": " ".join(["hi"] * plan.prompt_words)}],
            "max_tokens": plan.tokens,
            "stream": plan.stream,
            "user": self.user,
            "sim": sim,
        }
        super().__init__("POST", urlsplit(plan.url).path, json_body(fields))

    def outcome(self) -> str:
        if self.error:
            return self.error
        if self.left:
            return "left" if not self.bad else "bad events"
        if self.status != 200:
            return f"status {self.status}"
        return self.verdict()

    def verdict(self) -> str:
        """What became of an answer that came to its end."""
        raise NotImplementedError


class Stream(Completion):
    """A streamed one. Every token carries its number: a missing, doubled or reordered one is a bad event."""

    def received(self, data: bytes) -> bool:
        self.bytes += len(data)
        self.reads += 1
        if self.status != 200:
            self.rest = (self.rest + data)[:4096]
            return False
        *events, self.rest = (self.rest + data).split(b"\n\n")
        instant, fresh = now(), 0
        for event in events:
            at = event.find(b'" tk')
            if at >= 0:
                if event[at + 4 : at + 10] != b"%06d" % self.events or not event.startswith(b"data: "):
                    self.bad += 1
                self.events += 1
                fresh += 1
                if self.leave_at and self.events >= self.leave_at:
                    self._clock(instant, fresh)
                    return True
            elif event == b"data: [DONE]":
                self.marker = True
            elif event.startswith((b'data: {"error"', b"event: error")):
                self.errors += 1
            elif not event.startswith((b"data: {", b":")):
                self.bad += 1
        if fresh:
            self._clock(instant, fresh)
        return False

    def _clock(self, instant: float, fresh: int) -> None:
        """Note the gap before these events; those that came along with the first have none."""
        if len(self.gaps) < GAPS:
            if self.last:
                self.gaps.append(instant - self.last)
            self.gaps.extend([0.0] * (fresh - 1))
        self.first = self.first or instant
        self.last = instant

    def verdict(self) -> str:
        if self.errors:
            return "error event"
        if self.bad or self.rest.strip():
            return "bad events"
        return "completed" if self.marker else "no end marker"


class Whole(Completion):
    """One that comes in a piece, as JSON."""

    def received(self, data: bytes) -> bool:
        self.bytes += len(data)
        self.reads += 1
        self.first = self.first or now()
        self.rest += data
        return False

    def verdict(self) -> str:
        try:
            answer = json.loads(self.rest)
            return "completed" if answer["choices"][0]["message"]["content"] else "empty answer"
        except (ValueError, LookupError, TypeError):
            return "bad answer"
