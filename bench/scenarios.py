"""The scenarios on the simulated engine: what is run, what is read off, what must hold.

Each takes its number of rounds and returns an `Outcome`. "direct" is the same load without a gateway: the
floor of the machine and of the bench itself, to be read beside every latency.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

from bench.load import Plan, Probe, percentiles
from bench.measure import run_load, teardowns, warm
from bench.report import Outcome, at_most, ms, spread
from bench.targets import HOST, Engine, Gateway, direct

MIB = 1 << 20
SETTLE_ROUNDS = 3  # rounds until allocators, caches and connection pools have their size
DISTURBED = 0.15  # of a core: above it the table says so
FLAT_BYTES = 2 * MIB  # growth after them that still counts as flat


def leavers(streams: int, rounds: int) -> Outcome:
    """Streams that leave after 50 of 100 events, over two seconds; round after round on one gateway."""
    name = "leavers" if streams == 100 else f"leavers-{streams}"
    outcome = Outcome(
        name, f"{streams} streams x 20 tokens/s, each leaves after 50 events, over 2 s; {rounds} rounds"
    )
    plan = Plan(
        url="",
        name=name,
        streams=streams,
        requests=streams,
        tokens=100,
        tps=20,
        leave_after=50,
        ramp_seconds=2,
    )
    done: list[dict[str, Any]] = []
    with Engine() as engine, Gateway(engine, slots=streams) as gateway:
        floor = teardowns(run_load(direct(engine), replace(plan, name=f"{name}-direct")), engine.settled())
        warm(gateway, engine)
        for number in range(rounds):
            engine.reset()
            result = run_load(gateway, replace(plan, name=f"{name}-{number}"))
            ledger, gauges = gateway.idle()
            entry = teardowns(result, engine.settled())
            memory = gateway.tree.memory()
            entry.update(ledger=ledger, gauges=gauges, rss=memory.rss, pss=memory.pss)
            entry.update(outcomes=result["outcomes"], errors=result["errors"], refusals=result["refusals"])
            for key in ("others_on_gateway_core", "others_on_rest_core"):
                entry[key] = result[key]
            entry["cpu_us_per_event"] = result["gateway_cpu_seconds"] / max(1, result["events"]) * 1e6
            done.append(entry)
        faults = gateway.faults()
    outcome.figures = {"rounds": done, "direct": floor, "tracebacks": faults}
    _report_teardown(outcome, done, floor, streams, strict=streams <= 100)
    _report_books(outcome, done)
    _report_memory(outcome, done)
    outcome.require("tracebacks in the gateway's log", str(faults), faults == 0, "0")
    cpu = statistics.median(entry["cpu_us_per_event"] for entry in done)
    outcome.add("gateway CPU per event", f"{cpu:.1f} us")
    _report_others(outcome, done)
    return outcome


def _report_teardown(
    outcome: Outcome, done: list[dict[str, Any]], floor: dict[str, Any], streams: int, *, strict: bool
) -> None:
    total, torn = streams * len(done), sum(entry["torn_down"] for entry in done)
    outcome.require(
        "torn down / left",
        f"{torn}/{total}",
        torn == total,
        "all",
        baseline=f"{floor['torn_down']}/{streams}",
    )
    late = percentiles([value for entry in done for value in entry["teardown_ms"]])
    base = percentiles(floor["teardown_ms"])
    outcome.figures.update(teardown_ms=late, direct_teardown_ms=base)
    text, base_text = spread(late, "p50", "p99", "max"), spread(base, "p50", "p99", "max")
    measure = "client's close to engine's, p50 / p99 / max ms"
    worst = max(entry["tokens_after_close_max"] for entry in done)
    after = sum(entry["tokens_after_close"] for entry in done)
    tokens = f"{worst} ({after} in all)"
    if strict:
        outcome.require(measure, text, at_most(late["p99"], 10), "p99 <= 10", baseline=base_text)
        outcome.require("tokens made after the close, most a stream", tokens, worst <= 1, "<= 1")
    else:
        outcome.add(measure, text, baseline=base_text)
        outcome.add("tokens made after the close, most a stream", tokens)
    peak = max(entry["most_held"] for entry in done)
    outcome.require("most at once in the engine / slots", f"{peak}/{streams}", peak <= streams, "<= slots")


def _report_books(outcome: Outcome, done: list[dict[str, Any]]) -> None:
    """The ledger and the gauges after each round."""
    balanced = all(entry["ledger"]["balanced"] for entry in done)
    engines = [row for entry in done for row in entry["ledger"]["engines"].values()]
    held = max(row["running"] + row["reclaiming"] + row["ghosts"] for row in engines)
    lost = max(abs(row["acquired"] - row["released"]) for row in engines)
    text = f"{held} held, {lost} not released, {'' if balanced else 'NOT '}balanced"
    outcome.require("ledger after each round, worst", text, balanced and held == lost == 0, "0, 0, balanced")
    gauges = [(name, value) for entry in done for name, value in entry["gauges"].items()]
    wrong = sorted({f"{name}={value}" for name, value in gauges if value != 0})
    outcome.require("gauges after each round", ", ".join(wrong) or "all 0", not wrong, "all 0")


def _report_memory(outcome: Outcome, done: list[dict[str, Any]]) -> None:
    """Flat: no more than FLAT_BYTES gained after the first rounds. Needs a few rounds to say so."""
    for key in ("rss", "pss"):
        sizes = [entry[key] for entry in done]
        outcome.add(f"{key.upper()} after each round, MiB", " ".join(f"{size / MIB:.1f}" for size in sizes))
        if len(sizes) > SETTLE_ROUNDS + 1:
            growth = sizes[-1] - sizes[SETTLE_ROUNDS - 1]
            text = f"{growth / MIB:+.2f} MiB"
            required = f"<= {FLAT_BYTES // MIB} MiB"
            outcome.require(
                f"{key.upper()} gained after round {SETTLE_ROUNDS}", text, growth <= FLAT_BYTES, required
            )


def aside(rounds: int) -> Outcome:
    """Other routes while 200 streams run: nothing may wait behind the relay."""
    outcome = Outcome("aside", f"200 streams x 20 tokens/s; other routes timed meanwhile; {rounds} rounds")
    plan = Plan(url="", name="aside", streams=200, requests=200, tokens=200, tps=20, ramp_seconds=1)
    embedding: dict[str, object] = {"model": "sim", "input": "a short text to embed"}
    found: dict[str, list[dict[str, Any]]] = {"gateway": [], "direct": []}
    with Engine() as engine, Gateway(engine, slots=256) as gateway:
        warm(gateway, engine)
        for _ in range(rounds):
            for target in (direct(engine), gateway):
                probes = [
                    Probe("GET /v1/models", target.url("/v1/models"), after_seconds=2.0),
                    Probe(
                        "POST /v1/embeddings",
                        target.url("/v1/embeddings"),
                        "POST",
                        embedding,
                        after_seconds=2.05,
                    ),
                ]
                if target.admin:
                    admin = f"http://{HOST}:{target.admin}"
                    probes += [
                        Probe(
                            "GET /admin/requests",
                            f"{admin}/admin/requests",
                            count=15,
                            every_seconds=0.4,
                            after_seconds=2.0,
                        ),
                        Probe(
                            "GET /metrics", f"{admin}/metrics", count=15, every_seconds=0.4, after_seconds=2.2
                        ),
                    ]
                found[target.name].append(run_load(target, replace(plan, probes=probes)))
    outcome.figures = dict(found)
    names = list(found["gateway"][0]["probes"])
    for name in names:
        limit = 50 if "/v1/" in name else 100
        got, base = (_probe(found[target], name) for target in ("gateway", "direct"))
        text = spread(got, "p50", "max") + (f" ({got['errors']:.0f} errors)" if got["errors"] else "")
        holds = at_most(got["max"], limit) and not got["errors"]
        measure = f"{name}, p50 / max ms"
        outcome.require(measure, text, holds, f"max <= {limit}", baseline=spread(base, "p50", "max"))
    _report_streams(outcome, found["gateway"], found["direct"])
    return outcome


def _probe(results: list[dict[str, Any]], name: str) -> dict[str, float | None]:
    rounds = [result["probes"][name] for result in results if name in result["probes"]]
    if not rounds:
        return {"p50": None, "max": None, "errors": 0}
    medians = [entry["ms"]["p50"] for entry in rounds if entry["ms"]["p50"] is not None]
    longest = [entry["ms"]["max"] for entry in rounds if entry["ms"]["max"] is not None]
    return {
        "p50": statistics.median(medians) if medians else None,
        "max": max(longest, default=None),
        "errors": sum(entry["errors"] for entry in rounds),
    }


def _report_streams(outcome: Outcome, got: list[dict[str, Any]], base: list[dict[str, Any]]) -> None:
    """What holds for every load: no stream fails, and what its events cost in time."""
    wrong = sum(result["errors"] for result in got)
    total = sum(result["requests"] for result in got)
    outcome.require("streams failed", f"{wrong} of {total}", wrong == 0, "0")
    for measure, key, names in (
        ("time to first token, p50 / p99 ms", "ttft_ms", ("p50", "p99")),
        ("between events, p50 / p99 ms", "gap_ms", ("p50", "p99")),
    ):
        text, floor = (spread(_median(results, key), *names) for results in (got, base))
        outcome.add(measure, text, baseline=floor)
    _report_others(outcome, got)


def _report_others(outcome: Outcome, got: list[dict[str, Any]]) -> None:
    keys = ("others_on_gateway_core", "others_on_rest_core")
    most = [max(result[key] for result in got) for key in keys]
    text = " / ".join(f"{value:.2f}" for value in most) + (" (DISTURBED)" if max(most) > DISTURBED else "")
    outcome.add("others' load on the gateway's / the other core, most", text)


def _median(results: list[dict[str, Any]], key: str) -> dict[str, float | None]:
    out: dict[str, float | None] = {}
    for name in results[0][key]:
        values = [result[key][name] for result in results if result[key][name] is not None]
        out[name] = statistics.median(values) if values else None
    return out


def _interleaved(outcome: Outcome, plan: Plan, rounds: int) -> None:
    """The same load with and without the gateway, in turns, so that a drifting machine hits both alike."""
    got: list[dict[str, Any]] = []
    base: list[dict[str, Any]] = []
    with Engine() as engine, Gateway(engine, slots=plan.streams) as gateway:
        warm(gateway, engine)
        cpu, since = gateway.tree.cpu(), time.monotonic()
        time.sleep(1)
        idle = gateway.tree.cpu().since(cpu) / (time.monotonic() - since)
        for number in range(rounds):
            for target, results in ((direct(engine), base), (gateway, got)):
                engine.reset()
                result = run_load(target, replace(plan, name=f"{plan.name}-{target.name}-{number}"))
                result["most_held"] = engine.settled()["most_held"]
                results.append(result)
        memory = gateway.tree.memory()
    costs = [result["gateway_cpu_seconds"] / max(1, result["events"]) * 1e6 for result in got]
    outcome.figures = {
        "gateway": got,
        "direct": base,
        "us_per_event": costs,
        "idle_cores": idle,
        "rss": memory.rss,
    }
    middle = statistics.median(costs)
    outcome.add("gateway CPU per event", f"{middle:.1f} us ({min(costs):.1f}-{max(costs):.1f})")
    _report_streams(outcome, got, base)
    speeds = [[result["events"] / result["seconds"] for result in results] for results in (got, base)]
    rate, floor = (statistics.median(values) for values in speeds)
    outcome.add("events/s", f"{rate:,.0f}", baseline=f"{floor:,.0f}")
    cores = statistics.median(result["gateway_cpu_seconds"] / result["seconds"] for result in got)
    outcome.add("gateway cores used / idle", f"{cores:.2f} / {idle:.4f}")
    peak = max(result["most_held"] for result in got)
    outcome.require(
        "most at once in the engine / slots", f"{peak}/{plan.streams}", peak <= plan.streams, "<= slots"
    )
    outcome.add("RSS after all, MiB", ms(memory.rss / MIB))


def steady(rounds: int) -> Outcome:
    """What one token costs at an everyday pace."""
    outcome = Outcome("steady", f"100 streams x 50 tokens/s x 200 tokens; {rounds} rounds")
    plan = Plan(url="", name="steady", streams=100, requests=100, tokens=200, tps=50, ramp_seconds=1)
    _interleaved(outcome, plan, rounds)
    return outcome


def bulk(rounds: int) -> Outcome:
    """What a token costs when the engine is as fast as it can be and events come many at a time."""
    outcome = Outcome("bulk", f"64 streams x 2000 tokens, as fast as they go; {rounds} rounds")
    plan = Plan(url="", name="bulk", streams=64, requests=64, tokens=2000)
    _interleaved(outcome, plan, rounds)
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
    got: list[dict[str, Any]] = []
    base: list[dict[str, Any]] = []
    with Engine() as engine, Gateway(engine, slots=slots) as gateway:
        warm(gateway, engine)
        for number in range(rounds):
            for target, results in ((direct(engine), base), (gateway, got)):
                engine.reset(slots=slots)
                result = run_load(target, replace(plan, name=f"crowd-{target.name}-{number}"))
                result.update(teardowns(result, engine.settled()))
                if isinstance(target, Gateway):
                    result["ledger"], result["gauges"] = target.idle()
                results.append(result)
    outcome.figures = {"gateway": got, "direct": base}
    peak = max(result["most_held"] for result in got)
    outcome.require("most at once in the engine / slots", f"{peak}/{slots}", peak <= slots, "<= slots")
    torn, left = (sum(result[key] for result in got) for key in ("torn_down", "left"))
    outcome.require("torn down / left", f"{torn}/{left}", torn == left, "all")
    late, floor = (
        percentiles([value for result in results for value in result["teardown_ms"]])
        for results in (got, base)
    )
    outcome.add(
        "client's close to engine's, p50 / p99 / max ms",
        spread(late, "p50", "p99", "max"),
        baseline=spread(floor, "p50", "p99", "max"),
    )
    _report_streams(outcome, got, base)
    rate, direct_rate = (
        statistics.median(r["events"] / r["seconds"] for r in results) for results in (got, base)
    )
    outcome.add("events/s", f"{rate:,.0f}", baseline=f"{direct_rate:,.0f}")
    _report_books(outcome, got)
    return outcome
