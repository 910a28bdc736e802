"""The client's side of a request in ASGI's terms.

One task calls ``receive`` for as long as the request lives, also when nobody wants the
body any more: an undelivered message would block the whole connection. Sources: ASGI
HTTP specification 2.5.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from email.utils import format_datetime
from functools import lru_cache
from typing import Any, Protocol

import trio

from gateway.bodies import SMALL_BYTES, BodyBudget
from gateway.config import Server
from gateway.errors import Code, GatewayError
from gateway.headers import Fields, find
from gateway.request import Request
from gateway.words import RawHeaders

_DIGITS = re.compile(rb"[0-9]{1,15}")

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


@lru_cache(maxsize=1)
def _date(_second: int) -> bytes:
    """Write the time as HTTP does. All answers within a second of Trio's clock share it."""
    return format_datetime(datetime.now(UTC), usegmt=True).encode("ascii")


class Lane(Protocol):
    """A short way for body pieces past the server's layers."""

    async def send(self, data: bytes) -> None:
        """Send a piece."""

    async def send_rest(self, framed: bytes) -> None:
        """Send what ``send_now`` left of a piece."""


class ServerStream(Protocol):
    """The request's stream in our own server."""

    abort: Callable[[], None]
    """Cuts the client off at once, a write in progress too."""
    send_now: Callable[[bytes], bytes | None]
    """Sends a piece of the body without waiting; see :meth:`gateway.server.lane.Lane.send_now`."""
    lane: Lane | None
    """A short way for the body, once the head is sent; None where there is none."""
    settled: Callable[[], Awaitable[None]]
    """Waits until the socket has taken what was sent."""
    wants_body: Callable[[], None]
    """Says that the body is wanted: a client that waits for ``100 Continue`` gets it."""
    receive_now: Callable[[], Any]
    """Returns the next message if there is one; None if ``receive`` would wait."""


