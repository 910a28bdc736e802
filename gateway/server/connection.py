"""One client connection: whatever happens on it stays on it.

In Hypercorn an exception in one connection's handler leaves through the server's
nursery and ends the process. Here it ends its connection, with one log line. A
departure is seen at once, in every phase. A write can be cut off: Hypercorn shields its writes from
cancellation, and a client that stops reading holds them for ever. Here a write that is cancelled
resets its connection. (On HTTP/2 requests leave writing to a task of the connection.)
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from math import inf
from typing import Any

import trio
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H2ProtocolAssumedError
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.typing import ConnectionState, LifespanState

from gateway.server import peer
from gateway.server.http1 import Http1
from gateway.server.http2 import Http2
from gateway.server.outgoing import ClientStream
from gateway.server.shared import Shared
from gateway.server.stall import StallClock

LINGER_SECONDS = 10.0
LINGER_SILENCE_SECONDS = 1.0
"""After our last byte what the client still sends is read and dropped, so long in all and while it goes on
without a longer silence: at a close with unread bytes the kernel resets, which can erase what we have said
(RFC 9112, 9.6)."""

PING_AFTER_SECONDS = 12.0
"""An HTTP/2 client with open streams that is silent for so long is pinged, and has as long again for that."""

LOOK_SECONDS = 4.0
"""How often the kernel is asked whether a client of HTTP/1.1 who has taken all there was has vanished.
Asked twice a second, 2,000 open streams are a twentieth of a core."""

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Connection(TCPServer):
    """A connection from accept to close."""

    def __init__(self, shared: Shared, stream: Any) -> None:
        super().__init__(shared.app, shared.config, shared.context, LifespanState({}), stream)
        self.stream: Any = stream
        self._transport: ClientStream = getattr(stream, "transport_stream", stream)
        self.send_lock: Any = self._transport.lock
        self._shared = shared
        self._socket = self._transport.socket
        self._http: Any = None
        self._make: Any = None
        self._closing = False
        self._gone = False
        self._over = False
        self._idle_since = inf
        self._reading = trio.CancelScope()
        self._linger_until = 0.0
        self._heard = trio.current_time()
        self._pinged = False
        self._look_again = 0.0
        self._stall_clock = StallClock(shared.stall_seconds, self._heard)

    async def run(self) -> None:
        """Serve the connection; raises nothing but Cancelled."""
        try:
            try:
                with self._shared.hangups.watching(self._socket.fileno(), self._hung_up):
                    await self._serve()
            finally:
                await trio.aclose_forcefully(self.stream)
                # It knows this connection too: what no cycle holds is freed now, not by the collector.
                self._http = self._make = None
        except Exception as error:  # noqa: BLE001 - whatever it is, it must stay on this connection
            self._shared.fault(error)
        except BaseExceptionGroup as group:
            cancelled, rest = group.split(trio.Cancelled)
            if rest is not None:
                if not isinstance(rest, Exception):
                    raise
                self._shared.fault(rest)
            if cancelled is not None:
                raise cancelled from None

    def abort(self) -> None:
        """Reset the connection. A write that is stuck ends at once, and so does reading."""
        descriptor = self._socket.fileno()
        if descriptor >= 0:
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._shared.hangups.forget(descriptor, self._hung_up)
            self._socket.close()

    async def _serve(self) -> None:
        alpn = None
        if tls := hasattr(self.stream, "do_handshake"):
            try:
                with trio.fail_after(self.config.ssl_handshake_timeout):
                    await self.stream.do_handshake()
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                return
            alpn = self.stream.selected_alpn_protocol()
        try:
            client, server = (
                peer.host_and_port(self._socket.getpeername()),
                peer.host_and_port(self._socket.getsockname()),
            )
        except OSError:
            return  # Gone before it was looked at.
        async with TaskGroup() as task_group:
            self._task_group = task_group
            context = (
                self.app,
                self.config,
                self.context,
                task_group,
                ConnectionState({}),
                tls,
                client,
                server,
            )
            self._make = lambda kind: kind(
                *context,
                self.protocol_send,
                abort=self.abort,
                fault=self._shared.fault,
                gone=lambda: self._gone,
                out=self._transport if self._shared.short_way and not tls else None,
            )
            self._http = self._make(Http2 if alpn == "h2" else Http1)
            await self._http.initiate()
            self._idle_since = trio.current_time()
            await self._read_data()

    async def _read_data(self) -> None:
        with self._reading:
            while True:
                try:
                    data = await self.stream.receive_some(MAX_RECV)
                except (trio.ClosedResourceError, trio.BrokenResourceError):
                    break
                if not data:
                    break
                self._heard = trio.current_time()
                self._pinged = False
                if self._closing:
                    # Said all; what still comes is dropped.
                    self._reading.deadline = min(self._heard + LINGER_SILENCE_SECONDS, self._linger_until)
                    continue
                await self._handle(bytes(data))
                if self._gone and self._http.full():
                    break
        if self.send_lock.held:
            # The client has left; nobody will ever take what is stuck in the write.
            self.abort()
        self._over = self._transport.closed_to_writers = True
        await self._http.handle(Closed())

    async def _handle(self, data: bytes) -> None:
        try:
            await self._http.handle(RawData(data))
        except H2ProtocolAssumedError as error:
            self._http = self._make(Http2)
            await self._http.initiate()
            await self._handle(error.data)

    def _hung_up(self) -> None:
        """The client has hung up. What it sent before is still read, unless there is no room for it."""
        self._gone = True
        if self._http is not None:
            self._http.wake()

    async def protocol_send(self, event: Event) -> None:
        """Do what the protocol asks for: write, close, or mind the idle clock."""
        if type(event) is RawData:
            await self._write(event.data)
        elif type(event) is Closed:
            await self._linger()
            await self._http.handle(Closed())
        elif type(event) is Updated:
            self._idle_since = trio.current_time() if event.idle else inf
            if event.idle and self._ends_when_idle() and not self._over:
                self._end_idle()

    def _ends_when_idle(self) -> bool:
        context = self._shared.context
        if context.leaving and not isinstance(self._http, Http2):
            # Its last answer may have begun before we knew: the next one will say that it is the last.
            return bool(context.terminated.is_set())
        return context.ending

    async def _write(self, data: bytes) -> None:
        try:
            async with self.send_lock:
                await self.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self._http.handle(Closed())
            # The request has been cancelled by that; it must not take the bytes for sent.
            await trio.lowlevel.checkpoint_if_cancelled()
        except trio.Cancelled:
            # Nobody knows what of it has left. Nothing sensible can follow.
            self.abort()
            raise

    async def _linger(self) -> None:
        """Say that we have said all; the reading goes on for a moment."""
        if self._closing:
            return
        self._closing = self._transport.closed_to_writers = True
        self._idle_since = inf
        now = trio.current_time()
        self._linger_until = now + LINGER_SECONDS
        self._reading.deadline = now + LINGER_SILENCE_SECONDS
        with trio.CancelScope(shield=True):
            try:
                # TLS has no half-close in Trio. The transport's FIN says enough.
                async with self.send_lock:
                    await self._transport.send_eof()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self._reading.cancel()

    def end_if_idle(self, now: float = inf) -> None:
        """End the connection if it has been idle for too long; at all, without ``now``."""
        if (
            not self._over
            and self._idle_since < inf
            and now - self._idle_since >= self.config.keep_alive_timeout
        ):
            self._idle_since = inf
            self._end_idle()

    def _end_idle(self) -> None:
        if not isinstance(self._http, Http2):
            self._reading.cancel()
        elif self._http.idle and not self._closing:
            self._http.end()

    def go_away(self) -> None:
        """On HTTP/2: say that nothing new is taken, and go on with what was begun."""
        if isinstance(self._http, Http2) and not self._closing:
            self._http.go_away()

    # Looked at once a second or so, from outside.

    def look_after(self, now: float) -> None:
        """Cut off a client that has stalled or vanished. ``now`` is Trio's clock."""
        http, writing = self._http, self.send_lock.held
        if http is None or not (writing or http.open_streams()):
            # The kernel isn't asked: there may be thousands of them.
            self._stall_clock.rest(now)
            self.end_if_idle(now)
            return
        if self._closing and not writing:
            return
        if not writing and now < self._look_again and isinstance(http, Http1):
            self._stall_clock.rest(now)
            return
        self._look_again = now + LOOK_SECONDS
        state = peer.look(self._socket)
        if state is not None and state.vanished:
            self.abort()
        elif self._stall_clock.stalled(
            now, stuck=writing, taken=state.acknowledged if state is not None else 0
        ):
            for stream in http.open_streams():
                stream.give_up()
            self.abort()
        elif isinstance(http, Http2):
            if state is not None and state.unacknowledged:
                # A ping would be behind that. TCP's own clocks and the stall clock know more.
                self._heard = now
            self._look_after_http2(http, now)

    def _look_after_http2(self, http: Http2, now: float) -> None:
        if self._shared.stall_seconds:
            http.end_stalled(now - self._shared.stall_seconds)
        silent = now - self._heard
        if silent < PING_AFTER_SECONDS:
            return
        if not self._pinged:
            self._pinged = True
            http.pings.ask()
        elif silent >= 2 * PING_AFTER_SECONDS:
            self.abort()
