"""A simulated GPU: so many blocks of KV cache, and death for who asks for one more.

Each running sequence holds the blocks of its prompt and of what it has generated, 16 tokens to a block. A
clock that all share makes one token for every running sequence a step; without work it stands still. When a
sequence's client has left, the sequence goes on for a while, and keeps its blocks until it stops: SGLang
sleeps 2 s before it looks for departed clients, others are not much quicker in a bad moment.

Real engines have ways out of a full cache (they queue, they preempt), and die of memory in other ways. This
one has none, so that the first moment with too much work can't be missed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

BLOCK_TOKENS = 16


class OutOfMemory(Exception):
    """The engine is dead; in the words of its last line."""


@dataclass(frozen=True)
class Settings:
    """What the GPU can do."""

    blocks: int = 720
    """KV blocks there are."""
    step_seconds: float = 0.03
    """One token for every running sequence."""
    linger_seconds: float = 1.5
    """How long a sequence goes on after its client has left."""


@dataclass
class Counters:
    """Sums since the start, and the highest there was at the end of a step."""

    steps: int = 0
    generated: int = 0
    prompts: int = 0
    started: int = 0
    finished: int = 0
    stopped: int = 0
    peak_running: int = 0
    peak_blocks: int = 0


def blocks_of(tokens: int) -> int:
    """How many blocks so many tokens take."""
    return -(-tokens // BLOCK_TOKENS)


class Sequence:
    """One prompt, and the tokens made for it so far."""

    def __init__(self, prompt: int, most: int) -> None:
        self.prompt = prompt
        self.most = most
        self.made = 0
        self.blocks = 0
        self.over = False
        """It is not in the GPU any more: finished, or stopped after its client had left."""
        self.left_at: float | None = None
        self._lot = trio.lowlevel.ParkingLot()

    def leave(self) -> None:
        """Its client is gone."""
        if self.left_at is None and not self.over:
            self.left_at = trio.current_time()

    async def more_than(self, tokens: int) -> int:
        """Wait until there are more tokens than so many, or no more to come; how many there are."""
        while self.made <= tokens and not self.over:
            await self._lot.park()
        return self.made

    def changed(self) -> None:
        """Wake who waits for it."""
        self._lot.unpark_all()


class Gpu:
    """The sequences, their blocks, and the clock."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.counters = Counters()
        self.used = 0
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        """Arrived since the last step. The next one takes them all: nothing is refused or kept waiting."""
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def left_behind(self) -> list[Sequence]:
        """The running ones nobody waits for any more."""
        return [sequence for sequence in self.running if sequence.left_at is not None]

    def start(self, prompt: int, most: int) -> Sequence:
        """Take another sequence, whatever there is to do already."""
        sequence = Sequence(prompt, most)
        self.counters.started += 1
        self.waiting.append(sequence)
        self._changed.unpark_all()
        return sequence

    async def run(self) -> None:
        """Step for as long as it lives. Raises OutOfMemory."""
        due = trio.current_time()
        while True:
            await self.until(lambda: bool(self.running or self.waiting))
            # A late step isn't made up for: a GPU has no two at once.
            due = max(due, trio.current_time()) + self.settings.step_seconds
            await trio.sleep_until(due)
            self.step()
            self._changed.unpark_all()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something is true; looks after each step, and when a sequence comes."""
        while not true():
            await self._changed.park()

    async def until_idle(self) -> None:
        """Wait until it has nothing to do."""
        await self.until(lambda: not (self.running or self.waiting))

    async def until_stopped(self, count: int) -> None:
        """Wait until so many sequences have been stopped after their clients had left."""
        await self.until(lambda: self.counters.stopped >= count)

    def step(self) -> None:
        """Make one token for everybody. Raises OutOfMemory."""
        self.counters.steps += 1
        self._stop_leavers()
        self.counters.prompts += sum(sequence.prompt for sequence in self.waiting)
        self.running += self.waiting
        self.waiting = []
        for sequence in self.running:
            sequence.made += 1
            self.counters.generated += 1
            self._take_blocks(sequence)
        self.counters.peak_running = max(self.counters.peak_running, len(self.running))
        self.counters.peak_blocks = max(self.counters.peak_blocks, self.used)
        # Blocks are free before a client can know that its answer is whole.
        for sequence in [one for one in self.running if one.made >= one.most]:
            self.counters.finished += 1
            self._remove(sequence)
        for sequence in self.running:
            sequence.changed()

    def _stop_leavers(self) -> None:
        now, linger = trio.current_time(), self.settings.linger_seconds
        leavers = [s for s in self.running + self.waiting if s.left_at is not None]
        for sequence in leavers:
            if sequence.left_at is not None and now - sequence.left_at >= linger:
                self.counters.stopped += 1
                self._remove(sequence)

    def _take_blocks(self, sequence: Sequence) -> None:
        wanted = blocks_of(sequence.prompt + sequence.made) - sequence.blocks
        free = self.settings.blocks - self.used
        if wanted > free:
            raise OutOfMemory(
                f"CUDA out of memory. Tried to allocate {wanted} KV blocks, {free} of {self.settings.blocks} "
                f"are free: {len(self.running)} sequences, {len(self.left_behind)} left by their clients."
            )
        sequence.blocks += wanted
        self.used += wanted

    def _remove(self, sequence: Sequence) -> None:
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.used -= sequence.blocks
        sequence.blocks = 0
        sequence.over = True
        sequence.changed()
