"""A transport for plain-HTTP engines: httptools on Trio sockets, in httpx's shape.

One read of the socket is one hand-over of everything it brought. There is no limiter (slots
are the limit), no task of its own, and cancellation closes the socket at once.
(httpx's own hands over one chunk frame at a time, for about 60 us of CPU more a token.)
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from ipaddress import ip_address

import httpx
import trio

from gateway.arrivals import Arrivals
from gateway.encoding import encoded_request
from gateway.upstream import READ_BYTES, UpstreamConnection

KEEPALIVE_SECONDS = 4.0
"""Idle connections are let go before engines close them: uvicorn and llama.cpp do after 5 s."""


class DirectTransport(httpx.AsyncBaseTransport):
    """Calls one engine at ``host``:``port``, or on the unix socket ``uds``.

    Raises httpx's exceptions as its own transport does, so that both are handled alike.
    ``reuse`` False makes each request on a connection of its own. With ``arrivals`` bodies
    that are relayed wake no task.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        uds: str | None = None,
        socket_options: list[tuple[int, int, int]],
        reuse: bool = True,
        arrivals: Arrivals | None = None,
    ) -> None:
        self._address = (host, port)
        self._numeric = _family(host)
        self._uds = uds
        self._options = socket_options
        self._reuse = reuse
        self.arrivals = arrivals
        self._idle: deque[tuple[float, UpstreamConnection]] = deque()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; return when the response's head is there."""
        seconds = request.extensions.get("timeout", {}).get("connect")
        body = await self.call(await encoded_request(request), seconds)
        return httpx.Response(body.status, headers=body.headers, stream=body, request=request)

    async def call(
        self,
        pieces: list[bytes | memoryview],
        connect_seconds: float | None,
        connected: Callable[[bool], object] = bool,
    ) -> Body:
        """Send a request, written down by :mod:`gateway.encoding`; return when the response's head is there.

        It is the way past httpx's objects, which take their time. ``connected`` is told whether the
        connection is a new one, in the step in which the first bytes are written. The list is emptied.
        """
        kept = self._take_idle()
        connection = kept or await self._connect(connect_seconds)
        try:
            await connection.send(pieces, lambda: connected(kept is None))
            while not connection.reply.head_complete:
                await connection.feed()
        finally:
            if not connection.reply.head_complete:
                connection.close()
        return Body(self, connection)

    async def aclose(self) -> None:
        """Close the idle connections, and from now on each as its response is over."""
        self._reuse = False
        while self._idle:
            self._idle.pop()[1].close()
        await trio.lowlevel.checkpoint()

    def release(self, connection: UpstreamConnection) -> None:
        """Take back a connection whose response is over."""
        if self._reuse and connection.reply.reusable:
            self._idle.append((trio.current_time() + KEEPALIVE_SECONDS, connection))
        else:
            connection.close()

    def _take_idle(self) -> UpstreamConnection | None:
        """Return the connection used last, if it is fresh and whole; close those that aren't."""
        now = trio.current_time()
        while self._idle and self._idle[0][0] <= now:
            self._idle.popleft()[1].close()
        while self._idle:
            connection = self._idle.pop()[1]
            if connection.quiet():
                return connection
            connection.close()
        return None

    async def _connect(self, seconds: float | None) -> UpstreamConnection:
        try:
            with trio.fail_after(seconds) if seconds else trio.CancelScope():
                sock = await self._socket()
        except trio.TooSlowError:
            raise httpx.ConnectTimeout("no connection in time") from None
        except OSError as error:
            raise httpx.ConnectError(_words(error)) from error
        return UpstreamConnection(sock)

    async def _socket(self) -> trio.socket.SocketType:
        if self._uds is not None:
            return (await trio.open_unix_socket(self._uds)).socket
        if self._numeric is None:
            stream = await trio.open_tcp_stream(*self._address)
            for option in self._options:
                stream.setsockopt(*option)
            return stream.socket
        # There is one address and no race between several, which takes Trio some turns of its loop.
        sock = trio.socket.socket(self._numeric, socket.SOCK_STREAM)
        try:
            for option in self._options:
                sock.setsockopt(*option)
            await sock.connect(self._address)
        except OSError:
            sock.close()  # A connect that is cancelled closes it itself.
            raise
        return sock


def _family(host: str) -> socket.AddressFamily | None:
    """Return the family of an address in numbers, None for a name."""
    try:
        return socket.AF_INET6 if ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return None


def _words(error: OSError) -> str:
    """What the system says of it, without the address as Python writes it."""
    return os.strerror(error.errno) if error.errno and not isinstance(error, socket.gaierror) else str(error)


class Body(httpx.AsyncByteStream):
    """The response, its head there: each step of its body is all that one read brought."""

    __slots__ = ("_connection", "_most", "_take", "_transport", "headers", "status")

    def __init__(self, transport: DirectTransport, connection: UpstreamConnection) -> None:
        self._transport = transport
        self._connection: UpstreamConnection | None = connection
        self._take: Callable[[bytes], int] = len
        self._most = 0
        self.status, self.headers = connection.reply.status, connection.reply.headers

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if data := await self.read():
            return data
        raise StopAsyncIteration

    async def read(self) -> bytes:
        """Return all that one read brought, ``b""`` at the end. Raises what httpx's streams raise."""
        connection = self._connection
        while connection is not None:
            if data := connection.reply.take():
                return data
            if self._is_over(connection):
                break
            await connection.feed()
        return b""

    async def relay(self, take: Callable[[bytes], int], most: int) -> bool:
        """See :meth:`gateway.engine.Answer.relay`. Raises what httpx's streams raise."""
        connection, arrivals = self._connection, self._transport.arrivals
        if connection is None:
            return False
        self._take, self._most = take, min(most, READ_BYTES)
        try:
            if data := connection.reply.take():
                self._most = min(take(data), READ_BYTES)
            while self._most:
                if self._is_over(connection):
                    return False
                if arrivals is not None:
                    await arrivals.until(connection.descriptor, self._pass_on)
                else:
                    await trio.lowlevel.wait_readable(connection.descriptor)
                    self._pass_on()
        finally:
            self._take = len  # It knows whoever has made it: no cycle is to be left to the collector.
        # A failure behind all that was wanted is none: it may be met by whoever reads on.
        return not (connection.reply.complete and self._is_over(connection))

    def _pass_on(self) -> bool:
        """Hand on what one read brings. Returns whether that can go on. It is run for every token."""
        connection = self._connection
        assert connection is not None
        reply = connection.reply
        if parts := connection.read_now(self._most):
            take = self._take
            most = take(parts.pop() if len(parts) == 1 else reply.take())
            self._most = most if most < READ_BYTES else READ_BYTES  # noqa: FURB136 - a step for each token
        return not (not self._most or reply.complete or reply.failure)

    def _is_over(self, connection: UpstreamConnection) -> bool:
        """Whether the response has ended. Raises its failure if it ended so."""
        reply = connection.reply
        if reply.complete:
            self._connection = None
            self._transport.release(connection)
        elif reply.failure is not None:
            raise reply.take_failure()
        return reply.complete

    async def aclose(self) -> None:
        """Close the connection, unless its response is over."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
