"""Rows that several scenarios have: the gateway's books, its memory, and who else used the machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.figures import Result
from bench.report import Outcome

MIB = 1 << 20
SETTLE_ROUNDS = 3  # rounds until allocators, caches and connection pools have their size
FLAT_BYTES = 2 * MIB  # growth after them that still counts as flat
DISTURBED = 0.15  # of a core: above it the table says so


def report_books(outcome: Outcome, done: Sequence[Result]) -> None:
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


def report_memory(outcome: Outcome, done: Sequence[Result]) -> None:
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


def report_others(outcome: Outcome, got: Sequence[Result]) -> None:
    keys = ("others_on_gateway_core", "others_on_rest_core")
    most = [max(result[key] for result in got) for key in keys]
    text = " / ".join(f"{value:.2f}" for value in most) + (" (DISTURBED)" if max(most) > DISTURBED else "")
    outcome.add("others' load on the gateway's / the other core, most", text)
    paces = [pace for result in got for pace in result["pace_ns"]]
    text = f"{statistics.median(paces):.0f} ({min(paces):.0f}-{max(paces):.0f})"
    outcome.add("a step of a plain Python loop on the gateway's core, ns", text)
