"""What the demonstration shows: one line that changes, or many where no cursor can move; and a table."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass

from overload.storm import Tally

PLAIN_SECONDS = 0.5
"""Between two lines, where each is a new one."""
MOST_BAR = 40
_SAMPLE = re.compile(r"^([a-z_:]+)\{[^}]*\} (\S+)$", re.MULTILINE)
_LAST_WORDS = re.compile(r"(\d+) sequences, (\d+) left")


@dataclass
class Reading:
    """What the engine said last about itself."""

    running: int = 0
    left_behind: int = 0
    usage: float = 0.0
    left_usage: float = 0.0
    peak_running: int = 0
    peak_usage: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Reading:
        """From the engine's /metrics."""
        samples = {name: float(value) for name, value in _SAMPLE.findall(text)}
        return cls(
            running=int(samples["vllm:num_requests_running"]),
            left_behind=int(samples["overload:left_behind_sequences"]),
            usage=samples["vllm:kv_cache_usage_perc"],
            left_usage=samples["overload:left_behind_usage"],
            peak_running=int(samples["overload:peak_sequences"]),
            peak_usage=samples["overload:peak_usage"],
        )

    def died(self, last_words: str) -> None:
        """Take from its last line what it can't be asked any more."""
        self.usage = self.peak_usage = 1.0
        if found := _LAST_WORDS.search(last_words):
            self.running, self.left_behind = map(int, found.groups())
            self.peak_running = max(self.peak_running, self.running)


@dataclass
class Result:
    """How one of the two went."""

    title: str
    seconds: float
    reading: Reading
    tally: Tally
    died: bool


class Display:
    """The lines of one part."""

    def __init__(self, *, plain: bool) -> None:
        self._plain = plain
        self._shown_at = float("-inf")
        encoding = (sys.stdout.encoding or "").lower().replace("-", "")
        self._used, self._left, self._free = "█▒·" if encoding == "utf8" else "#~."

    def say(self, line: str = "") -> None:
        """A line of its own."""
        print(line, flush=True)

    def legend(self) -> str:
        """What the bar's characters mean."""
        return (
            f"KV cache: {self._used} of answers somebody waits for, "
            f"{self._left} of answers whose client has left, {self._free} free"
        )

    def show(self, seconds: float, reading: Reading, tally: Tally, *, last: bool = False) -> None:
        """How it stands."""
        before, behind = (
            f"{seconds:5.1f} s  ",
            f" {reading.usage:4.0%}  running {reading.running:3} ({reading.left_behind:3} left)  "
            f"whole {tally.whole:3}  aborted {tally.aborted:4}",
        )
        if self._plain:
            if last or seconds - self._shown_at >= PLAIN_SECONDS:
                self._shown_at = seconds
                print(before + self._bar(reading, MOST_BAR) + behind, flush=True)
        else:
            width = shutil.get_terminal_size().columns - 1
            room = min(MOST_BAR, max(0, width - len(before + behind)))
            line = (before + self._bar(reading, room) + behind)[:width]
            print(f"\r{line}\x1b[K", end="\n" if last else "", flush=True)

    def _bar(self, reading: Reading, room: int) -> str:
        left = round(reading.left_usage * room)
        used = max(0, round(reading.usage * room) - left)
        return self._used * used + self._left * left + self._free * (room - used - left)


def table(results: list[Result]) -> str:
    """Both results, side by side."""
    rows: list[tuple[str, list[str]]] = [
        ("", [one.title for one in results]),
        ("engine", [f"{'died after' if one.died else 'survived'} {one.seconds:.1f} s" for one in results]),
        ("answers whole", [str(one.tally.whole) for one in results]),
        ("answers cut short", [str(one.tally.cut) for one in results]),
        ("requests refused", [str(one.tally.refused) for one in results]),
        ("aborted by clients", [str(one.tally.aborted) for one in results]),
        ("highest KV use", [f"{one.reading.peak_usage:.0%}" for one in results]),
        ("most at once in the engine", [str(one.reading.peak_running) for one in results]),
    ]
    return "\n".join(f"  {name:28}" + "".join(f"{cell:>24}" for cell in cells) for name, cells in rows)
