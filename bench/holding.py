"""What streams cost in memory while they are open: the gateway's own, and the kernel's for its sockets."""

from __future__ import annotations

from bench.client import Reading
from bench.compare import Comparison, comparison, report_streams
from bench.leaving import TEARDOWN, join_teardowns, latencies, report_torn_down
from bench.plan import Plan
from bench.report import Outcome, ms, spread
from bench.reporting import MIB, report_books
from bench.watch import Look

SLOW_PSS, SLOW_SOCKETS = 64 * MIB, 128 * MIB
STREAM_BYTES = 56 * 1024


def slow_readers(rounds: int) -> Outcome:
    """Readers far slower than their engine, each of an answer of 11 MB: who holds what they haven't read?"""
    outcome = Outcome(
        "slow-readers", f"200 readers at 2 KB/s of 11 MB each, closed after 15 s; {rounds} rounds"
    )
    plan = Plan(
        url="",
        name="slow",
        streams=200,
        requests=200,
        tokens=5000,
        pad=2048,
        batch=1,
        ramp_seconds=1,
        leave_seconds=15,
        reading=Reading(bytes_per_second=2048, buffer_bytes=8192),
    )
    with comparison(outcome, plan.streams, ("pooled", "nginx")) as compared:
        for number in range(rounds):
            compared.round(plan, number, join_teardowns, Look(memory_every=0.5, sockets_every=1))
    gained, sockets = _gained(compared), _peak(compared, "sockets_peak")
    texts = {name: f"{size / MIB:.1f}" for name, size in gained.items()}
    outcome.require("peak PSS above idle, MiB", texts, gained["gateway"] <= SLOW_PSS, f"<= {SLOW_PSS // MIB}")
    texts = {name: f"{size / MIB:.1f}" for name, size in sockets.items()}
    holds = sockets["gateway"] <= SLOW_SOCKETS
    outcome.require("its sockets in the kernel, peak MiB", texts, holds, f"<= {SLOW_SOCKETS // MIB}")
    read = {
        name: f"{sum(result['bytes'] / result['requests'] for result in results) / len(results) / 1024:.0f}"
        for name, results in compared.results.items()
    }
    outcome.add("read by each client, KiB", read)
    _report_leaving(compared)
    return outcome


def open_streams(rounds: int) -> Outcome:
    """Many streams that hardly move: what one costs just by being open."""
    outcome = Outcome("open-streams", f"1000 streams, a token every 5 s, closed after 14 s; {rounds} rounds")
    plan = Plan(
        url="",
        name="open",
        streams=1000,
        requests=1000,
        tokens=100,
        tps=0.2,
        ramp_seconds=4,
        leave_seconds=14,
    )
    with comparison(outcome, plan.streams, ("pooled", "nginx")) as compared:
        for number in range(rounds):
            compared.round(plan, number, join_teardowns, Look(memory_every=0.5))
    each = {name: size / plan.streams for name, size in _gained(compared).items()}
    texts = {name: f"{size / 1024:.1f}" for name, size in each.items()}
    outcome.require(
        "peak PSS above idle, KiB a stream",
        texts,
        each["gateway"] <= STREAM_BYTES,
        f"<= {STREAM_BYTES // 1024}",
    )
    _report_leaving(compared)
    return outcome


def _peak(compared: Comparison, key: str) -> dict[str, int]:
    """The largest of all rounds, for each target that has a process."""
    return {
        name: max(result[key] for result in results)
        for name, results in compared.results.items()
        if key in results[0]
    }


def _gained(compared: Comparison) -> dict[str, int]:
    """Peak PSS above the idle one, in bytes; of the first round: later ones start from a grown heap."""
    return {
        name: results[0]["pss_peak"] - results[0]["pss_before"]
        for name, results in compared.results.items()
        if "pss_peak" in results[0]
    }


def _report_leaving(compared: Comparison) -> None:
    outcome = compared.outcome
    idle = {name: f"{size / MIB:.1f}" for name, size in _peak(compared, "pss_before").items()}
    outcome.add("PSS when idle, MiB", idle)
    report_torn_down(outcome, compared.results)
    late = latencies(compared)
    outcome.add(TEARDOWN, {name: spread(of, "p50", "p99", "max") for name, of in late.items()})
    cpu = {
        name: ms(sum(result["target_cpu_seconds"] for result in results))
        for name, results in compared.results.items()
        if name != "direct"
    }
    outcome.add("CPU in all, s", cpu)
    report_streams(outcome, compared.results)
    report_books(outcome, compared.results["gateway"])
