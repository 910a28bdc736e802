"""One connection to an engine, and the response that is being read from it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

import httpx
import trio

from gateway.reply import Reply

READ_BYTES = 64 * 1024
"""One read takes all there is up to this: under load reads get larger, not more."""

_BUFFER = memoryview(bytearray(READ_BYTES))
"""What every read goes to: the parser copies what it keeps. (A buffer for each read, shrunk to
what came, would leave the heap full of holes too small for the next.)"""


class UpstreamConnection:
    """A socket, and the response that is being read from it. Raises httpx's exceptions."""

    __slots__ = ("_raw", "_socket", "reply")

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._socket = sock
        self._raw: socket.socket = sock._sock  # type: ignore[attr-defined]  # for reads without Trio's layers
        self.reply = Reply()

    def close(self) -> None:
        """Close at once."""
        self._socket.close()
        self.reply.let_go()

    def quiet(self) -> bool:
        """Whether nothing has come while it was idle: neither bytes nor the engine's close."""
        try:
            self._raw.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def send(self, pieces: list[bytes | memoryview], begun: Callable[[], object]) -> None:
        """Write the request, and empty the list of its pieces: nobody needs them any more.

        ``begun`` is called when the socket has had of it what it takes at once.
        """
        try:
            try:
                self._send_now(pieces)
            finally:
                # The engine has work now: what can be done meanwhile is done here.
                if self.reply.begun:
                    self.reply.let_go()
                    self.reply = Reply()
                begun()
            while pieces:
                await trio.lowlevel.wait_writable(self._raw)
                self._send_now(pieces)
        except OSError as error:
            # An engine may answer early and close; its answer counts then.
            pieces.clear()
            if not await self._answer_is_there():
                raise httpx.WriteError(str(error)) from None

    def _send_now(self, pieces: list[bytes | memoryview]) -> None:
        with suppress(BlockingIOError):
            while pieces:
                sent = self._raw.send(pieces[0])
                pieces[:1] = [memoryview(pieces[0])[sent:]] if sent < len(pieces[0]) else []

    async def _answer_is_there(self) -> bool:
        await trio.lowlevel.checkpoint()
        try:
            return bool(self._raw.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    @property
    def descriptor(self) -> int:
        """Number of the socket."""
        return self._raw.fileno()

    async def feed(self) -> None:
        """Wait until there is something, read once and parse what came."""
        await trio.lowlevel.wait_readable(self._raw)
        self.read_now()

    def read_now(self, most: int = READ_BYTES) -> list[bytes]:
        """Read once, at most ``most`` bytes (of ``READ_BYTES``), if there is something, and parse what came.

        Returns the body's pieces that nobody has taken yet, as :attr:`gateway.reply.Reply.parts`.
        """
        reply = self.reply
        try:
            size = self._raw.recv_into(_BUFFER, most)
        except BlockingIOError:
            pass
        except OSError as error:
            if not reply.begun:
                raise httpx.ReadError(str(error)) from None
            reply.fail(str(error))
        else:
            reply.feed(_BUFFER[:size])
        return reply.parts
