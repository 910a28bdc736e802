"""The same load on the gateway, on the engine directly and on the baselines, in turns."""

from __future__ import annotations

import http.client
import math
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from bench import baselines
from bench.figures import Result, costs, median_of, median_rate
from bench.measure import run_load, warm
from bench.plan import Plan
from bench.report import Outcome, spread
from bench.reporting import report_others
from bench.targets import BenchError, Engine, Gateway, Target, direct
from bench.watch import NOTHING, Look

# What a program that dies or answers nonsense makes of a load.
UNFIT = (OSError, ValueError, LookupError, http.client.HTTPException, subprocess.SubprocessError)

ONE_EACH: dict[str, Any] = {"protocol": "http/1.1", "shared": False}  # for targets without HTTP/2

Results = dict[str, list[Result]]
"""By target, what each round gave."""

Join = Callable[[Result, Result], object]
"""Adds to a round's result what only the engine's statistics tell."""


@dataclass
class Comparison:
    """An engine, the targets in front of it, and what each round gave."""

    engine: Engine
    gateway: Gateway
    targets: list[Target]
    outcome: Outcome
    slots: int | None = None  # the engine's, where it isn't to have plenty
    connections: int = 0  # open at the engine before the load
    results: Results = field(default_factory=dict)

    def round(self, plan: Plan, number: int, join: Join | None = None, look: Look = NOTHING) -> None:
        """One load on each target, in turns, so that a drifting machine hits all alike."""
        for target in list(self.targets):
            self.engine.reset(slots=self.slots)
            self.connections = self.engine.stats()["connections"]
            try:
                named = replace(plan, name=f"{plan.name}-{target.name}-{number}")
                result = run_load(target, named if target.http2 else replace(named, **ONE_EACH), look)
                self._add(target, result, join)
            except (*UNFIT, BenchError) as error:
                if target.name not in baselines.MAKE:
                    raise
                self._drop(target, error)

    def _add(self, target: Target, result: Result, join: Join | None) -> None:
        stats = self.engine.settled()
        result["most_held"] = stats["most_held"]
        if join:
            join(result, stats)
        del result["finished"]
        if isinstance(target, Gateway):
            target.check_alive()
            result["ledger"], result["gauges"] = target.idle()
        self.results.setdefault(target.name, []).append(result)

    def _drop(self, target: Target, error: Exception) -> None:
        """A baseline that fails is out; the others go on."""
        self.targets.remove(target)
        self.results.pop(target.name, None)
        self.outcome.notes.append(f"{target.name} in {self.outcome.name} ({error})")


@contextmanager
def comparison(
    outcome: Outcome, slots: int, names: Sequence[str] = (), *, engine_slots: int | None = None
) -> Iterator[Comparison]:
    """Start the engine, the gateway and the named baselines, and warm all of them up."""
    available, notes = baselines.choose(names)
    outcome.notes += notes
    with ExitStack() as stack:
        engine = stack.enter_context(Engine())
        gateway = stack.enter_context(Gateway(engine, slots=slots))
        warm(gateway, engine)
        compared = Comparison(engine, gateway, [direct(engine), gateway], outcome, engine_slots)
        for name in available:
            try:
                target = stack.enter_context(baselines.MAKE[name](engine))
                warm(target, engine)
            except (*UNFIT, BenchError) as error:
                outcome.notes.append(f"{name} in {outcome.name} ({error})")
                continue
            compared.targets.append(target)
        yield compared
        outcome.figures.update(compared.results)


def report_cost(
    compared: Comparison, per: str, limit: float | None = None, share: float | None = None
) -> None:
    """CPU time per event or request: at most `limit` us, and at most this share of the pooled proxy's."""
    outcome = compared.outcome
    spent = {name: costs(results, per) for name, results in compared.results.items() if name != "direct"}
    unit = per.removesuffix("s")
    outcome.figures[f"us_per_{unit}"] = spent
    texts = {name: _spread_us(values) for name, values in spent.items()}
    middle = statistics.median(spent["gateway"])
    if limit is None:
        outcome.add(f"CPU per {unit}", texts)
    else:
        outcome.require(f"CPU per {unit}", texts, middle <= limit, f"<= {limit:g} us")
    if share is not None and "pooled" in spent:
        ratio = middle / statistics.median(spent["pooled"])
        outcome.require(f"CPU per {unit}, of pooled's", f"{ratio:.2f}", ratio <= share, f"<= {share:g}")


def _spread_us(values: list[float]) -> str:
    span = f" ({min(values):.1f}-{max(values):.1f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.1f} us{span}"


def report_kernel(compared: Comparison) -> None:
    """How much of the CPU time is the kernel's, by clock ticks."""
    shares = {
        name: statistics.median(
            r["target_system_seconds"] / max(1e-9, r["target_cpu_seconds"]) for r in results
        )
        for name, results in compared.results.items()
        if name != "direct"
    }
    compared.outcome.add("of it in the kernel", {name: f"{share:.0%}" for name, share in shares.items()})


def report_streams(outcome: Outcome, by_target: Results, first: str = "first token") -> None:
    """What holds for every load: no request of the gateway's fails; and its latencies."""
    got = by_target["gateway"]
    wrong = sum(result["errors"] for result in got)
    texts = {
        name: f"{sum(r['errors'] for r in rounds)} of {sum(r['requests'] for r in rounds)}"
        for name, rounds in by_target.items()
    }
    outcome.require("requests failed", texts, wrong == 0, "0")
    for measure, key in ((f"time to {first}", "ttft_ms"), ("between events", "gap_ms")):
        if median_of(got, key)["p50"] is not None:
            medians = {name: median_of(rounds, key) for name, rounds in by_target.items()}
            outcome.add(
                f"{measure}, p50 / p99 ms", {name: spread(of, "p50", "p99") for name, of in medians.items()}
            )
    report_others(outcome, got)


def report_added(compared: Comparison, limits: dict[str, float]) -> None:
    """What the gateway adds to the time to the first token, as the difference of percentiles."""
    outcome = compared.outcome
    ttft = {name: median_of(results, "ttft_ms") for name, results in compared.results.items()}
    for name, limit in limits.items():
        floor = ttft["direct"][name] or 0.0
        added = {target: (of[name] or math.inf) - floor for target, of in ttft.items() if target != "direct"}
        texts = {target: f"{value:+.2f}" for target, value in added.items()}
        outcome.figures.setdefault("added_ttft_ms", {})[name] = added
        holds = added["gateway"] <= limit
        outcome.require(f"added to the first token, {name} ms", texts, holds, f"<= {limit:g}")


def report_rate(compared: Comparison, key: str = "events", share: float | None = None) -> None:
    """What is delivered in a second, if need be at least this share of what arrives without a proxy."""
    rates = {name: median_rate(results, key) for name, results in compared.results.items()}
    texts = {name: f"{rate:,.0f}" for name, rate in rates.items()}
    if share is None:
        compared.outcome.add(f"{key}/s", texts)
    else:
        holds = rates["gateway"] >= share * rates["direct"]
        compared.outcome.require(f"{key}/s", texts, holds, f">= {share:.0%} of direct's")


def report_held(compared: Comparison, slots: int) -> None:
    peak = max(result["most_held"] for result in compared.results["gateway"])
    compared.outcome.require(
        "most at once in the engine / slots", f"{peak}/{slots}", peak <= slots, "<= slots"
    )
