"""What must be true of a soak, and the table that says so."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from bench.report import Outcome
from bench.soak.mix import Plan
from bench.soak.target import SLOTS, Sample

MIB = 1 << 20
FLAT_BYTES = 8 * MIB
"""Growth after the warm-up that still counts as flat: allocators breathe by a few MiB; a leak of 100 bytes a
request would be 10 MB in 100,000."""

MOST_NEW_SERIES = 27
"""Of three routes and nine outcomes some combinations are rare and come late. (Each is two series.)"""

SHOWN = 5

RECORD_OF = {
    "completed": "completed",
    "engine_timeout": "engine_timeout",
    "engine_failed": "engine_failed",
    "status 500": "completed",
    "cut": "engine_failed",
}
"""What a client saw to its end, and the outcome its record must have."""


@dataclass(frozen=True)
class Seen:
    """A request and what its client saw."""

    plan: Plan
    seen: str
    answered: bool
    """Whether anything of an answer came."""

    @property
    def may_be_unseen(self) -> bool:
        """Whether it may have been reset before the gateway had a look at it: then it never was a request."""
        return self.seen == "left" and not self.answered and (self.plan.http2 or self.plan.how == "reset")

    @property
    def may_be(self) -> set[str]:
        """The outcomes that its record may have."""
        if self.seen != "left" and self.plan.pace == "never":
            return {"client_stalled"}
        if self.seen != "left":
            return {RECORD_OF.get(self.seen, self.seen)}
        # It may have left too late to be early, or when its engine had failed already.
        return {"client_gone", "completed", *({"engine_failed", "engine_timeout"} if self.plan.fault else ())}

    @property
    def as_planned(self) -> bool:
        """Whether the client got what its plan says it must."""
        plan, seen = self.plan, self.seen
        if seen == "left":
            return bool(plan.leaves) or plan.http2  # somebody else has closed their connection
        if plan.pace == "never":
            return seen == "cut"
        expected = {
            "": {"completed"},
            "stale": {"completed"},
            "status": {"status 500"},
            "refuse": {"engine_failed"},
            "silent": {"engine_timeout"},
        }
        return seen in expected.get(plan.fault, {"engine_failed", "cut"})


@dataclass
class Soak:
    """Everything that was found out."""

    seen: dict[str, Seen] = field(default_factory=dict)
    rounds: list[Sample] = field(default_factory=list)
    first: Sample | None = None
    """After the warm-up, with nothing kept."""
    last: Sample | None = None
    peak: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of the gateway, while the load was on."""
    exit_code: int | None = None
    records: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    other_lines: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def outcome(self) -> Outcome:
        total = len(self.seen)
        outcome = Outcome("soak", f"{total} requests in {self.seconds:.0f} s", failed="")
        outcome.add("requests, and a second", f"{total}, {total / max(self.seconds, 0.1):.0f}")
        outcome.add("gateway CPU a request", f"{self.cpu_seconds / max(total, 1) * 1e3:.2f} ms")
        self._clients(outcome)
        self._records(outcome)
        self._books(outcome)
        self._growth(outcome)
        self._log(outcome)
        return outcome

    def _clients(self, outcome: Outcome) -> None:
        sights = Counter(one.seen for one in self.seen.values())
        outcome.add("clients saw", ", ".join(f"{name} {number}" for name, number in sights.most_common()))
        left = sights["left"] / max(1, len(self.seen))
        outcome.add("left", f"{left:.1%}")
        odd = [f"{one.plan.name}: {one.seen}, {one.plan}" for one in self.seen.values() if not one.as_planned]
        _none(outcome, "clients that got something else than they must", odd)

    def _records(self, outcome: Outcome) -> None:
        outcomes = Counter(record["outcome"] for each in self.records.values() for record in each)
        outcome.add("outcomes", ", ".join(f"{name} {number}" for name, number in outcomes.most_common()))
        phases = Counter(
            record["phase"] for each in self.records.values() for record in each if record["status"] == 499
        )
        outcome.add("left in", ", ".join(f"{name} {number}" for name, number in phases.most_common()))
        without = [one for name, one in self.seen.items() if name not in self.records]
        missing = [f"{one.plan.name}: {one.seen}, {one.plan}" for one in without if not one.may_be_unseen]
        doubled = [name for name, each in self.records.items() if len(each) != 1]
        foreign = [name for name in self.records if name not in self.seen]
        unseen = len(without) - len(missing)
        outcome.add("reset before the gateway had looked", str(unseen))
        _none(outcome, "other requests without a record", missing)
        _none(outcome, "requests with more than one", doubled)
        _none(outcome, "records of nobody's request", foreign)
        wrong = [
            f"{name}: saw {one.seen}, record {record}, {one.plan}"
            for name, one in self.seen.items()
            for record in self.records.get(name, ())
            if record["outcome"] not in one.may_be
        ]
        _none(outcome, "records that say something else than the client", wrong)

    def _books(self, outcome: Outcome) -> None:
        samples = [sample for sample in (*self.rounds, self.first, self.last) if sample is not None]
        _none(
            outcome,
            "rounds after which the ledger wasn't 0 and balanced",
            [s.books for s in samples if s.books],
        )
        restless = [f"{s.live} live, gauges {s.gauges}" for s in samples if s.live or s.gauges]
        _none(outcome, "rounds after which something was live or a gauge not 0", restless)
        holds = self.peak <= SLOTS
        outcome.require("most at once in the engine / slots", f"{self.peak}/{SLOTS}", holds, "<= slots")

    def _growth(self, outcome: Outcome) -> None:
        first, last = self.first, self.last
        if first is None or last is None:
            outcome.add("growth", "too short to tell: fewer than three rounds")
            return
        for name, before, after, most in (
            ("descriptors", first.descriptors, last.descriptors, 2),
            ("threads", first.threads, last.threads, 1),
            ("metric series", first.series, last.series, MOST_NEW_SERIES),
        ):
            text = f"{before} -> {after}"
            outcome.require(f"{name}, from the warm-up to the end", text, after - before <= most, f"+{most}")
        for name in ("rss", "pss"):
            before, after = getattr(first, name), getattr(last, name)
            text = f"{before / MIB:.1f} -> {after / MIB:.1f}"
            course = " ".join(f"{getattr(sample, name) / MIB:.1f}" for sample in self.rounds)
            holds = after - before <= FLAT_BYTES
            outcome.require(f"{name.upper()} in MiB, likewise", text, holds, f"+{FLAT_BYTES // MIB} MiB")
            outcome.add(f"{name.upper()} after each round", course)
        most = max(sample.descriptors for sample in self.rounds)
        bound = first.descriptors + SLOTS
        text = f"{most}, kept connections to the engine included"
        outcome.require("descriptors after a round, most", text, most <= bound, f"<= {bound}")

    def _log(self, outcome: Outcome) -> None:
        _none(outcome, "lines on stdout that are no access record", self.other_lines)
        _none(outcome, "lines in the log that are no information", self.log)
        outcome.require("exit code upon SIGTERM", str(self.exit_code), self.exit_code == 0, "0")


def _none(outcome: Outcome, what: str, found: list[str]) -> None:
    outcome.require(what, str(len(found)), not found, "0")
    outcome.figures[what] = found[:100]
