"""Which of several engines a request goes to. Pure functions over a snapshot.

``least_loaded`` looks at what each engine has to do. ``session`` and ``prefix`` send what belongs
together to the same engine, where its KV cache lies, as long as that isn't much busier than the
others: rendezvous hashing (Thaler and Ravishankar, 1998) with a bound on the load, after
Mirrokni, Thorup and Zadimoghaddam (2018).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LOAD_BOUND = 1.25
"""How many times the mean load an engine may have and still be given what belongs to it."""


@dataclass(frozen=True, slots=True)
class View:
    """One engine at the instant of choosing.

    ``held`` of its ``slots`` are taken; ``waiting`` is how many requests wait within it and ``kv_use``
    the part of its KV cache in use, as far as it says; ``last`` is the order of its last grant.
    """

    name: str
    slots: int
    held: int
    waiting: int = 0
    kv_use: float = 0.0
    last: int = 0

    @property
    def load(self) -> float:
        """The part of its slots that is taken."""
        return self.held / self.slots


Pick = Callable[[Sequence[View]], View]
"""Chooses one of the engines that can take the request now; there is at least one."""


def least_loaded(views: Sequence[View]) -> View:
    """Choose the one with least to do, of equals the one that was given something longest ago."""
    return min(views, key=lambda view: (view.load, view.waiting, view.kv_use, view.last))


def sticky(key: bytes) -> Pick:
    """Choose the same engine for the same ``key`` each time, as long as its load allows."""

    def pick(views: Sequence[View]) -> View:
        ranked = sorted(views, key=lambda view: _weight(key, view.name), reverse=True)
        return first_with_room(ranked)

    return pick


def first_with_room(ranked: Sequence[View]) -> View:
    """Choose the first whose load, with one request more, is within the bound; else the least loaded."""
    slots = sum(view.slots for view in ranked)
    mean = (sum(view.held for view in ranked) + 1) / slots
    for view in ranked:
        if view.held + 1 <= max(1, math.ceil(LOAD_BOUND * mean * view.slots)):
            return view
    return least_loaded(ranked)


def _weight(key: bytes, name: str) -> bytes:
    return hashlib.blake2b(key + b"\0" + name.encode(), digest_size=8).digest()
