"""What is set for the process: that large blocks go back to the system."""

from __future__ import annotations

import sys

import pytest
import trio

SCRIPT = """
import os, sys
from gateway.process import keep_no_large_blocks

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if sys.argv[1] == "set":
    keep_no_large_blocks()
size = 16 << 20
del [bytearray(size) for _ in range(2)][:]  # from now on glibc takes such blocks from its heap
before = resident()
blocks, between = [], []
for _ in range(8):
    blocks.append(bytearray(b"x") * size)
    between.append(bytes(100_000))
del blocks
print(resident() - before)
"""


async def kept(how: str) -> int:
    return int((await trio.run_process([sys.executable, "-c", SCRIPT, how], capture_stdout=True)).stdout)


async def test_large_blocks_go_back_to_the_system() -> None:
    if await kept("not set") < 64 << 20:
        pytest.skip("this C library gives large blocks back by itself")
    assert await kept("set") < 8 << 20


async def test_the_collector_is_told_to_leave_what_there_is_and_to_look_seldom() -> None:
    script = """
import gc
from gateway.process import COLLECTOR_THRESHOLDS, leave_collector_little
leave_collector_little()
assert gc.get_freeze_count() > 1000
assert gc.get_threshold() == COLLECTOR_THRESHOLDS
"""
    await trio.run_process([sys.executable, "-c", script])
