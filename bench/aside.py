"""Whether other routes wait behind the streams."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from bench.compare import report_streams
from bench.measure import run_load, warm
from bench.plan import Plan, Probe
from bench.report import Outcome, at_most, spread
from bench.targets import HOST, Engine, Gateway, direct


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
        texts = {"gateway": text, "direct": spread(base, "p50", "max")}
        outcome.require(measure, texts, holds, f"max <= {limit}")
    report_streams(outcome, found)
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