class AsgiClient:
    """Reads the body and writes the response of one request.

    ``stream`` is what our own server offers beyond ASGI; None with any other server.
    """

    def __init__(
        self,
        receive: Receive,
        send: Send,
        *,
        headers: Fields,
        limits: Server,
        budget: BodyBudget,
        stream: ServerStream | None = None,
    ) -> None:
        self._stream = stream
        self._receive = receive
        self._send = send
        self._limits = limits
        self._budget = budget
        self._body: bytes | bytearray = b""
        self._size = 0
        self._reserved = self._whole = 0
        self._without_room = False
        self._complete = trio.Event()
        self._wanted = True
        self._refusal: GatewayError | None = None
        declared = find(headers, b"content-length")
        self._declared = int(declared) if declared and _DIGITS.fullmatch(declared) else None
        if self._declared is not None and self._declared > limits.max_body_bytes:
            self._refuse()

    def needs_watching(self) -> bool:
        """Take in what is there of the body; return whether :meth:`watch` is needed for what is to come.

        It isn't once the body is whole, where our own server tells of the client's leaving (``left``):
        a task that waits for nothing but that would cost a twentieth of a short request.
        """
        if self._stream is not None:
            self._take_what_is_there(self._stream)
        return self._stream is None or not self._complete.is_set() or self._refusal is not None

    async def watch(self, request: Request) -> None:
        """Take in the body, then wait for the client to leave and tell ``request``."""
        while True:
            if self._wanted and not self._complete.is_set():
                await self._reserve()
            message = await self._receive()
            if message["type"] == "http.disconnect":
                request.client_left()
                return
            self._take(message)

    async def body(self) -> bytes:
        """Return the whole body.

        Raises GatewayError ``body_too_large`` or ``body_timeout``, or ``queue_timeout`` when it was
        our lack of room that kept the body from arriving.
        """
        if self._refusal is None:
            if self._stream is not None:
                self._stream.wants_body()
            if not self._complete.is_set():
                with trio.move_on_after(self._limits.body_seconds):
                    await self._complete.wait()
        if self._refusal is not None:
            raise self._refusal
        if not self._complete.is_set():
            self.drop_body()
            within = f"within {self._limits.body_seconds:g} s"
            if self._without_room:
                raise GatewayError(Code.QUEUE_TIMEOUT, f"There was no room for the request body {within}.")
            raise GatewayError(Code.BODY_TIMEOUT, f"The request body didn't arrive {within}.")
        body = self.body_now()
        assert body is not None
        return body

    def body_now(self) -> bytes | None:
        """Return the whole body if it has arrived."""
        if not self._complete.is_set() or self._refusal is not None:
            return None
        if isinstance(self._body, bytearray):
            self._body = bytes(self._body)
        return self._body

    def drop_body(self) -> None:
        """Forget the body, and what is still to come of it."""
        self._wanted = False
        self._body = b""
        self._give_back(self._reserved)

    def abort(self) -> None:
        """Cut the client off, a write in progress too. Only our own server can."""
        if self._stream is not None:
            self._stream.abort()

    async def begin(self, status: int, headers: RawHeaders) -> None:
        """Send the response's head, with a Date if the engine gave none (RFC 9110, 6.6.1)."""
        if find(headers, b"date") is None:
            headers = [*headers, (b"Date", _date(int(trio.current_time())))]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def outlet(self) -> Callable[[bytes], bytes | None] | None:
        """Return what sends pieces of the body without waiting, if there is such a way."""
        return self._stream.send_now if self._stream is not None else None

    async def send_rest(self, rest: bytes) -> None:
        """Send what the outlet has left."""
        assert self._stream is not None
        assert self._stream.lane is not None
        await self._stream.lane.send_rest(rest)

    async def send(self, data: bytes) -> None:
        """Send a piece of the response's body."""
        if self._stream is not None and self._stream.lane is not None:
            await self._stream.lane.send(data)
            return
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def settled(self) -> None:
        """Wait until the connection holds nothing of what was sent."""
        if self._stream is not None:
            await self._stream.settled()

    async def finish(self) -> None:
        """End the response well."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _take_what_is_there(self, stream: ServerStream) -> None:
        """Take a body that has come together with its head: no turn of the loop need pass for it.

        It stops at the body's end: that the client has left is for :meth:`watch` to see.
        """
        while self._wanted and not self._complete.is_set() and self._reserve_now():
            message = stream.receive_now()
            if message is None:
                return
            self._take(message)

    def _needed(self) -> int:
        """Return the room for what may come. A body of undeclared length counts as small until it isn't."""
        if self._declared is not None:
            return self._declared
        return SMALL_BYTES if self._size < SMALL_BYTES else self._limits.max_body_bytes

    def _reserve_now(self) -> bool:
        """Have that room if it can be had at once."""
        whole = self._needed()
        if whole > self._reserved:
            self._give_back(self._reserved)
            if not self._budget.take_now(whole, whole=whole):
                return False
            self._reserved = self._whole = whole
        return True

    async def _reserve(self) -> None:
        """Have that room."""
        if not self._reserve_now():
            whole = self._needed()
            self._without_room = True
            await self._budget.take(whole, whole=whole)
            self._without_room = False
            self._reserved = self._whole = whole

    def _give_back(self, size: int) -> None:
        if size > 0:
            self._reserved -= size
            self._budget.give_back(size, whole=self._whole)

    def _take(self, message: Any) -> None:
        if not self._wanted:
            return
        piece, more = message.get("body", b""), message.get("more_body", False)
        self._size += len(piece)
        if self._size > self._limits.max_body_bytes:
            self._refuse()
            return
        if not self._body:
            self._body = piece
        elif piece:
            # One growing block: pieces would be twice the body when they are joined, and leave
            # holes in the heap.
            if not isinstance(self._body, bytearray):
                self._body = bytearray(self._body)
            self._body += piece
        if not more:
            self._give_back(self._reserved - self._size)
            self._complete.set()

    def _refuse(self) -> None:
        self.drop_body()
        self._refusal = GatewayError(
            Code.BODY_TOO_LARGE,
            f"The request body is larger than {self._limits.max_body_bytes} bytes (server.max_body_bytes).",
        )
        self._complete.set()
