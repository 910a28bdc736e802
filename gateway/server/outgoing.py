"""A client's socket, written so that the progress of a slow reader can be seen.

A sender sees of its reader what the reader's TCP says: acknowledgements, and a window that
opens again. A kernel frees received bytes by whole buffers, though, into which it merges what
came close together: up to 64 KB, or 17 pieces that were sent one by one (MAX_SKB_FRAGS).
Until a reader is through with one of them nothing moves, which takes a reader of 2 KB/s half
a minute. So whoever hasn't shown to be quick is sent small pieces, each a packet buffer of its
own (MSG_EOR).
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

import trio

from gateway.server.locks import QuickLock
from gateway.server.stall import SLOWEST_BYTES_PER_SECOND

_MERGED = 17

QUICK_BYTES = 256 * 1024
"""A reader that has taken so much is quick: more than a client's kernel takes in at first, of
which its reader knows nothing."""

QUICK_BYTES_PER_SECOND = 64 * 1024
"""What is taken at a lower pace doesn't count: kernels enlarge their buffers for slow readers too."""

_MOST_READ_BYTES = 64 * 1024
_MOST_AT_ONCE = 256 * 1024
"""Bytes that are written before others get their turn."""


def grain(stall_seconds: float) -> int:
    """Return the size of the pieces in bytes; 0 (no limit) without a stall clock.

    The slowest reader is through with a buffer of them in half of ``stall_seconds`` and a second
    less: kernels aren't even.

    >>> grain(5.0), grain(30.0)
    (180, 1686)
    """
    seconds = max(stall_seconds / 2 - 1, stall_seconds / 4)
    return int(SLOWEST_BYTES_PER_SECOND * seconds / _MERGED)


class ClientStream(trio.abc.HalfCloseableStream):
    """The stream of an accepted connection, as Trio's own but for the writing.

    (And without the context manager in which Trio translates errors: on Python 3.13 a client's
    reset would leave a cycle with its connection in it.)

    ``lock`` is its writers'; ``closed_to_writers``: nothing more is to be written without waiting.
    """

    __slots__ = ("_grain", "_looked", "_new", "_raw", "_taken", "closed_to_writers", "lock", "socket")

    def __init__(self, sock: trio.socket.SocketType, *, stall_seconds: float) -> None:
        self.socket = sock
        self.lock = QuickLock()
        self.closed_to_writers = False
        self._raw: socket.socket = sock._sock  # type: ignore[attr-defined]  # for writes without Trio's layers
        self._grain = grain(stall_seconds) if sock.family != socket.AF_UNIX else 0
        self._taken = 0.0
        """A bucket of the bytes taken that leaks at the pace of whoever isn't quick."""
        self._looked = trio.current_time()
        self._new = True

    def write_now(self, data: bytes) -> int:
        """Write what the socket takes without waiting, while nobody else writes; return how many bytes.

        That is 0 also where the connection is broken: whoever waits for it finds out.
        """
        if self.lock.held or self.closed_to_writers:
            return 0
        try:
            if len(data) <= self._grain:  # As :meth:`send_now` does, without its step: for every token.
                return self._raw.send(data, socket.MSG_EOR)
            return self.send_now(data)
        except OSError:
            return 0

    def send_now(self, data: Any) -> int:
        """Write what the socket takes without waiting; return how many bytes that was.

        Raises OSError when the connection is broken.
        """
        sent, size = 0, len(data)
        try:
            if size <= self._grain:
                return self._raw.send(data, socket.MSG_EOR)
            small = self._grain and not self._is_quick()
            view = memoryview(data)
            while sent < size and small:
                sent += self._raw.send(view[sent : sent + self._grain], socket.MSG_EOR)
                small = sent < QUICK_BYTES
            if sent < size:
                sent += self._raw.send(view[sent : sent + _MOST_AT_ONCE])
        except BlockingIOError:
            pass
        self._taken = min(self._taken + sent, QUICK_BYTES + QUICK_BYTES_PER_SECOND)
        return sent

    def _is_quick(self) -> bool:
        now = trio.current_time()
        self._taken = max(0.0, self._taken - (now - self._looked) * QUICK_BYTES_PER_SECOND)
        self._looked = now
        return self._taken >= QUICK_BYTES

    async def send_all(self, data: Any) -> None:
        """Write all of it. Raises BrokenResourceError or ClosedResourceError as Trio's own does."""
        with memoryview(data) as view:
            sent = 0
            try:
                while sent < len(view):
                    await trio.lowlevel.checkpoint_if_cancelled()
                    if taken := self.send_now(view[sent:]):
                        sent += taken
                        # Shielded, so that a write that is whole isn't taken for one that was cut short.
                        await trio.lowlevel.cancel_shielded_checkpoint()
                    else:
                        await trio.lowlevel.wait_writable(self._raw)
            except OSError as error:
                raise self._failure(error) from error

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Read what is there; ``b""`` at the end. Raises as :meth:`send_all` does."""
        size = max_bytes or _MOST_READ_BYTES
        try:
            if self._new:
                # Its task has only begun, and a client that connects has mostly sent something.
                self._new = False
                with suppress(BlockingIOError):
                    return self._raw.recv(size)
            while True:
                self._check_open()
                await trio.lowlevel.wait_readable(self.socket)
                with suppress(BlockingIOError):
                    return self._raw.recv(size)
        except OSError as error:
            raise self._failure(error) from error

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until there is room. Raises ClosedResourceError."""
        self._check_open()
        await trio.lowlevel.wait_writable(self._raw)

    async def send_eof(self) -> None:
        """Say that nothing more comes. Raises as :meth:`send_all` does."""
        await trio.lowlevel.checkpoint()
        try:
            self._raw.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise self._failure(error) from error

    async def aclose(self) -> None:
        """Close."""
        self.socket.close()
        await trio.lowlevel.checkpoint()

    def _check_open(self) -> None:
        """Raise ClosedResourceError where Trio, asked to wait for a closed socket, has a ValueError."""
        if self._raw.fileno() < 0:
            raise trio.ClosedResourceError("this socket was already closed")

    def _failure(self, error: OSError) -> Exception:
        if self._raw.fileno() < 0:
            return trio.ClosedResourceError("this socket was already closed")
        return trio.BrokenResourceError(f"socket connection broken: {error}")
