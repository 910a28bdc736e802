"""What an event costs, at an everyday pace, in bulk, with more streams, and beyond what one core carries.

Required are figures of the gateway's; the baselines are there to read them beside.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from bench.compare import (
    Comparison,
    comparison,
    report_added,
    report_cost,
    report_held,
    report_kernel,
    report_rate,
    report_streams,
)
from bench.figures import Result, drained_ms, percentiles
from bench.plan import Plan
from bench.report import Outcome, ms, spread
from bench.reporting import MIB, report_books, report_others
from bench.watch import Look

STEADY_WINDOW = (1.5, 3.5)  # of `steady-400`, in seconds after its start
GROWTH_STREAMS = (50, 500, 2000)
GROWTH_RATE = 5000  # events/s in all, whatever the number of streams
GROWTH_FACTOR = 1.5
DRAIN_MS = 2000.0
OVERLOAD_FACTORS = (2, 4)
TRIAL_WINDOW = (3.0, 7.0)
OVERLOAD_WINDOW = (3.0, 8.0)  # all streams are open, and none has ended yet


def _rounds(outcome: Outcome, plan: Plan, rounds: int, baselines: Sequence[str]) -> Comparison:
    with comparison(outcome, plan.streams, baselines) as compared:
        for number in range(rounds):
            compared.round(plan, number)
        outcome.figures["rss"] = rss = compared.gateway.tree.memory().rss
    outcome.add("RSS after all, MiB", ms(rss / MIB))
    return compared


def steady(rounds: int) -> Outcome:
    """What one token costs at an everyday pace, and how much later the first one comes."""
    outcome = Outcome("steady", f"100 streams x 50 tokens/s x 200 tokens; {rounds} rounds")
    plan = Plan(url="", name="steady", streams=100, requests=100, tokens=200, tps=50, ramp_seconds=1)
    compared = _rounds(outcome, plan, rounds, ("naive", "pooled", "nginx"))
    report_cost(compared, "events", limit=60, share=0.45)
    report_kernel(compared)
    report_added(compared, {"p50": 1.5, "p99": 5.0})
    _report_load(compared, plan)
    return outcome


def steady_400(rounds: int) -> Outcome:
    """The same with four times the streams: 20,000 events/s at the peak."""
    outcome = Outcome("steady-400", f"400 streams x 50 tokens/s x 200 tokens; {rounds} rounds")
    plan = Plan(url="", name="steady-400", streams=400, requests=400, tokens=200, tps=50, ramp_seconds=1)
    plan = replace(plan, window=STEADY_WINDOW)
    compared = _rounds(outcome, plan, rounds, ("pooled", "nginx"))
    report_cost(compared, "events", limit=45)
    report_kernel(compared)
    report_rate(compared, share=0.99)
    seconds = STEADY_WINDOW[1] - STEADY_WINDOW[0]
    inside = {
        name: statistics.median(result["events_in_window"] for result in results) / seconds
        for name, results in compared.results.items()
    }
    outcome.add("events/s while all are open", {name: f"{rate:,.0f}" for name, rate in inside.items()})
    _report_load(compared, plan, rate=False)
    return outcome


def bulk(rounds: int) -> Outcome:
    """What a token costs when the engine is as fast as it can be and events come many at a time."""
    outcome = Outcome("bulk", f"64 streams x 2000 tokens, as fast as they go; {rounds} rounds")
    plan = Plan(url="", name="bulk", streams=64, requests=64, tokens=2000)
    compared = _rounds(outcome, plan, rounds, ("pooled", "nginx"))
    report_cost(compared, "events", limit=2.5)
    report_kernel(compared)
    _report_load(compared, plan)
    return outcome


def requests(rounds: int) -> Outcome:
    """What a request costs that isn't streamed."""
    outcome = Outcome("requests", f"2000 requests, not streamed, 32 at a time; {rounds} rounds")
    plan = Plan(url="", name="requests", streams=32, requests=2000, tokens=1, stream=False)
    compared = _rounds(outcome, plan, rounds, ("pooled", "nginx"))
    report_cost(compared, "requests", limit=900, share=0.5)
    report_rate(compared, "requests")
    _report_load(compared, plan, rate=False, first="the answer")
    return outcome


def _report_load(compared: Comparison, plan: Plan, *, rate: bool = True, first: str = "first token") -> None:
    outcome, got = compared.outcome, compared.results["gateway"]
    report_streams(outcome, compared.results, first)
    if rate:
        report_rate(compared)
    cores = statistics.median(result["target_cpu_seconds"] / result["seconds"] for result in got)
    outcome.add("gateway cores used", f"{cores:.2f}")
    report_held(compared, plan.streams)
    report_books(outcome, got)


