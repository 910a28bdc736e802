"""Pictures of a report.

    python -m bench.charts FILE.json FOLDER

Writes an SVG for each scenario that the report has and that makes one; what is missing is passed over.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

from bench.figures import median_of
from bench.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Picture, across, number, upward

Figures = dict[str, dict[str, Any]]
"""What each scenario of a report measured, by its name."""

TARGETS = ("gateway", "direct", "nginx", "pooled", "naive")
FLOOR_MS = 0.01  # the left end of a logarithmic axis of milliseconds


def cpu_per_token(figures: Figures) -> Picture | None:
    """A bar for each target."""
    spent = figures.get("steady", {}).get("us_per_event")
    if not spent:
        return None
    picture = Picture("CPU time per token, 100 streams at 50 tokens/s")
    medians = {name: statistics.median(spent[name]) for name in TARGETS if name in spent}
    x, places = across(0, max(medians.values()) * 1.1), _rows(len(medians))
    picture.x_axis(x, "CPU time per token, user and system (us)")
    for (name, value), y in zip(medians.items(), places, strict=True):
        picture.box(LEFT, y - 14, x(value) - LEFT, 28, f"{name} fill")
        picture.text(LEFT - 8, y + 5, name, "ink", "end")
        picture.text(min(x(value) + 6, WIDTH - RIGHT), y + 5, f"{value:.0f}", "ink", "start")
    return picture


def teardown(figures: Figures) -> Picture | None:
    """Of the streams that their clients left, how many the engine was rid of after so long.

    The proxies to compare with are in another scenario, with the same load.
    """
    late: dict[str, list[float]] = {}
    for name in TARGETS:
        rounds = figures.get("article-a", {}).get(name, [])
        late[name] = [value for result in rounds for value in result["teardown_ms"]]
    if own := figures.get("leavers-500"):
        late["gateway"] = [value for result in own["rounds"] for value in result["teardown_ms"]]
        late["direct"] = own["direct"]["teardown_ms"]
    late = {name: sorted(values) for name, values in late.items() if values}
    if not late:
        return None
    picture = Picture("From the client's close to the engine's, 500 streams that leave within 2 s")
    most = max(values[-1] for values in late.values())
    x, y = across(FLOOR_MS, max(1.0, most) * 1.5, log=True), upward(0, 100)
    picture.x_axis(x, "time since the client closed (ms, logarithmic)")
    picture.y_axis(y, "streams torn down (%)")
    for place, (name, values) in enumerate(late.items()):
        picture.line([(x(value), y(share)) for value, share in _cumulated(values)], f"{name} line")
        _legend(picture, place, name)
    return picture


def growth(figures: Figures) -> Picture | None:
    """CPU time per event against the number of streams."""
    spent = figures.get("growth", {}).get("us_per_event_by_streams")
    if not spent:
        return None
    points = sorted((int(streams), statistics.median(values)) for streams, values in spent.items())
    picture = Picture("CPU time per token as the streams get more, 5,000 tokens/s in all")
    x = across(10, 10_000, log=True)
    y = upward(0, max(value for _, value in points) * 1.25)
    picture.x_axis(x, "streams open at once (logarithmic)")
    picture.y_axis(y, "CPU time per token (us)")
    picture.line([(x(streams), y(value)) for streams, value in points], "gateway line")
    for streams, value in points:
        picture.dot(x(streams), y(value), "gateway fill")
        picture.text(x(streams), y(value) - 12, f"{value:.0f} us, {streams:,} streams")
    return picture


def first_token(figures: Figures) -> Picture | None:
    """The span from p50 to p99 for each target."""
    steady = figures.get("steady", {})
    spans = {name: median_of(steady[name], "ttft_ms") for name in TARGETS if steady.get(name)}
    if not spans:
        return None
    picture = Picture("Time to the first token, 100 streams at 50 tokens/s")
    low = min(of["p50"] or 1.0 for of in spans.values()) / 2
    high = max(of["p99"] or 1.0 for of in spans.values()) * 3
    x = across(low, high, log=True)
    picture.x_axis(x, "p50 to p99 (ms, logarithmic)")
    for (name, of), y in zip(spans.items(), _rows(len(spans)), strict=True):
        first, last = x(of["p50"] or low), x(of["p99"] or low)
        picture.line([(first, y), (last, y)], f"{name} line")
        picture.dot(first, y, f"{name} fill")
        picture.dot(last, y, f"{name} fill")
        picture.text(LEFT - 8, y + 5, name, "ink", "end")
        picture.text(
            (first + last) / 2, y - 10, f"{number(of['p50'] or 0)} to {number(of['p99'] or 0)}", "ink"
        )
    return picture


def _rows(count: int) -> list[float]:
    """The heights at which so many things stand one below the other."""
    room = (HEIGHT - TOP - BOTTOM) / count
    return [round(TOP + room * (place + 0.55), 1) for place in range(count)]


def _cumulated(ordered: list[float], points: int = 200) -> list[tuple[float, float]]:
    """(value, percent of all that are no larger), thinned out to about so many points."""
    step = max(1, len(ordered) // points)
    at = sorted({*range(0, len(ordered), step), len(ordered) - 1})
    return [(FLOOR_MS, 0.0), *((ordered[rank], 100 * (rank + 1) / len(ordered)) for rank in at)]


def _legend(picture: Picture, place: int, name: str) -> None:
    x, y = LEFT + 16, TOP + 20 + 20 * place  # where a cumulated curve isn't
    picture.line([(x, y), (x + 24, y)], f"{name} line")
    picture.text(x + 30, y + 4, name, "ink", "start")


CHARTS: dict[str, Callable[[Figures], Picture | None]] = {
    "cpu-per-token": cpu_per_token,
    "teardown": teardown,
    "growth": growth,
    "first-token": first_token,
}


def draw(report: dict[str, Any], folder: str) -> list[str]:
    """Write what can be drawn of a report; return the files."""
    figures = {name: scenario["figures"] for name, scenario in report["scenarios"].items()}
    os.makedirs(folder, exist_ok=True)
    written = []
    for name, chart in CHARTS.items():
        picture = chart(figures)
        if picture:
            path = os.path.join(folder, f"bench-{name}.svg")
            with open(path, "w", encoding="utf-8") as file:
                file.write(picture.render())
            written.append(path)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.charts", description="Draw a report's charts.")
    parser.add_argument("report", metavar="FILE.json", help="written by scripts/bench --json")
    parser.add_argument("folder", metavar="FOLDER")
    options = parser.parse_args()
    with open(options.report, encoding="utf-8") as file:
        print(*draw(json.load(file), options.folder), sep="\n", file=sys.stdout)


if __name__ == "__main__":
    main()
