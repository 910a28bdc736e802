"""A few seconds of hostile bytes from both sides; `scripts/soak --fuzz-seconds N` plays them for longer.

GATEWAY_TEST_SEED chooses others. A failure prints the bytes and the command that plays them again.
"""

from __future__ import annotations

import os

from tests.conftest import Tls
from tests.fuzz.harness import fuzz

SEED = int(os.environ.get("GATEWAY_TEST_SEED", "1"))
SECONDS = 3.5
"""At most, each; on a quiet machine the batches take half of it."""


async def test_hostile_bytes_harm_nobody_else() -> None:
    summary = await fuzz(SEED, tls=None, seconds=SECONDS, batches=8)
    assert summary.events > 100, summary


async def test_hostile_bytes_over_tls_harm_nobody_else(tls: Tls) -> None:
    summary = await fuzz(SEED, tls=tls, seconds=SECONDS, batches=5)
    assert summary.events > 50, summary
