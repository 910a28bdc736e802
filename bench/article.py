"""The two loads of the article, on the gateway, without it, and on the proxies one would write instead."""

from __future__ import annotations

import statistics

from bench.compare import Comparison, comparison, report_cost, report_held, report_rate, report_streams
from bench.figures import Result, percentiles
from bench.leaving import TEARDOWN, join_teardowns, latencies, report_torn_down
from bench.plan import Plan
from bench.report import Outcome, at_most, spread
from bench.reporting import MIB, report_books
from bench.watch import Look

BASELINES = ("naive", "pooled", "nginx")
DETECTION_MS, MEMORY = 10.0, 200 * MIB
SLOTS, FREE_MS = 16, 500.0


def _teardown_row(compared: Comparison, limit: float, what: str) -> None:
    late = latencies(compared)
    compared.outcome.figures["teardown_ms"] = late
    texts = {name: spread(of, "p50", "p99", "max") for name, of in late.items()}
    compared.outcome.require(what, texts, at_most(late["gateway"]["p99"], limit), f"p99 <= {limit:g}")


def leaving(rounds: int) -> Outcome:
    """500 clients that leave after 50 tokens each: how soon is it noticed, and what is made in vain?"""
    outcome = Outcome("article-a", f"500 clients x 20 tokens/s, each leaves after 50 tokens; {rounds} rounds")
    plan = Plan(
        url="",
        name="article-a",
        streams=500,
        requests=500,
        tokens=500,
        tps=20,
        leave_after=50,
        ramp_seconds=2,
    )
    with comparison(outcome, plan.streams, BASELINES) as compared:

        def join(result: Result, stats: Result) -> None:
            join_teardowns(result, stats)
            result["held_afterwards"] = max(0, compared.engine.stats()["connections"] - compared.connections)

        for number in range(rounds):
            compared.round(plan, number, join, Look(memory_every=0.25))
    report_torn_down(outcome, compared.results)
    _teardown_row(compared, DETECTION_MS, TEARDOWN)
    _report_waste(compared)
    peaks = {
        name: max(result["pss_peak"] for result in results) / MIB
        for name, results in compared.results.items()
        if name != "direct"
    }
    texts = {name: f"{size:.0f}" for name, size in peaks.items()}
    outcome.require("peak PSS, MiB", texts, peaks["gateway"] <= MEMORY / MIB, f"<= {MEMORY // MIB}")
    held = {name: max(result["held_afterwards"] for result in rs) for name, rs in compared.results.items()}
    texts = {name: str(count) for name, count in held.items()}
    outcome.require("connections held at the engine afterwards", texts, held["gateway"] == 0, "0")
    report_cost(compared, "events")
    report_streams(outcome, compared.results)
    report_books(outcome, compared.results["gateway"])
    return outcome


def _report_waste(compared: Comparison) -> None:
    worst = {
        name: max(result["tokens_after_close_max"] for result in results)
        for name, results in compared.results.items()
    }
    wasted = {
        name: statistics.median(result["tokens_after_close"] for result in results)
        for name, results in compared.results.items()
    }
    texts = {name: f"{worst[name]} ({wasted[name]:.0f} in all)" for name in worst}
    measure = "tokens made after the close, most a stream"
    compared.outcome.require(measure, texts, worst["gateway"] <= 1, "<= 1")


def slots(rounds: int) -> Outcome:
    """100 clients at once on an engine with 16 slots: what the wait costs, and when a left slot is free."""
    outcome = Outcome(
        "article-b",
        f"100 clients on {SLOTS} slots, answers of 500 tokens, a fifth leaves half-way; {rounds} rounds",
    )
    plan = Plan(
        url="",
        name="article-b",
        streams=100,
        requests=100,
        tokens=500,
        tps=100,
        prefill_ms=50,
        prompt_words=300,
        leave_after=250,
        leave_fraction=0.2,
    )
    with comparison(outcome, SLOTS, BASELINES, engine_slots=SLOTS) as compared:
        for number in range(rounds):
            compared.round(plan, number, join_teardowns)
    waits = {
        name: percentiles([statistics.median(r["ttft_ms"]["p95"] or 0 for r in results)])["p50"]
        for name, results in compared.results.items()
    }
    texts = {name: f"{(wait or 0) / 1e3:.2f}" for name, wait in waits.items()}
    outcome.add("time to first token, p95 s", texts)
    report_rate(compared, share=0.99)
    report_torn_down(outcome, compared.results)
    _teardown_row(compared, FREE_MS, "client's close to free slot, p50 / p99 / max ms")
    report_held(compared, SLOTS)
    report_cost(compared, "events")
    report_streams(outcome, compared.results)
    report_books(outcome, compared.results["gateway"])
    return outcome
