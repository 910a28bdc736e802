"""HTTP/1.1 (and 1.0) on one connection.

Hypercorn's protocol on h11, with the edges that a gateway needs:

* It goes on reading while it answers. Hypercorn stops at the first byte behind a
  request, a stray CRLF for instance, and from then on doesn't see the client leave.
  What is behind the request is taken in, bounded, and handled when its turn comes.
* Heads on which two readers could disagree are refused (RFC 9112, 5.2 and 6.3): h11
  accepts Content-Length beside Transfer-Encoding, repeated lengths and folded lines.
* An answer that comes before the request has arrived reaches its client: what is left
  of a known, small body is dropped and the connection goes on; else the connection
  lingers before it closes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import h11
import trio
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Response, StreamClosed
from hypercorn.protocol.h11 import STREAM_ID, H2ProtocolAssumedError, H11Protocol
from hypercorn.utils import suppress_body

from gateway.server.heads import framing_apart, refusal_of
from gateway.server.lane import Lane, Out
from gateway.server.locks import QuickLock
from gateway.server.stream import Head, HttpStream

MOST_BEHIND_BYTES = 64 * 1024
"""Bytes kept behind the request that is being answered. With more the connection ends after
its answer and the rest is dropped: left in the kernel it would hide the client's departure."""

MOST_BODY_AHEAD_BYTES = 64 * 1024
"""Body bytes that the application hasn't taken yet, beyond which reading waits."""

MOST_DROPPED_BYTES = 1 << 20
"""What is left of a body after its early answer is dropped up to this size."""

_AT_ONCE_EVENTS = 64
"""Events that are handled before others get their turn: chunks can be a byte each."""

_MIGHT_SWITCH: Any = h11.MIGHT_SWITCH_PROTOCOL  # type: ignore[attr-defined]
_LINE_ENDS = b"\r\n"


