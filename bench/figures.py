"""Figures from records: percentiles, medians over rounds, and both ends' records joined. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

Result = dict[str, Any]
"""What one load gave: the clients' figures, and those that were read off the target meanwhile."""


def percentiles(values: list[float]) -> dict[str, float | None]:
    """p50, p95, p99 and max (nearest rank); all None without values."""
    ordered = sorted(values)
    names = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    if not ordered:
        return dict.fromkeys(names)
    ranks = {name: max(1, math.ceil(len(ordered) * share - 1e-9)) for name, share in names.items()}
    return {name: round(ordered[rank - 1], 4) for name, rank in ranks.items()}


def teardowns(result: dict[str, Any], stats: dict[str, Any]) -> dict[str, Any]:
    """Join the clients' record of leaving with the engine's record of how each request ended."""
    ended = {record["user"]: record for record in stats["ended"]}
    late: list[float] = []
    after: list[int] = []
    unread = 0
    for leaver in result["leavers"]:
        record = ended.get(leaver["user"])
        if record is None or record["outcome"] != "aborted":
            continue
        late.append((record["ended"] - leaver["left"]) * 1e3)
        after.append(sum(instant > leaver["left"] for instant in record["recent"]))
        unread += record["tokens"] - leaver["events"]
    return {
        "left": len(result["leavers"]),
        "torn_down": len(late),
        "teardown_ms": late,
        "tokens_after_close": sum(after),
        "tokens_after_close_max": max(after, default=0),
        "tokens_unread": unread,
        "most_held": stats["most_held"],
        "still_running": stats["running"] + stats["waiting"],
    }


def drained_ms(result: Result, stats: Result) -> list[float]:
    """For each finished stream, the ms from the engine's last write to the client's last event."""
    ended = {record["user"]: record["ended"] for record in stats["ended"] if record["outcome"] == "done"}
    return [
        (stream["last"] - ended[stream["user"]]) * 1e3
        for stream in result["finished"]
        if stream["user"] in ended
    ]


def costs(results: Sequence[Result], per: str) -> list[float]:
    """The target's CPU time (user and system) in us per event or per request, round by round."""
    return [result["target_cpu_seconds"] / max(1, result[per]) * 1e6 for result in results]


def median_of(results: Sequence[Result], key: str) -> dict[str, float | None]:
    """Percentiles of the rounds, each the median over them."""
    out: dict[str, float | None] = {}
    for name in results[0][key]:
        values = [result[key][name] for result in results if result[key][name] is not None]
        out[name] = statistics.median(values) if values else None
    return out


def median_rate(results: Sequence[Result], key: str = "events") -> float:
    """The median over the rounds of so many a second, from a load's start to its end."""
    return float(statistics.median(result[key] / result["seconds"] for result in results))
