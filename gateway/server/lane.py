"""The short way for the body of an HTTP/1.1 response on plain TCP.

Once Hypercorn has sent the head, body pieces are framed here and go to the socket past
h11 and the layers above it, which keep the response's state: they send the head before
and the end after. h11 has no state between chunks (and none at all where the end of the
connection ends the body), so it doesn't miss them. A body of announced length takes the
ordinary way: h11 counts it.

This is the one seam into Hypercorn's sending side; where it doesn't fit (TLS, announced
length, another Hypercorn: :mod:`gateway.server.seam`), everything works without it, with more steps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

LARGE_BYTES = 16 * 1024


class Out(Protocol):
    """A way to the socket."""

    def write_now(self, data: bytes) -> int:
        """Write what can be written without waiting; return how many bytes that was."""


class Lane:
    """Sends one response's body pieces: to ``out`` without waiting; ``write`` waits."""

    __slots__ = ("_chunked", "_write", "out")

    def __init__(
        self, out: Out, write: Callable[[bytes | memoryview], Awaitable[None]], *, chunked: bool
    ) -> None:
        self.out = out
        self._write = write
        self._chunked = chunked

    def send_now(self, data: bytes) -> bytes | None:
        """Send a piece as far as the socket takes it at once.

        Returns what is left, framed, for :meth:`send_rest`; None if nothing could be sent,
        not even in part.
        """
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
        sent = self.out.write_now(framed)
        return framed[sent:] if sent else None

    async def send_rest(self, framed: bytes) -> None:
        """Send what :meth:`send_now` left."""
        await self._write(framed)

    async def send(self, data: bytes) -> None:
        """Send a piece: what the socket takes at once, then the rest.

        Nothing of it is copied for longer than a moment: the copy would stay for as long as the
        client doesn't read.
        """
        if not self._chunked:
            await self._after(self.out.write_now(data), data)
        elif len(data) > LARGE_BYTES:
            await self._after(0, b"%x\r\n" % len(data), data, b"\r\n")
        else:
            framed = b"%x\r\n%b\r\n" % (len(data), data)
            await self._after(self.out.write_now(framed), b"%x\r\n" % len(data), data, b"\r\n")

    async def _after(self, sent: int, *pieces: bytes) -> None:
        """Send all but the first ``sent`` bytes."""
        for piece in pieces:
            if sent < len(piece):
                await self._write(memoryview(piece)[sent:])
            sent = max(0, sent - len(piece))