class Http1(H11Protocol):
    """One HTTP/1 connection.

    ``abort`` resets it, ``fault`` is told of an application's exception, ``gone`` says whether
    the client has hung up: then nothing waits any more.
    """

    def __init__(
        self,
        *context: Any,
        abort: Callable[[], None],
        fault: Callable[[BaseException], None],
        gone: Callable[[], bool],
        out: Out | None,
    ) -> None:
        super().__init__(*context)
        self.context: Any = self.context
        self._abort = abort
        self._fault = fault
        self._gone = gone
        self._out = out
        self._handling = QuickLock()
        self._resumed = trio.lowlevel.ParkingLot()
        self._body_left: int | None = None
        self._closed = False
        self._head = b""
        """A response's head that hasn't been written yet: it goes with what follows it, in one packet
        (as ASGI wants it: not before there is a body event)."""
        self._last = False
        """Nothing more is taken in: the connection ends after this request."""

    async def handle(self, event: Event) -> None:
        """Take what the connection has read, or that it is closed."""
        if not isinstance(event, RawData):
            self._closed = True
            self._resume()
            await super().handle(event)
            return
        data = event.data
        if self._had_all():
            return
        if self.connection.their_state is h11.IDLE and not self._kept():
            data = data.lstrip(_LINE_ENDS)
        if data:
            self.connection.receive_data(data)
            await self._handle_events()
        if self._answering() and len(self._kept()) > MOST_BEHIND_BYTES:
            self._last = True
        while self.full() and not self._gone():
            await self._resumed.park()

    def full(self) -> bool:
        """Whether no more is to be taken in for now."""
        return not self._closed and self._body_is_ahead()

    def wake(self) -> None:
        """Look again whether there is anything to wait for."""
        self._resume()

    def open_streams(self) -> list[HttpStream]:
        """Return the streams of requests that aren't answered."""
        return [self.stream] if isinstance(self.stream, HttpStream) else []

    def _answering(self) -> bool:
        """Whether the request is complete and its response isn't."""
        return self.connection.their_state in {h11.DONE, h11.MUST_CLOSE, _MIGHT_SWITCH}

    def _had_all(self) -> bool:
        """Whether no more is to come. What stands behind the last request does it no harm."""
        return self._last or self.connection.their_state is h11.MUST_CLOSE

    def _kept(self) -> bytes:
        """Return the bytes that h11 holds and hasn't handled."""
        return self.connection.trailing_data[0]

    def _body_is_ahead(self) -> bool:
        return isinstance(self.stream, HttpStream) and self.stream.inbox.held > MOST_BODY_AHEAD_BYTES

    def _resume(self, _taken: int = 0) -> None:
        if self._resumed:
            self._resumed.unpark_all()

    async def _handle_events(self) -> None:
        async with self._handling:
            handled = 0
            while not self._had_all() and await self._handle_one():
                handled += 1
                if handled % _AT_ONCE_EVENTS == 0:
                    await trio.lowlevel.checkpoint()

    async def _handle_one(self) -> bool:
        """Handle one event of the client's; False when there is none for now."""
        if self.connection.their_state is h11.IDLE:
            status = refusal_of(self._kept())
            if status:
                await self._refuse(status)
                return False
        try:
            event: Any = self.connection.next_event()
        except h11.RemoteProtocolError as error:
            error.__traceback__ = None  # It leads back to the error: a cycle.
            await self._refuse(error.error_status_hint)
            return False
        kind = type(event)  # Asking isinstance() for what it isn't takes h11's classes some steps of Python.
        if kind is h11.Request:
            await self._begin(event)
        elif kind is h11.Data:
            if self._body_left is not None:
                self._body_left -= len(event.data)
            if self.stream is not None:
                await self.stream.handle(Body(stream_id=STREAM_ID, data=bytes(event.data)))
        elif kind is h11.EndOfMessage and self.stream is not None:
            await self.stream.handle(EndBody(stream_id=STREAM_ID))
        elif kind is h11.EndOfMessage:
            # The answer came early and the rest of the body is dropped: on to the next request.
            await self._maybe_recycle()
        # Else it needs data, is paused behind a request, or has ended.
        return kind in {h11.Request, h11.Data}

    async def _begin(self, event: h11.Request) -> None:
        await self._check_protocol(event)
        await self.send(Updated(idle=False))
        if event.http_version in (b"1.1", b"1.0"):
            await self._create_stream(event)
        else:
            await self._refuse(505)

    async def _refuse(self, status: int) -> None:
        """Answer a faulty head or framing, and close."""
        self._last = True
        if self.connection.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            await self._send_error_response(status)
        await self.send(Closed())

    async def _check_protocol(self, event: h11.Request) -> None:
        """Find HTTP/2 with prior knowledge (RFC 9113, 3.3). ``Upgrade: h2c`` is ignored."""
        prior_knowledge = event.method == b"PRI" and event.target == b"*" and event.http_version == b"2.0"
        if prior_knowledge and self.keep_alive_requests == 0:
            raise H2ProtocolAssumedError(b"PRI * HTTP/2.0\r\n\r\n" + self._kept())

    async def stream_send(self, event: Any) -> None:
        """Take what the application sends. While we drain, each response is its connection's last."""
        if not isinstance(event, Response) or event.status_code < 200:
            return await super().stream_send(event)
        await self._send_head(event.status_code, event.headers)
        return None

    async def _send_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Have h11 frame a response, and write the other fields behind that."""
        framing, lines = framing_apart(headers)
        counted = any(name.lower() == b"content-length" for name, _ in framing)
        if self.context.ending or self._last or self._body_may_not_come():
            framing.append((b"Connection", b"close"))
        await self._send_h11_event(h11.Response(status_code=status, headers=framing))
        if self._head:
            self._head = self._head[:-2] + lines + b"\r\n"
            self._open_lane(status, counted=counted)

    def _open_lane(self, status: int, *, counted: bool) -> None:
        """Give the response's body its short way, if h11 need not count it."""
        stream, can = self.stream, self._out is not None and not counted
        if can and isinstance(stream, HttpStream) and not suppress_body(stream.scope["method"], status):
            chunked = stream.scope["http_version"] != "1.0"
            stream.lane = Lane(self, self._write_all, chunked=chunked)
            stream.send_now = stream.lane.send_now

    async def _write_all(self, data: bytes | memoryview) -> None:
        """Write data, and before it the head if that is still to go."""
        head, self._head = self._head, b""
        # Our connection takes any buffer.
        await self.send(RawData(head + data if head else data))  # type: ignore[arg-type]

    def write_now(self, data: bytes) -> int:
        """Write what the socket takes at once, the head first; return how much of ``data`` that was."""
        assert self._out is not None
        head = self._head
        sent = self._out.write_now(head + data if head else data)
        self._head = head[sent:]
        if sent >= len(head) and isinstance(self.stream, HttpStream) and self.stream.lane is not None:
            self.stream.lane.out = self._out  # What follows needs no step of ours any more.
        return max(0, sent - len(head))

    def _body_may_not_come(self) -> bool:
        """Whether the client was never told to send its body: what follows could be that or a request."""
        return bool(self.connection.they_are_waiting_for_100_continue)

    async def _create_stream(self, request: h11.Request) -> None:
        self.keep_alive_requests += 1
        headers = [(name.lower(), value) for name, value in request.headers.raw_items()]
        length = next((value for name, value in headers if name == b"content-length"), None)
        self._body_left = int(length) if length is not None else None
        stream = HttpStream(
            self, STREAM_ID, abort=self._abort, body_taken=self._resume, wants_body=self._wants_body
        )
        self.stream = stream
        stream.start(
            Head(request.http_version.decode(), request.method, request.target, headers), self._fault
        )
        if self._closed:
            # It stood behind another one, and its client left before its turn came.
            await stream.handle(StreamClosed(stream_id=STREAM_ID))

    def _wants_body(self) -> None:
        """Tell a client that waits for it (``Expect: 100-continue``) to go on."""
        if self.connection.they_are_waiting_for_100_continue:
            self.task_group.spawn(self._continue)

    async def _continue(self) -> None:
        if self.connection.they_are_waiting_for_100_continue:
            await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))

    async def _send_h11_event(self, event: Any) -> None:
        try:
            data = self.connection.send(event)
        except h11.LocalProtocolError:
            # The application and the connection's state have gone apart: the client's fault was
            # answered meanwhile, or a body's length isn't what was announced.
            await self.send(Closed())
            return
        if isinstance(event, h11.Response):
            self._head = data or b""
        elif data or self._head:
            await self._write_all(data or b"")

    async def _maybe_recycle(self) -> None:
        """Go on to the next request after a response, or close."""
        await self._close_stream()
        connection = self.connection
        small_rest = self._body_left is not None and self._body_left <= MOST_DROPPED_BYTES
        if self._last or self.context.terminated.is_set() or connection.our_state is not h11.DONE:
            await self.send(Closed())
        elif connection.their_state is h11.DONE:
            rest = self._kept()
            connection.start_next_cycle()
            if rest.startswith((b"\r", b"\n")):
                # Old clients end a body with a CRLF that isn't part of it (RFC 9112, 2.2); h11 refuses it.
                rest = rest.lstrip(_LINE_ENDS)
                most = self.config.h11_max_incomplete_size
                self.connection = h11.Connection(h11.SERVER, max_incomplete_event_size=most)
                if rest:
                    self.connection.receive_data(rest)
            self._body_left = None
            await self.send(Updated(idle=True))
            if rest:
                self.task_group.spawn(self._handle_events)
        elif connection.their_state is h11.SEND_BODY and small_rest:
            # The rest is dropped as it comes; the idle clock minds that it does come.
            await self.send(Updated(idle=True))
        else:
            await self.send(Closed())
        self._resume()
