"""HTTP/2 on one connection.

The protocol is h2's; Hypercorn's class holds the connection's state. The sending side is our own
(:mod:`gateway.server.sending`): reading never waits for writing, so a full connection hides no reset.

What is different from Hypercorn's besides: a response that breaks off is reset once its data has left
(RFC 9113, 8.1); one that ends before its request is followed by RST_STREAM(NO_ERROR), and what still arrives
for it is acknowledged and dropped; body bytes are acknowledged when the application takes them; floods of
control frames end the connection; it ends at a good moment (:mod:`gateway.server.parting`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import h2.errors
import h2.events
import h2.exceptions
import trio
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Response, StreamClosed
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.http_stream import ASGIHTTPState

from gateway.server.abuse import A_REQUEST, Allowance, FloodError
from gateway.server.frames import Frames, head_of, let_go
from gateway.server.parting import Parting
from gateway.server.pings import Pings
from gateway.server.sending import Sending
from gateway.server.stream import Head, HttpStream

LAST_DATA_SECONDS = 1.0
LAST_DATA_AT_THE_END_SECONDS = 0.1
"""How long what we have said may take to leave before the connection ends; when the plane does too."""

CONNECTION_WINDOW_BYTES = 1 << 20
"""Request body bytes of all streams together that may be on their way untaken."""

_AT_ONCE_BYTES = 4096
"""Input that is handled before others get their turn: four hundred of the smallest frames."""

_Codes = h2.errors.ErrorCodes


class Http2(H2Protocol):
    """One HTTP/2 connection.

    ``abort`` resets it, ``fault`` is told of an application's exception, ``gone`` says whether
    the client has hung up. (Reading never waits here, so it sees that for itself.)
    """

    def __init__(
        self,
        *context: Any,
        abort: Callable[[], None],
        fault: Callable[[BaseException], None],
        gone: Callable[[], bool],
        out: object,
    ) -> None:
        super().__init__(*context)
        let_go(self.connection)
        self.connection: Frames = Frames(
            most_streams=self.config.h2_max_concurrent_streams,
            most_head_bytes=self.config.h2_max_header_list_size,
        )
        self._abort_connection = abort
        self._fault = fault
        self._allowance = Allowance()
        self._ending = False
        to_socket: Any = lambda data: self.send(RawData(data))  # noqa: E731 - it goes there as it is
        self._sending = Sending(self.connection, self._allowance, to_socket, self._reads_no_answers)
        self.pings = Pings(self.connection, self._sending.wake)
        self._parting = Parting(self.connection, self.context, self.pings)

    async def initiate(self, headers: Any = None, settings: Any = None) -> None:
        """Say hello and start writing."""
        self.connection.initiate_connection()
        self.connection.increment_flow_control_window(CONNECTION_WINDOW_BYTES - 65535)
        self._sending.wake()
        self.task_group.spawn(self._sending.run)

    async def handle(self, event: Event) -> None:
        """Take what the connection has read, or that it is closed."""
        if isinstance(event, Closed):
            self.closed = True
            for stream_id in list(self.streams):
                await self._close_stream(stream_id)
            self._sending.end()
            let_go(self.connection)
        elif isinstance(event, RawData):
            for at in range(0, len(event.data), _AT_ONCE_BYTES):
                if at:
                    await trio.lowlevel.checkpoint()
                if self.closed or self._ending:
                    return
                await self._received(event.data[at : at + _AT_ONCE_BYTES])

    def full(self) -> bool:
        """Return False: what is taken in is bounded by the windows."""
        return False

    def wake(self) -> None:
        """Nothing waits while reading."""

    async def _received(self, data: bytes) -> None:
        try:
            events = self.connection.receive_data(data)
        except h2.exceptions.ProtocolError:
            await self._close_after_flush()
            return
        for event in events:
            if self.closed:
                return
            await self._handle_event(event)
        cost, self.connection.cost = self.connection.cost, 0.0
        self._allowance.spend(cost, trio.current_time())
        if self._allowance.overdrawn:
            await self._enough("too many frames that only cost")
        else:
            self._sending.wake()

    async def _handle_event(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.DataReceived):
            await self._data_received(event)
        elif isinstance(event, h2.events.RequestReceived):
            await self._request_received(event)
        elif isinstance(event, h2.events.StreamEnded):
            self._parting.is_whole(event.stream_id or 0)
            if stream := self.streams.get(event.stream_id or 0):
                await stream.handle(EndBody(stream_id=stream.stream_id))
        elif isinstance(event, h2.events.StreamReset):
            if not event.remote_reset:
                self.connection.cost += 1  # The client made us do it.
            await self._close_stream(event.stream_id or 0)
        elif isinstance(event, h2.events.WindowUpdated | h2.events.RemoteSettingsChanged):
            self._sending.go_on(getattr(event, "stream_id", None) or 0)
        elif isinstance(event, h2.events.PingAckReceived):
            self.connection.cost -= self.pings.answer()
        elif isinstance(event, h2.events.ConnectionTerminated):
            await self._close_after_flush()

    async def _enough(self, what: str) -> None:
        """End the connection of a client that floods it."""
        self._fault(FloodError(what))
        with suppress(h2.exceptions.ProtocolError):
            self.connection.close_connection(_Codes.ENHANCE_YOUR_CALM)
        await self._close_after_flush()

    def _reads_no_answers(self) -> None:
        self._fault(FloodError("frames to be answered, without reading the answers"))
        self._abort_connection()

    async def _data_received(self, event: h2.events.DataReceived) -> None:
        stream = self.streams.get(event.stream_id or 0)
        data, length = event.data or b"", event.flow_controlled_length or 0
        if stream is None or stream.closed:
            self._acknowledge(event.stream_id or 0, length)
            return
        await stream.handle(Body(stream_id=stream.stream_id, data=data))
        if length > len(data):
            self._acknowledge(stream.stream_id, length - len(data))

    def _acknowledge(self, stream_id: int, length: int) -> None:
        """Give window back. A closed stream's bytes still count against the connection's."""
        with suppress(h2.exceptions.ProtocolError):
            self.connection.acknowledge_received_data(length, stream_id)

    async def _request_received(self, event: h2.events.RequestReceived) -> None:
        stream_id, many = event.stream_id or 0, len(self.streams) + len(self._parting)
        if self.connection.is_closed(stream_id):
            return  # It was reset in the same breath.
        if self.context.terminated.is_set() or many >= self.config.h2_max_concurrent_streams:
            self._refuse(stream_id, _Codes.REFUSED_STREAM)
        elif self._parting.keeps_back(stream_id, beside_others=bool(self.streams)):
            return
        elif head := head_of(list(event.headers or ())):
            await self.send(Updated(idle=False))
            self._begin(stream_id, head)
        else:
            self._refuse(stream_id, _Codes.PROTOCOL_ERROR)

    def _begin(self, stream_id: int, head: Head) -> None:
        def body_taken(size: int) -> None:
            self._acknowledge(stream_id, size)
            self._sending.wake()

        abort = partial(self._abort_stream, stream_id)
        stream = HttpStream(self, stream_id, abort=abort, body_taken=body_taken)
        stream.send_now = partial(self._send_now, stream_id)
        stream.settled = lambda: self._sending.settled(stream_id, lambda: self._lives(stream_id))
        self.streams[stream_id], self.connection.begun = stream, stream_id
        stream.start(head, self._fault)

    async def stream_send(self, event: Any) -> None:
        """Take what a stream's application sends."""
        try:
            if isinstance(event, Body):
                await self._sending.body(event.stream_id, event.data, lambda: self._lives(event.stream_id))
            elif isinstance(event, Response):
                status = [(b":status", b"%d" % event.status_code)]
                self.connection.send_headers(event.stream_id, status + event.headers)
            elif isinstance(event, EndBody):
                self.connection.end_stream(event.stream_id)
            elif isinstance(event, StreamClosed):
                await self._stream_closed(event.stream_id)
        except h2.exceptions.ProtocolError:
            return  # The stream or the connection was closed by the client meanwhile.
        self._sending.wake()

    def _send_now(self, stream_id: int, data: bytes) -> bytes | None:
        """Send a piece whole if the windows and what waits for the socket allow it at once."""
        with suppress(h2.exceptions.ProtocolError):  # Closed by the client meanwhile; who waits finds out.
            if self._lives(stream_id) and self._sending.body_now(stream_id, data, streams=len(self.streams)):
                return b""
        return None

    def _lives(self, stream_id: int) -> bool:
        stream = self.streams.get(stream_id)
        return stream is not None and not stream.closed and not self.closed

    async def _stream_closed(self, stream_id: int) -> None:
        """The application has returned: end the stream as its response ended."""
        stream = self.streams.get(stream_id)
        if isinstance(stream, HttpStream):
            self._allowance.earn(A_REQUEST)
            if not stream.finished:
                if self._lives(stream_id) and stream.state is not ASGIHTTPState.REQUEST:
                    await self.pings.all_is_read(LAST_DATA_SECONDS)
                self._reset(stream_id, _Codes.INTERNAL_ERROR)
            elif not stream.request_ended:
                self._reset(stream_id, _Codes.NO_ERROR)
        await self._close_stream(stream_id)

    async def _close_stream(self, stream_id: int) -> None:
        """Let go of a stream; its application is told unless it has finished."""
        stream = self.streams.pop(stream_id, None)
        if not isinstance(stream, HttpStream):
            self._parting.forget(stream_id)
            return
        # Nobody will take these bytes any more; kept back they would be missing from the connection's window.
        if held := stream.inbox.drop():
            self._acknowledge(stream_id, held)
        await stream.handle(StreamClosed(stream_id=stream_id))
        self._sending.go_on(stream_id)
        if not self.closed:
            await self.send(Updated(idle=self.idle))

    def open_streams(self) -> list[HttpStream]:
        """Return the streams of requests that aren't answered."""
        return [stream for stream in self.streams.values() if isinstance(stream, HttpStream)]

    def end_stalled(self, before: float) -> None:
        """End the streams whose windows have let nothing out since ``before``."""
        for stream_id, since in tuple(self._sending.blocked.items()):
            stream = self.streams.get(stream_id)
            if since <= before and isinstance(stream, HttpStream):
                stream.give_up()
                self._abort_stream(stream_id)

    def _abort_stream(self, stream_id: int) -> None:
        self._reset(stream_id, _Codes.CANCEL)
        if stream := self.streams.get(stream_id):
            stream.closed = True
            self.task_group.spawn(self._close_stream, stream_id)
        self._sending.wake()

    def _refuse(self, stream_id: int, code: h2.errors.ErrorCodes) -> None:
        self.connection.cost += 1
        self._reset(stream_id, code)

    def _reset(self, stream_id: int, code: h2.errors.ErrorCodes) -> None:
        with suppress(h2.exceptions.ProtocolError):  # It may be closed already.
            self.connection.reset_stream(stream_id, code)

    async def _close_after_flush(self) -> None:
        """End all streams, and close once what we have said, a GOAWAY for instance, has left."""
        self._ending = True
        for stream_id in list(self.streams):
            await self._close_stream(stream_id)
        over = self.context.terminated.is_set()
        if not await self._sending.flush(LAST_DATA_AT_THE_END_SECONDS if over else LAST_DATA_SECONDS):
            self._abort_connection()
        await self.send(Closed())

    def end(self) -> None:
        """Begin nothing new, say GOAWAY and close. Call it when no stream is open."""
        if self._parting.ends():
            self.task_group.spawn(self._close_gracefully)

    async def _close_gracefully(self) -> None:
        await self._parting.say_goodbye()
        await self._close_after_flush()

    def go_away(self) -> None:
        """Say GOAWAY, and go on with the streams that are open."""
        self._parting.go_away()
        self._sending.wake()
