"""What stands between an engine and its reader: bytes, bounded.

The reader of the engine puts, the writer to the client gets; each is one task. The
writer takes everything there is in one go (up to 64 KiB), so a slow moment turns into a larger
write and not into a backlog. When the spool is full the reader waits, stops
reading, and the engine feels it.

Of a client that lets it wait for long the pieces become small and alike: what one leaves in the heap
fits the next. Large ones of any size leave holes that their successors don't fit, a third more memory.

How the response ended is the spool's last item: it comes out after every byte
that was put before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

import trio

from gateway.errors import GatewayError

PIECE_BYTES = 64 * 1024
"""What a piece has at most, as it is read and as several are joined for one write."""

SMALL_PIECE_BYTES = 16 * 1024
"""The same for a slow client."""

SLOW_SECONDS = 0.1
"""A client is slow when the reader has waited so long for room. One that takes all there is, though
engine and gateway are faster, makes room within milliseconds; large pieces halve what its bytes cost."""


class Spool:
    """A byte-bounded queue with one putter and one getter.

    Holds at most ``limit`` bytes and one piece more: a piece is taken whole once there
    is any room.
    """

    __slots__ = (
        "_full_since",
        "_getter",
        "_pieces",
        "_putter",
        "_taken",
        "_waiting",
        "counted",
        "ended",
        "failure",
        "held",
        "limit",
        "note_all",
        "outlet",
        "piece_bytes",
        "rest",
        "sent",
    )

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        """Bytes in the spool now, those included that the writer has taken last and is still writing:
        it may be stuck in that write."""
        self.sent = 0
        """Bytes that have gone on to the client's connection."""
        self.ended = False
        self.failure: GatewayError | None = None
        """Why the response ended badly; None while it runs and when it ended well."""
        self.piece_bytes = PIECE_BYTES
        """How large a piece may be: what the next read may bring at most."""
        self.outlet: Callable[[bytes], bytes | None] | None = None
        """Sends a piece on at once, past the spool, while the writer has nothing else to do. Returns
        what is left of it for :attr:`rest`, ``b""`` if nothing is, None if it could not."""
        self.note_all: Callable[[], object] = bool
        """Called when the outlet has sent what may be the last piece: see :meth:`push`."""
        self.counted = False
        """Any piece may be the last: the length is known."""
        self.rest = b""
        """What the outlet began to send: it goes before everything else, as it is."""
        self._waiting = False
        self._taken = 0
        self._full_since = inf
        self._pieces: deque[bytes] = deque()
        self._getter = trio.lowlevel.ParkingLot()
        self._putter = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        state = f"failed: {self.failure.code}" if self.failure else "ended" if self.ended else "open"
        return f"<Spool {self.held}/{self.limit} bytes, {state}>"

    def let_out(
        self, outlet: Callable[[bytes], bytes | None] | None, note_all: Callable[[], object], *, counted: bool
    ) -> None:
        """Have what comes take ``outlet`` from now on, while the writer has nothing else to do."""
        self.outlet, self.note_all, self.counted = outlet, note_all, counted

    def no_outlet(self) -> None:
        """Forget the outlet, and who is told of its last piece: they know this spool too."""
        self.outlet, self.note_all = None, bool

    @property
    def full(self) -> bool:
        """Whether a put would have to wait."""
        return self.held >= self.limit

    @property
    def empty(self) -> bool:
        """Whether the writer has taken everything."""
        return not self._pieces and not self.rest

    def push(self, data: bytes, last: bool = False) -> None:
        """Add bytes without waiting, the ``last`` ones perhaps. Call it only while not ``full``.

        A writer that keeps up is waiting in :meth:`get`. Then the bytes take the outlet from
        here, and the writer need not be woken for them.
        """
        outlet = self.outlet
        if self._waiting and outlet is not None and not self.held:
            rest = outlet(data)
            if rest is not None:
                self.sent += len(data)
                if rest:
                    self.rest = rest
                    self.held = len(rest)
                    self._getter.unpark()
                elif last or self.counted:
                    self.note_all()
                return
        self._pieces.append(data)
        self.held += len(data)
        if self._getter:
            self._getter.unpark()

    async def room(self) -> None:
        """Wait until there is room. When that takes long, pieces are small until the spool is empty."""
        if self.full:
            self._full_since = trio.current_time()
        while self.full:
            await self._putter.park()

    def end(self, failure: GatewayError | None = None) -> None:
        """Say that nothing more comes, and why if it ended badly. The first word counts."""
        if not self.ended:
            self.ended = True
            self.failure = failure
            self._getter.unpark()

    async def get(self) -> bytes:
        """Wait for bytes and return all there are, ``b""`` when the response has ended.

        Of more than ``piece_bytes`` it returns a part: joining it would only cost, for as long
        as a slow client takes, twice the memory.

        To come for more is to say that what was taken before is written. If there is a
        :attr:`rest` it returns ``b""`` at once: the rest is to be taken first.
        """
        self._written()
        while not (self._pieces or self.rest or self.ended):
            self._waiting, self.piece_bytes = True, PIECE_BYTES
            try:
                await self._getter.park()
            finally:
                self._waiting = False
        if self.rest or not self._pieces:
            return b""
        pieces, most = self._pieces, self.piece_bytes
        data = pieces.popleft()
        if pieces and len(data) < most:
            several, size = [data], len(data)
            while pieces and size + len(pieces[0]) <= most:
                several.append(pieces.popleft())
                size += len(several[-1])
            data = b"".join(several)
        self._taken = len(data)
        return data

    def take_rest(self) -> bytes:
        """Return the rest and forget it."""
        rest, self.rest = self.rest, b""
        self._taken = len(rest)
        return rest

    def _written(self) -> None:
        if self._taken:
            self.held -= self._taken
            self._taken = 0
            if self._putter:
                if trio.current_time() - self._full_since > SLOW_SECONDS:
                    self.piece_bytes = SMALL_PIECE_BYTES
                self._putter.unpark()
