"""Small SVG pictures: a canvas with a title, two axes and text that stays text.

Colours follow the reader's light or dark setting, and the background is the picture's own, so that it can be
read on any page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 90, 30, 60, 60
COLOURS = {  # by class: on a light page, on a dark one
    "page": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#9198a1"),
    "grid": ("#d1d9e0", "#30363d"),
    "gateway": ("#0969da", "#4493f8"),
    "direct": ("#59636e", "#9198a1"),
    "naive": ("#cf222e", "#f85149"),
    "pooled": ("#9a6700", "#d29922"),
    "nginx": ("#1a7f37", "#3fb950"),
}


def _style() -> str:
    def rules(dark: bool) -> str:
        return "".join(
            f"rect.{name}, text.{name}, .{name}.fill {{ fill: {pair[dark]} }}\n"
            f"polyline.{name} {{ stroke: {pair[dark]}; fill: none }}\n"
            for name, pair in COLOURS.items()
        )

    return (
        "text { font: 13px system-ui, sans-serif } .head { font-weight: 600; font-size: 15px }\n"
        f".line {{ stroke-width: 2 }}\n{rules(False)}"
        f"@media (prefers-color-scheme: dark) {{\n{rules(True)}}}\n"
    )


@dataclass(frozen=True)
class Scale:
    """From a value to a place in pixels; both ends given, logarithmic or not."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Round numbers to write at the axis."""
        if self.log:
            decades = range(
                math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1
            )
            return [10.0**decade for decade in decades]
        step = nice_step(self.high - self.low)
        return [self.low + step * count for count in range(int((self.high - self.low) / step + 1e-9) + 1)]


def nice_step(span: float) -> float:
    """1, 2 or 5 times a power of ten, so that at most eight steps make up the span."""
    power = 10.0 ** math.floor(math.log10(span))
    return next(power * part for part in (0.2, 0.5, 1.0, 2.0) if span / (power * part) <= 8)


def number(value: float) -> str:
    """Three digits that say something, and commas in large ones."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def across(low: float, high: float, *, log: bool = False) -> Scale:
    """A scale over the picture's width."""
    return Scale(low, high, LEFT, WIDTH - RIGHT, log)


def upward(low: float, high: float) -> Scale:
    """A scale over the picture's height, from the bottom up."""
    return Scale(low, high, HEIGHT - BOTTOM, TOP)


@dataclass
class Picture:
    """What has been drawn so far."""

    title: str
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, style: str = "ink", anchor: str = "middle") -> None:
        self.parts.append(
            f'<text x="{x}" y="{y}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], style: str) -> None:
        joined = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'<polyline points="{joined}" class="{style}"/>')

    def box(self, x: float, y: float, width: float, height: float, style: str) -> None:
        size = f'width="{max(0.0, round(width, 1))}" height="{max(0.0, round(height, 1))}"'
        self.parts.append(f'<rect x="{x}" y="{y}" {size} class="{style}"/>')

    def dot(self, x: float, y: float, style: str) -> None:
        self.parts.append(f'<circle cx="{x}" cy="{y}" r="5" class="{style}"/>')

    def x_axis(self, scale: Scale, label: str) -> None:
        bottom = HEIGHT - BOTTOM
        for tick in scale.ticks():
            x = scale(tick)
            self.line([(x, TOP), (x, bottom)], "grid")
            self.text(x, bottom + 20, number(tick), "soft")
        self.line([(LEFT, bottom), (WIDTH - RIGHT, bottom)], "soft")
        self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, label)

    def y_axis(self, scale: Scale, label: str) -> None:
        for tick in scale.ticks():
            y = scale(tick)
            self.line([(LEFT, y), (WIDTH - RIGHT, y)], "grid")
            self.text(LEFT - 8, y + 4, number(tick), "soft", "end")
        self.line([(LEFT, TOP), (LEFT, HEIGHT - BOTTOM)], "soft")
        self.text(LEFT - 8, TOP - 14, label, "ink", "start")

    def render(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
            f' height="{HEIGHT}" role="img" aria-label={quoteattr(self.title)}>\n'
            f"<style>\n{_style()}</style>\n"
            f'<rect width="{WIDTH}" height="{HEIGHT}" class="page"/>\n'
            f'<text x="{WIDTH / 2}" y="24" class="ink head" text-anchor="middle">{escape(self.title)}</text>'
            + "\n".join(["", *self.parts, "</svg>", ""])
        )
