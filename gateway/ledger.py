"""The books of one engine's capacity.

A slot is one sequence's worth of the engine. :class:`trio.CapacityLimiter` holds the
capacity; each token of it is borrowed by a seat of a :class:`Slot`, so who holds
what is never a number that somebody has to remember to change back. The books are
kept twice on purpose: the sets of slots by state, and the counts of tokens that
were ever acquired and released. :meth:`Ledger.statement` compares them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import trio


@dataclass(frozen=True, slots=True)
class Statement:
    """One engine's account at one instant. All but ``balanced`` are numbers of slots."""

    slots: int
    running: int
    reclaiming: int
    ghosts: int
    free: int
    acquired: int
    released: int
    balanced: bool


@dataclass(eq=False, slots=True)
class Slot:
    """Capacity held by one request: as many seats as it makes sequences.

    ``tokens`` is how much of the engine's KV cache is reserved for it, ``sequences`` how many the
    engine may count for it at most. ``written`` is when the request was written to the engine,
    which may be working on it since. ``counted``: the engine's gauges have it for certain.
    ``held_back``: nothing more of the answer is read for now, so that the engine may be done with it
    unknown to us.
    """

    ledger: Ledger
    seats: tuple[object, ...] = field(repr=False)
    tokens: int = 0
    sequences: int = 0
    written: float = inf
    counted: bool = False
    held_back: bool = False

    @property
    def cost(self) -> int:
        """Number of seats."""
        return len(self.seats)


class Largest:
    """What the largest of the last thousand or two of requests took: slots, and tokens."""

    _AT_A_TIME = 1000

    def __init__(self) -> None:
        self._now = self._before = (0, 0)
        self._noted = 0

    def note(self, slots: int, tokens: int) -> None:
        """Note one more."""
        if self._noted == self._AT_A_TIME:
            self._noted, self._before, self._now = 0, self._now, (0, 0)
        self._noted += 1
        most, room = self._now
        if slots > most or tokens > room:
            self._now = max(slots, most), max(tokens, room)

    @property
    def slots(self) -> int:
        """Slots of the largest one; 0 if there was none."""
        return max(self._now[0], self._before[0])

    @property
    def tokens(self) -> int:
        """Tokens of the largest one."""
        return max(self._now[1], self._before[1])


