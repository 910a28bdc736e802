"""What a scenario hands back, the table on the terminal and the JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from bench.loop import loop_factory
from bench.processes import CPUS

PACKAGES = (
    *("trio", "hypercorn", "quart", "quart-trio", "httpx", "httptools", "h11", "h2", "msgspec", "structlog"),
    *("prometheus-client", "uvloop", "xllamacpp", "fastapi", "uvicorn"),
)
BASELINES = ("naive", "pooled", "nginx")  # in the order of their columns


@dataclass(frozen=True)
class Row:
    """One line of the table: a measure, and its value for each target that has one.

    `holds` is None where nothing is required, only reported; what is required is required of the gateway.
    """

    measure: str
    values: Mapping[str, str]
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
    notes: list[str] = field(default_factory=list)  # what was left out, and why

    def add(self, measure: str, values: str | Mapping[str, str]) -> None:
        """A line that reports; a bare string is the gateway's value."""
        self.rows.append(Row(measure, _by_target(values)))

    def require(self, measure: str, values: str | Mapping[str, str], holds: bool, required: str) -> None:
        """A line that must hold."""
        self.rows.append(Row(measure, _by_target(values), required, holds))

    def holds(self) -> bool:
        return not self.failed and all(row.holds is not False for row in self.rows)


def _by_target(values: str | Mapping[str, str]) -> Mapping[str, str]:
    return {"gateway": values} if isinstance(values, str) else values


def ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def spread(figures: dict[str, float | None], *names: str) -> str:
    """`0.41 / 2.20 / 3.91` for the named percentiles, in ms."""
    return " / ".join(ms(figures[name]) for name in names)


def at_most(value: float | None, limit: float) -> bool:
    return value is not None and value <= limit


def columns(outcomes: list[Outcome]) -> list[str]:
    """The targets that have a value in any row: the gateway first, then "direct", then the baselines."""
    named = {target for outcome in outcomes for row in outcome.rows for target in row.values}
    return ["gateway", "direct", *(name for name in BASELINES if name in named)]


def print_table(outcomes: list[Outcome], file: TextIO = sys.stdout) -> None:
    targets = columns(outcomes)
    head = ("scenario", "measure", *targets, "must hold", "")
    marks = {None: "", True: "ok", False: "MISSED"}
    lines: list[tuple[str, ...]] = []
    for outcome in outcomes:
        name = outcome.name
        if outcome.failed:
            lines.append((name, "failed (see below)", *("" for _ in targets), "", "FAILED"))
            name = ""
        for row in outcome.rows:
            cells = [row.values.get(target, "") for target in targets]
            lines.append((name, row.measure, *cells, row.required, marks[row.holds]))
            name = ""
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]
    for number, line in enumerate([head, tuple("-" * width for width in widths), *lines]):
        if number > 2 and line[0]:
            print(file=file)
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print(text.rstrip(), file=file)
    for note in dict.fromkeys(note for outcome in outcomes for note in outcome.notes):
        print(f"\nleft out: {note}", file=file)


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


def as_report(outcomes: list[Outcome], about: dict[str, Any]) -> dict[str, Any]:
    """Everything there is, as JSON has it."""
    report = {
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": about,
        "scenarios": {
            outcome.name: {
                "what": outcome.what,
                "holds": outcome.holds(),
                "failed": outcome.failed,
                "left_out": outcome.notes,
                "rows": [asdict(row) for row in outcome.rows],
                "figures": outcome.figures,
            }
            for outcome in outcomes
        },
    }
    as_json: dict[str, Any] = json.loads(json.dumps(report))  # keys that are numbers become text
    return as_json


def write_json(path: str, report: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
        file.write("\n")
