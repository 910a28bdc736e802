"""What was measured, and the table of it that ends the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

RECLAIM_IS_PROVEN = True
"""Whether the gateway acts on `reclaim`. Until then records have no `reclaimed_by`: only vLLM is asked."""

FIRST_STEP_IS_PROVEN = True
"""Whether the gateway knows that vLLM's gauges say nothing of a request before its first step is over."""

HEAD = (
    "client's close to …",
    "n",
    "engine idle: median",
    "worst",
    "record's reclaim_ms: median",
    "worst",
    "reclaimed_by",
)


@dataclass
class Row:
    """Of one case."""

    idle: list[float] = field(default_factory=list)
    reclaim: list[float] = field(default_factory=list)
    by: Counter[str] = field(default_factory=Counter)

    def cells(self, case: str) -> tuple[str, ...]:
        by = ", ".join(f"{name} {count}" for name, count in sorted(self.by.items()))
        return (case, str(len(self.idle)), *span(self.idle), *span(self.reclaim), by or "-")


def span(values: list[float]) -> tuple[str, str]:
    return (f"{median(values):.0f} ms", f"{max(values):.0f} ms") if values else ("-", "-")


class Table:
    """All cases, in the order in which they came up."""

    def __init__(self) -> None:
        self.engine = ""
        self.rows: dict[str, Row] = {}

    def add(self, case: str, idle_seconds: float, record: Mapping[str, Any]) -> None:
        row = self.rows.setdefault(case, Row())
        row.idle.append(idle_seconds * 1000)
        if (reclaim := record.get("reclaim_ms")) is not None:
            row.reclaim.append(float(reclaim))
        if (by := record.get("reclaimed_by")) is not None:
            row.by[str(by)] += 1

    def lines(self) -> list[str]:
        cells = [HEAD, *(row.cells(case) for case, row in self.rows.items())]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:-1], widths[1:-1]), line[-1]])
            for line in cells
        ]


def proven(record: Mapping[str, Any]) -> None:
    """The record says that the engine's own word gave the slot back."""
    if RECLAIM_IS_PROVEN:
        assert record.get("reclaimed_by") == "engine_idle", record
        assert record.get("reclaim_ms") is not None, record
