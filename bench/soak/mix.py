"""What each request of the soak is: its number decides it, so that a run can be repeated."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

LEAVERS = 0.3
HTTP2 = 0.3
STREAMS = 0.7

LEAVES_WHEN = ("sending", "soon", "later", "later", "events", "events", "events", "events")
"""With half of the request's body unsent; after a moment, when most are queued; later, in prefill mostly;
between two events."""

LEAVES_HOW = ("close", "close", "reset", "half_close")
"""Over HTTP/1.1. Over HTTP/2 they reset their stream; one in twenty closes the connection with it."""


@dataclass(frozen=True)
class Plan:
    """One request. Times are seconds; `fault` is the engine's, `pace` the reader's."""

    number: int
    http2: bool
    path: str
    stream: bool
    tokens: int
    pad: int = 0
    prefill_ms: float = 0.0
    tps: float = 0.0
    fault: str = ""
    pace: str = "fast"
    leaves: str = ""
    how: str = "close"
    after: float = 0.0
    events: int = 0

    @property
    def name(self) -> str:
        return f"soak-{self.number}"

    @property
    def body(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": "sim", "user": self.name}
        if self.path == "/v1/embeddings":
            return fields | {"input": "hi"}
        if self.path == "/v1/completions":
            fields |= {"prompt": "hi"}
        else:
            fields |= {"messages": [{"role": "user", "content": "hi"}]}
        sim = {"prefill_ms": self.prefill_ms, "tps": self.tps, "pad": self.pad, "fault": self.fault}
        sim["fault_ms"] = self.prefill_ms + 10
        return fields | {"max_tokens": self.tokens, "stream": self.stream, "sim": sim}


def plan(seed: int, number: int) -> Plan:
    """The request of this number."""
    dice = random.Random(f"{seed}:{number}")
    http2, stream = dice.random() < HTTP2, dice.random() < STREAMS
    kind = dice.random()
    given: dict[str, Any] = {
        "number": number,
        "http2": http2,
        "stream": stream,
        "path": "/v1/chat/completions",
    }
    given |= {"tokens": dice.choice([1, 4, 8, 16]), "prefill_ms": dice.choice([0, 5, 20, 50])}
    if kind < 0.0004:
        return Plan(**given | {"stream": True, "pace": "never", "tokens": 100, "pad": 10_000})
    if kind < 0.01:
        return Plan(**given | {"stream": True, "pace": "slow", "tokens": 60, "pad": 4000})
    if kind < 0.012:
        given |= {"fault": "silent", "prefill_ms": 3.6e6}
    elif kind < 0.05:
        given |= _fault(dice)
    elif kind < 0.1:
        given |= {"path": "/v1/embeddings", "stream": False}
    elif kind < 0.2:
        given |= {"path": "/v1/completions"}
    elif kind < 0.3:
        given |= {"tps": dice.choice([100, 400])}
    if dice.random() < LEAVERS:
        given |= _leave(dice, given)
    return Plan(**given)


def _fault(dice: random.Random) -> dict[str, Any]:
    fault = dice.choice(["status", "refuse", "reset", "cut", "no_marker", "garbage", "stale"])
    if fault in ("status", "refuse", "stale"):
        return {"fault": fault}
    # Events come more slowly than the fault, which is then in the middle of the answer.
    return {"fault": fault, "stream": True, "tps": 200, "tokens": 50}


def _leave(dice: random.Random, given: dict[str, Any]) -> dict[str, Any]:
    when, how = dice.choice(LEAVES_WHEN), dice.choice(LEAVES_HOW)
    if when == "events" and not given["stream"]:
        when = "later"
    if given["http2"]:
        how = "connection" if dice.random() < 0.05 else "stream"
    leave: dict[str, Any] = {"leaves": when, "how": how}
    if when == "sending":
        return leave | {"after": 0.005}
    if when == "soon":
        return leave | {"after": 0.03 * dice.random()}
    if given.get("fault"):
        return leave | {"after": 0.3 * dice.random(), "events": 2}
    if when == "later":
        return leave | {"after": 0.3 * dice.random(), "prefill_ms": dice.choice([50, 200])}
    return leave | {"tokens": 40, "tps": 250, "events": dice.choice([1, 2, 5, 20, 39])}
