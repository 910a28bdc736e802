"""What a scenario hands back, the table on the terminal and the JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from dataclasses import dataclass, field
from typing import Any, TextIO

from bench.loop import loop_factory
from bench.processes import CPUS

PACKAGES = (
    *("trio", "hypercorn", "quart", "quart-trio", "httpx", "httptools", "h11", "h2", "msgspec", "structlog"),
    *("prometheus-client", "uvloop", "xllamacpp"),
)


@dataclass(frozen=True)
class Row:
    """One line of the table. `holds` is None where nothing is required, only reported."""

    measure: str
    value: str
    baseline: str = ""
    required: str = ""
    holds: bool | None = None


@dataclass
class Outcome:
    """A scenario's rows for people and its figures for programs."""

    name: str
    what: str
    rows: list[Row] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    failed: str = ""

    def add(self, measure: str, value: str, *, baseline: str = "") -> None:
        self.rows.append(Row(measure, value, baseline))

    def require(self, measure: str, value: str, holds: bool, required: str, *, baseline: str = "") -> None:
        self.rows.append(Row(measure, value, baseline, required, holds))

    def holds(self) -> bool:
        return not self.failed and all(row.holds is not False for row in self.rows)


def ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def spread(figures: dict[str, float | None], *names: str) -> str:
    """`0.41 / 2.20 / 3.91` for the named percentiles, in ms."""
    return " / ".join(ms(figures[name]) for name in names)


def at_most(value: float | None, limit: float) -> bool:
    return value is not None and value <= limit


def print_table(outcomes: list[Outcome], file: TextIO = sys.stdout) -> None:
    head = ("scenario", "measure", "gateway", "direct", "must hold", "")
    marks = {None: "", True: "ok", False: "MISSED"}
    lines: list[tuple[str, ...]] = []
    for outcome in outcomes:
        name = outcome.name
        if outcome.failed:
            lines.append((name, "failed (see below)", "", "", "", "FAILED"))
            name = ""
        for row in outcome.rows:
            lines.append((name, row.measure, row.value, row.baseline, row.required, marks[row.holds]))
            name = ""
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]
    for number, line in enumerate([head, tuple("-" * width for width in widths), *lines]):
        if number > 2 and line[0]:
            print(file=file)
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), file=file
        )


def machine() -> dict[str, Any]:
    """Where the figures were made."""
    model = platform.processor() or "unknown"
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    packages: dict[str, str] = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "usable_cores": len(CPUS),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": packages,
        "bench_loop": loop_factory()[0],
        "load_average": os.getloadavg()[0],
    }


def write_json(path: str, outcomes: list[Outcome], about: dict[str, Any]) -> None:
    report = {
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": about,
        "scenarios": {
            outcome.name: {
                "what": outcome.what,
                "holds": outcome.holds(),
                "failed": outcome.failed,
                "rows": [row.__dict__ for row in outcome.rows],
                "figures": outcome.figures,
            }
            for outcome in outcomes
        },
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
        file.write("\n")