def growth(rounds: int) -> Outcome:
    """The same number of events over more and more streams: what one costs must hardly grow.

    Measured in a window in which all streams are open and none begins or ends: it is about events.
    """
    outcome = Outcome("growth", f"{GROWTH_RATE:,} events/s over {GROWTH_STREAMS} streams; {rounds} rounds")
    spent: dict[str, dict[int, list[float]]] = {}
    with comparison(outcome, max(GROWTH_STREAMS), ("nginx",)) as compared:
        # nginx does next to nothing of its own: how its cost grows is how the machine's does.
        compared.targets = [target for target in compared.targets if target.name != "direct"]
        for number in range(rounds):
            for streams in GROWTH_STREAMS:
                plan = _growth_plan(streams)
                compared.round(plan, number)
                for target in compared.targets:
                    result = compared.results[target.name][-1]
                    cost = result["window_cpu_seconds"] / max(1, result["events_in_window"]) * 1e6
                    spent.setdefault(target.name, {}).setdefault(streams, []).append(cost)
    middle = {name: {of: statistics.median(each) for of, each in by.items()} for name, by in spent.items()}
    for streams in GROWTH_STREAMS:
        costs = {name: f"{by[streams]:.1f} us" for name, by in middle.items()}
        outcome.add(f"CPU per event, {streams:,} streams", costs)
    outcome.figures["us_per_event_by_streams"] = spent["gateway"]
    factors = {name: by[GROWTH_STREAMS[-1]] / by[GROWTH_STREAMS[0]] for name, by in middle.items()}
    outcome.require(
        f"{GROWTH_STREAMS[-1]:,} streams / {GROWTH_STREAMS[0]}",
        {name: f"{factor:.2f}" for name, factor in factors.items()},
        factors["gateway"] <= GROWTH_FACTOR,
        f"<= {GROWTH_FACTOR}",
    )
    del outcome.figures["gateway"]
    report_books(outcome, compared.results["gateway"])
    report_others(outcome, compared.results["gateway"])
    return outcome


def _growth_plan(streams: int) -> Plan:
    ramp = max(1.0, streams / 300)  # what it costs to open them is not to pile up
    begin = ramp + 1
    return Plan(
        url="",
        name=f"growth-{streams}",
        streams=streams,
        requests=streams,
        tokens=1_000_000,
        tps=GROWTH_RATE / streams,
        ramp_seconds=ramp,
        window=(begin, begin + 5),
        leave_all_seconds=begin + 5.3,
    )


def overload(rounds: int) -> Outcome:
    """More events than one core carries one at a time: writes get larger, and nothing piles up."""
    outcome = Outcome(
        "overload", f"500 streams, {OVERLOAD_FACTORS} times what one core carries; {rounds} rounds"
    )
    trial = Plan(url="", name="trial", streams=500, requests=500, tokens=80, tps=10, ramp_seconds=2)
    trial = replace(trial, window=TRIAL_WINDOW)

    def join(result: Result, stats: Result) -> None:
        result["drained_ms"] = percentiles(drained_ms(result, stats))

    found: dict[int, list[Result]] = {}
    with comparison(outcome, trial.streams) as compared:
        compared.targets = [compared.gateway]
        compared.round(trial, 0)
        [alone] = compared.results.pop("gateway")
        cost = alone["window_cpu_seconds"] / alone["events_in_window"]
        outcome.add("CPU per event alone, and the rate that makes", f"{cost * 1e6:.1f} us, {1 / cost:,.0f}/s")
        for factor in OVERLOAD_FACTORS:
            tps = round(factor / cost / trial.streams)
            plan = replace(trial, name="overload", tps=tps, tokens=9 * tps, window=OVERLOAD_WINDOW)
            for number in range(rounds):
                compared.round(plan, number, join, Look(memory_every=0.25))
            found[factor] = compared.results.pop("gateway")
            _report_overload(outcome, found[factor], factor, tps * trial.streams)
    outcome.figures = {"us_per_event_alone": cost * 1e6, "by_factor": found}
    report_streams(outcome, {"gateway": [result for results in found.values() for result in results]})
    return outcome


def _report_overload(outcome: Outcome, got: Sequence[Result], factor: int, asked: float) -> None:
    def middle(key: str, per: str) -> float:
        return float(statistics.median(result[key] / max(1, result[per]) for result in got))

    seconds = OVERLOAD_WINDOW[1] - OVERLOAD_WINDOW[0]
    rate = statistics.median(result["events_in_window"] for result in got) / seconds
    outcome.add(f"x{factor}: events/s asked for / delivered", f"{asked:,.0f} / {rate:,.0f}")
    cores = statistics.median(result["window_cpu_seconds"] for result in got) / seconds
    outcome.add(f"x{factor}: cores used, CPU per event", f"{cores:.2f}, {cores / rate * 1e6:.1f} us")
    each = f"{middle('events', 'reads'):.2f} / {middle('bytes', 'reads'):.0f}"
    outcome.add(f"x{factor}: events / bytes per read at the client", each)
    lag = [result["drained_ms"] for result in got]
    worst = max(of["max"] or 0.0 for of in lag)
    text = " ".join(spread(of, "p50", "p99", "max") for of in lag) + (" (LATE)" if worst > DRAIN_MS else "")
    outcome.add(f"x{factor}: engine's last write to client's last event, p50 / p99 / max ms", text)
    outcome.add(f"x{factor}: between events, p99 ms", ms(statistics.median(r["gap_ms"]["p99"] for r in got)))
    gained = max(result["pss_peak"] - result["pss_before"] for result in got)
    outcome.add(f"x{factor}: peak PSS above what it was before, MiB", ms(gained / MIB))
