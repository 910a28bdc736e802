"""Reading single values out of a page of metrics (Prometheus' text format 0.0.4)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from math import isfinite

from gateway.profiles.base import Load

STARTED = "process_start_time_seconds"
"""What Prometheus' client libraries call the start of the process (Unix time)."""

_MOST_SAMPLES = 10_000
"""Of one page: hundreds of workers have fewer."""

_MOST = 1e9
"""More sequences than this are none."""


class Samples:
    """Finds the values of ``names`` in pages, summed over their labels: an engine may be several workers."""

    def __init__(self, *names: str) -> None:
        self._sample = re.compile(
            rb"^(%b)(?:\{[^\n]*\})?[ \t]+([^ \t\n]+)" % b"|".join(re.escape(name.encode()) for name in names),
            re.MULTILINE,
        )

    def read(self, page: bytes) -> dict[str, float]:
        """Return the sums of those that are there."""
        sums: dict[str, float] = {}
        for found in islice(self._sample.finditer(page), _MOST_SAMPLES):
            name, text = found.groups()
            try:
                value = float(text)
            except ValueError:
                continue
            if not isfinite(value):
                continue
            sums[name.decode()] = sums.get(name.decode(), 0.0) + value
        return sums


def load_from(
    values: Mapping[str, float], running: str, waiting: str, tokens: str, kv_use: str = ""
) -> Load | None:
    """Make a load of the values with these names; None if it isn't there."""
    if not all(0 <= values.get(name, -1) < _MOST for name in (running, waiting)):
        return None
    return Load(
        int(values[running]),
        int(values[waiting]),
        tokens=values.get(tokens),
        started=values.get(STARTED),
        kv_use=values.get(kv_use),
    )
