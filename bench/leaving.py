"""Clients that leave: how fast the engine learns of it, and what it does in vain until then.

"direct" is the same load without a gateway: the floor of the machine and of the bench itself, to be read
beside every latency.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from bench.compare import Comparison, comparison, report_cost, report_held, report_rate, report_streams
from bench.figures import Result, costs, percentiles, teardowns
from bench.measure import run_load, warm
from bench.plan import Plan
from bench.report import Outcome, at_most, spread
from bench.reporting import report_books, report_memory, report_others
from bench.targets import Engine, Gateway, direct

TEARDOWN = "client's close to engine's, p50 / p99 / max ms"
AT_ONCE_MS = 150.0


class Limits(NamedTuple):
    """What must hold of teardowns: percentiles in ms, and tokens a stream."""

    p50: float
    p99: float
    tokens: int


LIMITS = {100: Limits(10, 10, 1), 500: Limits(1, 5, 0)}

STORM = Plan(url="", name="", streams=500, requests=500, tokens=100, tps=20, leave_after=50, ramp_seconds=2)
"""Streams that leave after half of their events, over two seconds."""


def join_teardowns(result: Result, stats: Result) -> None:
    result.update(teardowns(result, stats))
    del result["leavers"]


def leavers(streams: int, rounds: int) -> Outcome:
    """Streams that leave after 50 of 100 events, over two seconds; round after round on one gateway."""
    name = "leavers" if streams == 100 else f"leavers-{streams}"
    outcome = Outcome(
        name, f"{streams} streams x 20 tokens/s, each leaves after 50 events, over 2 s; {rounds} rounds"
    )
    plan = replace(STORM, name=name, streams=streams, requests=streams)
    done: list[Result] = []
    with Engine() as engine, Gateway(engine, slots=streams) as gateway:
        floor = teardowns(run_load(direct(engine), replace(plan, name=f"{name}-direct")), engine.settled())
        warm(gateway, engine)
        for number in range(rounds):
            engine.reset()
            result = run_load(gateway, replace(plan, name=f"{name}-{number}"))
            result["ledger"], result["gauges"] = gateway.idle()
            join_teardowns(result, engine.settled())
            del result["finished"]
            memory = gateway.tree.memory()
            result.update(rss=memory.rss, pss=memory.pss)
            done.append(result)
        faults = gateway.faults()
    outcome.figures = {"rounds": done, "direct": floor, "tracebacks": faults}
    _report_teardown(outcome, done, floor, LIMITS[streams])
    peak = max(result["most_held"] for result in done)
    outcome.require("most at once in the engine / slots", f"{peak}/{streams}", peak <= streams, "<= slots")
    report_books(outcome, done)
    report_memory(outcome, done)
    outcome.require("tracebacks in the gateway's log", str(faults), faults == 0, "0")
    outcome.add("CPU per event", f"{statistics.median(costs(done, 'events')):.1f} us")
    report_others(outcome, done)
    return outcome


def _report_teardown(outcome: Outcome, done: Sequence[Result], floor: Result, limits: Limits) -> None:
    report_torn_down(outcome, {"gateway": done, "direct": [floor]})
    late = percentiles([value for result in done for value in result["teardown_ms"]])
    base = percentiles(floor["teardown_ms"])
    outcome.figures.update(teardown_ms=late, direct_teardown_ms=base)
    holds = at_most(late["p50"], limits.p50) and at_most(late["p99"], limits.p99)
    texts = {"gateway": spread(late, "p50", "p99", "max"), "direct": spread(base, "p50", "p99", "max")}
    outcome.require(TEARDOWN, texts, holds, f"<= {limits.p50:g} / {limits.p99:g}")
    worst = max(result["tokens_after_close_max"] for result in done)
    after = sum(result["tokens_after_close"] for result in done)
    text = f"{worst} ({after} in all)"
    measure = "tokens made after the close, most a stream"
    outcome.require(measure, text, worst <= limits.tokens, f"<= {limits.tokens}")


def report_torn_down(
    outcome: Outcome, results: dict[str, Sequence[Result]] | dict[str, list[Result]]
) -> None:
    sums = {
        name: tuple(sum(result[key] for result in rounds) for key in ("torn_down", "left"))
        for name, rounds in results.items()
    }
    texts = {name: f"{torn}/{left}" for name, (torn, left) in sums.items()}
    torn, left = sums["gateway"]
    outcome.require("torn down / left", texts, torn == left > 0, "all")


def latencies(compared: Comparison) -> dict[str, dict[str, float | None]]:
    """For each target, percentiles of the teardowns of all rounds together, in ms."""
    return {
        name: percentiles([value for result in results for value in result["teardown_ms"]])
        for name, results in compared.results.items()
    }


def at_once(rounds: int) -> Outcome:
    """500 streams that all leave at one instant: the time until the last of them is torn down."""
    outcome = Outcome("leavers-at-once", f"500 streams x 20 tokens/s, all leave at 5 s; {rounds} rounds")
    plan = Plan(
        url="",
        name="at-once",
        streams=500,
        requests=500,
        tokens=1000,
        tps=20,
        ramp_seconds=2,
        leave_all_seconds=5,
    )

    def join(result: Result, stats: Result) -> None:
        left = [leaver["left"] for leaver in result["leavers"]]
        ended = [record["ended"] for record in stats["ended"] if record["outcome"] == "aborted"]
        result["all_down_ms"] = (max(ended) - min(left)) * 1e3
        result["leaving_ms"] = (max(left) - min(left)) * 1e3
        join_teardowns(result, stats)

    with comparison(outcome, plan.streams) as compared:
        for number in range(rounds):
            compared.round(plan, number, join)
    report_torn_down(outcome, compared.results)
    spans = {name: max(r["all_down_ms"] for r in results) for name, results in compared.results.items()}
    texts = {name: f"{span:.0f}" for name, span in spans.items()}
    outcome.require(
        "first close to last teardown, worst ms", texts, spans["gateway"] <= AT_ONCE_MS, f"<= {AT_ONCE_MS:g}"
    )
    own = {name: max(r["leaving_ms"] for r in results) for name, results in compared.results.items()}
    outcome.add("of it the clients' own closing, ms", {name: f"{span:.0f}" for name, span in own.items()})
    report_books(outcome, compared.results["gateway"])
    report_others(outcome, compared.results["gateway"])
    return outcome


def http2(rounds: int) -> Outcome:
    """Many streams on one HTTP/2 connection; "direct" is HTTP/1.1, which is all the engine speaks."""
    outcome = Outcome(
        "http2", f"100 streams x 50 tokens/s on one connection, a fifth reset at 100 of 200; {rounds} rounds"
    )
    plan = Plan(
        url="",
        name="http2",
        streams=100,
        requests=100,
        tokens=200,
        tps=50,
        ramp_seconds=1,
        leave_after=100,
        leave_fraction=0.2,
        protocol="h2",
        shared=True,
    )
    with comparison(outcome, plan.streams) as compared:
        for number in range(rounds):
            compared.round(plan, number, join_teardowns)
    report_cost(compared, "events", limit=150)
    report_torn_down(outcome, compared.results)
    late = latencies(compared)
    texts = {name: spread(of, "p50", "p99", "max") for name, of in late.items()}
    outcome.require(TEARDOWN, texts, at_most(late["gateway"]["p99"], 5), "p99 <= 5")
    report_streams(outcome, compared.results)
    report_rate(compared)
    report_books(outcome, compared.results["gateway"])
    return outcome


def crowd(rounds: int) -> Outcome:
    """More clients than slots, some leaving half-way: the engine must never hold more than its slots."""
    slots = 16
    outcome = Outcome("crowd", f"100 clients on {slots} slots, a fifth leaves half-way; {rounds} rounds")
    plan = Plan(
        url="",
        name="crowd",
        streams=100,
        requests=200,
        tokens=60,
        tps=40,
        prefill_ms=50,
        leave_after=30,
        leave_fraction=0.2,
    )
    with comparison(outcome, slots, engine_slots=slots) as compared:
        for number in range(rounds):
            compared.round(plan, number, join_teardowns)
    report_held(compared, slots)
    report_torn_down(outcome, compared.results)
    late = latencies(compared)
    outcome.add(TEARDOWN, {name: spread(of, "p50", "p99", "max") for name, of in late.items()})
    report_streams(outcome, compared.results)
    report_rate(compared)
    report_books(outcome, compared.results["gateway"])
    return outcome
