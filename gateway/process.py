"""What is set for the process as a whole."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

LARGE_BYTES = 1 << 20
"""Blocks of this size go back to the system when they are let go of."""

COLLECTOR_THRESHOLDS = (2_000, 5, 500)
"""New containers before a search of the youngest generation, and searches of one before one of the
next. Found by measurement: docs/performance.md."""

_M_MMAP_THRESHOLD = -3


def keep_no_large_blocks() -> None:
    """Have glibc map large blocks one by one, as it does until one of them has been freed.

    From then on it would take them from its heap, where what is left between them stays with the
    process: bodies of 20 MB cost a quarter more. (mallopt(3); other C libraries are left alone.)
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def end() -> None:
    """Skip the last search for garbage: it would only delay the end."""
    gc.freeze()


def leave_collector_little() -> None:
    """Take what there is now out of the garbage collector's sight, and have it look less often.

    Requests leave it nothing: their cycles are broken when they end, so that reference counts
    free them. Its pauses, though, are everybody's, and a full search looks through all streams.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
