"""How much of their prompts engines have in their caches already, by policy: a replayed multi-turn workload.

    python -m bench.prefixes

Simulated, without sockets: conversations of several turns, all with one of a few system prompts, overlap in
time; each engine remembers the blocks that it has seen, the least recently used go first. Reported are the
part of all prompt blocks that were there, and the busiest engine's part of the requests; once more with one
system prompt for all, which is a hot prefix.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report import Outcome, print_table
from gateway.balance import Pick, View, least_loaded
from gateway.prefixes import Prefixes

ENGINES, SLOTS, CACHE_BLOCKS = 4, 16, 6_000
CONVERSATIONS, TURNS, SYSTEM_BLOCKS, TURN_BLOCKS = 3_000, 6, 8, 4
ARRIVALS_PER_SECOND, TAKES_SECONDS, THINKS_SECONDS = 6.0, 0.8, 8.0


@dataclass
class Engine:
    """A simulated engine: what it holds, and what it remembers."""

    name: str
    held: int = 0
    last: int = 0

    def __post_init__(self) -> None:
        self._cache: OrderedDict[bytes, None] = OrderedDict()

    def take(self, blocks: Sequence[bytes]) -> int:
        """Return how many of the blocks were there, from the first on; all are afterwards."""
        known = 0
        for block in blocks:
            if block not in self._cache:
                break
            known += 1
        for block in blocks:
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) > CACHE_BLOCKS:
            self._cache.popitem(last=False)
        return known


def replay(policy: str, systems: int, seed: int = 1) -> tuple[float, float]:
    """Return the part of blocks that were cached, and the busiest engine's part of the requests."""
    dice, prefixes = random.Random(seed), Prefixes()
    engines = [Engine(f"e{number}") for number in range(ENGINES)]
    ahead: list[tuple[float, int, int, int]] = []  # when, conversation, turn, engine that ends (or -1)
    now = 0.0
    for conversation in range(CONVERSATIONS):
        now += dice.expovariate(ARRIVALS_PER_SECOND)
        heapq.heappush(ahead, (now, conversation, 0, -1))
    known = total = order = 0
    served: Counter[str] = Counter()
    while ahead:
        now, conversation, turn, ends = heapq.heappop(ahead)
        if ends >= 0:
            engines[ends].held -= 1
            if turn + 1 < TURNS:
                heapq.heappush(
                    ahead, (now + dice.expovariate(1 / THINKS_SECONDS), conversation, turn + 1, -1)
                )
            continue
        free = [engine for engine in engines if engine.held < SLOTS]
        if not free:
            heapq.heappush(ahead, (now + 0.05, conversation, turn, -1))
            continue
        blocks = _blocks(conversation, turn, systems)
        pick: Pick = prefixes.pick(blocks) if policy == "prefix" else least_loaded
        name = pick([View(engine.name, SLOTS, engine.held, last=engine.last) for engine in free]).name
        number = int(name[1:])
        prefixes.learn(blocks, name)
        order += 1
        engine = engines[number]
        engine.held, engine.last = engine.held + 1, order
        known += engine.take(blocks)
        total += len(blocks)
        served[name] += 1
        heapq.heappush(ahead, (now + dice.expovariate(1 / TAKES_SECONDS), conversation, turn, number))
    return known / total, max(served.values()) / served.total()


def _blocks(conversation: int, turn: int, systems: int) -> list[bytes]:
    system = [b"s%d.%d" % (conversation % systems, number) for number in range(SYSTEM_BLOCKS)]
    return system + [b"c%d.%d" % (conversation, number) for number in range(TURN_BLOCKS * (turn + 1))]


def main() -> None:
    """Replay and report."""
    outcome = Outcome("prefixes", f"{CONVERSATIONS} conversations of {TURNS} turns, {ENGINES} engines")
    for systems, what in ((20, "20 system prompts"), (1, "one hot system prompt")):
        for policy in ("least_loaded", "prefix"):
            hits, busiest = replay(policy, systems)
            outcome.add(f"{what}, {policy}", f"{hits:.1%} cached, busiest engine {busiest:.1%}")
    print_table([outcome])


if __name__ == "__main__":
    main()
