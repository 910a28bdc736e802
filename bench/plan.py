"""What a load is told to do: plain values, sent to its process as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from bench.client import Reading


@dataclass(frozen=True)
class Probe:
    """A request repeated on a connection of its own while the streams run."""

    name: str
    url: str
    method: str = "GET"
    body: dict[str, object] | None = None
    count: int = 40
    every_seconds: float = 0.1
    after_seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What the clients do. `streams` at a time, `requests` in all.

    There are three ways to be told to leave: after so many events, so long after one's own request, and all
    at one instant after the start. 0 turns each off.
    """

    url: str
    name: str
    streams: int
    requests: int
    tokens: int
    tps: float = 0.0
    prefill_ms: float = 0.0
    batch: int = 8
    pad: int = 0
    stream: bool = True  # False: answers come whole, as JSON
    prompt_words: int = 1
    ramp_seconds: float = 0.0
    leave_after: int = 0
    leave_fraction: float = 1.0  # of the requests; for `leave_after` only
    leave_seconds: float = 0.0
    leave_all_seconds: float = 0.0
    begin_at: float = 0.0  # the start, on the monotonic clock; 0: at once
    window: tuple[float, float] | None = (
        None  # seconds after the start between which events are counted apart
    )
    timeout_seconds: float = 60.0
    max_seconds: float = 120.0
    model: str = "sim"
    protocol: str = "http/1.1"
    shared: bool = False  # one connection for everybody
    reading: Reading = field(default_factory=Reading)
    probes: list[Probe] = field(default_factory=list)


def to_json(plan: Plan) -> bytes:
    return json.dumps(asdict(plan)).encode()


def from_json(text: str) -> Plan:
    fields = json.loads(text)
    fields["probes"] = [Probe(**probe) for probe in fields["probes"]]
    fields["reading"] = Reading(**fields["reading"])
    return Plan(**fields)
