"""Where the beginnings of prompts lie: which engines have seen which blocks of them.

Engines keep the KV cache of what they have seen. A conversation's next request begins with all of
the one before, so it is cheapest where that was answered. The text is cut into blocks, each
named by a hash of all up to its end; a table remembers which engines have answered a prompt with
that beginning (after success, so that an engine that fails attracts nothing). What nobody knows goes by
rendezvous hashing on its first blocks, the same way from every gateway and after a restart.
Pure. Bounded: ``most`` blocks, the least recently used go first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from gateway.balance import Pick, View, first_with_room, sticky

BLOCK_BYTES = 512
"""Of the request's text as it stands in the body. vLLM's blocks of 16 tokens are about 64 bytes."""

_MOST_BLOCKS = 256
"""Of one prompt: 128 KiB of text."""

_FIRST_BLOCKS = 2
"""What decides where an unknown prompt goes."""

_MOST_ENGINES = 4
"""Remembered of one block: those that have answered it last."""

_TEXTS = ("tools", "system", "instructions", "messages", "prompt", "input")
"""Fields in the order in which chat templates have them."""


class Prefixes:
    """Which engines know which beginnings."""

    def __init__(self, most: int = 200_000) -> None:
        self._most = most
        self._engines: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def pick(self, blocks: Sequence[bytes]) -> Pick:
        """Choose the engine that knows most of ``blocks``, as long as its load allows."""
        if not blocks:
            return first_with_room
        unknown = sticky(blocks[:_FIRST_BLOCKS][-1])

        def pick(views: Sequence[View]) -> View:
            known = self._known(blocks, {view.name for view in views})
            if not known:
                return unknown(views)
            ranked = sorted(views, key=lambda view: (-known.get(view.name, 0), view.load, view.last))
            return first_with_room(ranked)

        return pick

    def learn(self, blocks: Iterable[bytes], engine: str) -> None:
        """``engine`` has answered a prompt of ``blocks``."""
        table = self._engines
        for block in blocks:
            before = tuple(name for name in table.get(block, ()) if name != engine)
            table[block] = (engine, *before[: _MOST_ENGINES - 1])
            table.move_to_end(block)
        while len(table) > self._most:
            table.popitem(last=False)

    def forget(self, engine: str) -> None:
        """An engine has lost its cache, or is gone."""
        for block, names in list(self._engines.items()):
            if engine in names:
                left = tuple(name for name in names if name != engine)
                if left:
                    self._engines[block] = left
                else:
                    del self._engines[block]

    def _known(self, blocks: Sequence[bytes], names: set[str]) -> dict[str, int]:
        """Return how many of the blocks each engine knows, from the first on."""
        known: dict[str, int] = {}
        for number, block in enumerate(blocks, 1):
            engines = self._engines.get(block)
            if engines is None:
                break
            for name in engines:
                if name in names:
                    known[name] = number
        return known


def blocks_of(fields: Sequence[tuple[str, msgspec.Raw]]) -> list[bytes]:
    """Cut the text of a request into blocks and name them; what is left over at the end doesn't count."""
    raw = dict(fields)
    text = b"\0".join(
        bytes(memoryview(raw[name])[: BLOCK_BYTES * _MOST_BLOCKS]) for name in _TEXTS if name in raw
    )
    blocks, so_far = [], hashlib.blake2b(digest_size=8)
    for end in range(BLOCK_BYTES, min(len(text), BLOCK_BYTES * _MOST_BLOCKS) + 1, BLOCK_BYTES):
        so_far.update(text[end - BLOCK_BYTES : end])
        blocks.append(so_far.digest())
    return blocks