class Ledger:
    """Grants and takes back the slots of one engine, synchronously."""

    def __init__(self, slots: int, kv_tokens: int = 0) -> None:
        self._limiter = trio.CapacityLimiter(slots)
        self.kv_tokens = kv_tokens
        """Tokens that the engine's KV cache holds; 0: they aren't counted."""
        self.reserved = 0
        """Tokens reserved in it."""
        self._running: set[Slot] = set()
        self._reclaiming: set[Slot] = set()
        self._ghosts: set[Slot] = set()
        self._acquired = 0
        self._released = 0
        self._freed = trio.lowlevel.ParkingLot()
        self.largest = Largest()

    def __repr__(self) -> str:
        now = self.statement()
        return f"<Ledger {now.running} running, {now.free} free of {now.slots}>"

    @property
    def slots(self) -> int:
        """The engine's capacity in sequences."""
        return int(self._limiter.total_tokens)

    @property
    def free(self) -> int:
        """Slots that can be granted now."""
        return int(self._limiter.available_tokens)

    @property
    def held(self) -> int:
        """Slots that are taken: running, being reclaimed, and ghosts'."""
        return self.slots - self.free

    @property
    def running(self) -> int:
        """Slots of requests that are being answered."""
        return _seats(self._running)

    @property
    def granted(self) -> int:
        """Slots ever granted."""
        return self._acquired

    def certain(self, written_before: float) -> int:
        """Return how many sequences the engine's gauges have for certain of those that are being answered.

        Those that are known to be counted, and those written before an instant.
        """
        return sum(
            slot.cost
            for slot in self._running
            if not slot.held_back and (slot.counted or slot.written < written_before)
        )

    @property
    def at_most(self) -> int:
        """Sequences that the engine may count of those that are being answered, or about to be."""
        return sum(max(slot.cost, slot.sequences) for slot in self._running)

    def all_counted(self, written_before: float) -> None:
        """Note that the engine has counted everything that was written before an instant."""
        for slot in self._running:
            slot.counted |= slot.written < written_before

    @property
    def reclaiming(self) -> int:
        """Slots of requests that are over, while the engine may not have stopped."""
        return _seats(self._reclaiming)

    @property
    def ghosts(self) -> int:
        """Slots of work that goes on past its time."""
        return _seats(self._ghosts)

    def runs(self, slot: Slot) -> bool:
        """Whether the slot is still its request's."""
        return slot in self._running

    def fits(self, cost: int, tokens: int = 0) -> bool:
        """Whether ``cost`` slots and room for ``tokens`` are free."""
        return cost <= self.free and (not self.kv_tokens or self.reserved + tokens <= self.kv_tokens)

    def grant(self, cost: int, tokens: int = 0) -> Slot:
        """Take ``cost`` slots at once, and reserve ``tokens``.

        Raises trio.WouldBlock, with nothing taken, when there aren't as many free.
        """
        if not self.fits(cost, tokens):
            raise trio.WouldBlock
        slot = Slot(self, tuple(object() for _ in range(cost)), tokens=tokens)
        self.reserved += tokens
        for seat in slot.seats:
            self._limiter.acquire_on_behalf_of_nowait(seat)
        self._running.add(slot)
        self._acquired += cost
        self.largest.note(cost, tokens)
        return slot

    def reserve(self, slot: Slot, tokens: int) -> None:
        """Reserve ``tokens`` for a slot that is held, in place of what was.

        That may be more than there is: then nothing fits until others have gone.
        """
        self.reserved += tokens - slot.tokens
        slot.tokens = tokens

    def resize(self, slots: int, kv_tokens: int) -> None:
        """Have another capacity from now on. If more is held, nothing is granted until below."""
        self._limiter.total_tokens = slots
        self.kv_tokens = kv_tokens

    def hand_over(self, slot: Slot) -> None:
        """Take a slot from its request for the reclaimer; it stays borrowed. Raises KeyError."""
        self._running.remove(slot)
        self._reclaiming.add(slot)

    def haunt(self, slot: Slot) -> None:
        """Have a slot that is being reclaimed count as a ghost's. Raises KeyError."""
        self._reclaiming.remove(slot)
        self._ghosts.add(slot)

    def give_back(self, slot: Slot) -> None:
        """Return a slot, whatever it is. Raises KeyError if it isn't held: nothing is returned twice."""
        for held in (self._running, self._reclaiming, self._ghosts):
            if slot in held:
                held.remove(slot)
                break
        else:
            raise KeyError(slot)
        for seat in slot.seats:
            self._limiter.release_on_behalf_of(seat)
        self.reserved -= slot.tokens
        self._released += slot.cost
        if self._freed and not self.held_by_anybody:
            self._freed.unpark_all()

    async def all_free(self) -> None:
        """Wait until nobody holds anything."""
        while self.held_by_anybody:
            await self._freed.park()

    @property
    def held_by_anybody(self) -> bool:
        """Whether any slot is held."""
        return bool(self._running or self._reclaiming or self._ghosts)

    def statement(self) -> Statement:
        """Return the account, and whether both ways of keeping it agree."""
        running, reclaiming, ghosts = self.running, self.reclaiming, self.ghosts
        held = running + reclaiming + ghosts
        return Statement(
            slots=self.slots,
            running=running,
            reclaiming=reclaiming,
            ghosts=ghosts,
            free=max(0, self.free),
            acquired=self._acquired,
            released=self._released,
            balanced=held + self.free == self.slots and self._acquired - self._released == held,
        )


def _seats(slots: set[Slot]) -> int:
    return sum(slot.cost for slot in slots)
