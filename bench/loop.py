"""The event loop of the bench's own processes: uvloop where it is installed, else plain asyncio.

Engine and clients share one core, so their own cost is part of every latency; uvloop halves it. The JSON
report states which one was used.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
from collections.abc import Callable, Coroutine
from typing import Any


def loop_factory() -> tuple[str, Callable[[], asyncio.AbstractEventLoop]]:
    """(name, factory) of the fastest loop there is."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return "asyncio", asyncio.new_event_loop
    return "uvloop", uvloop.new_event_loop


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` with the garbage collector out of the way: its pauses would be read as latency."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    with asyncio.Runner(loop_factory=loop_factory()[1]) as runner:
        runner.run(main)
