"""One request on a connection, HTTP/1.1 or HTTP/2, between protocol and application."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from urllib.parse import unquote

import trio
from hypercorn.protocol.events import Body, EndBody, Event, Response, StreamClosed
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream
from hypercorn.typing import ConnectionState

from gateway.server.lane import Lane
from gateway.server.words import STREAM_KEY

DISCONNECT = {"type": "http.disconnect"}
_BODY_ENDS = {"type": "http.request", "body": b"", "more_body": False}


class Inbox:
    """Messages for the application. Taking is unbounded; whoever fills it minds ``held``.

    A body waits as one piece, however small the pieces were in which it came. ``taken`` is
    called with the number of body bytes that the application has taken.
    """

    def __init__(self, taken: Callable[[int], None]) -> None:
        self._taken = taken
        self._body = bytearray()
        self._messages: deque[dict[str, Any]] = deque()
        self._arrival = trio.lowlevel.ParkingLot()

    @property
    def held(self) -> int:
        """Body bytes not taken yet."""
        return len(self._body)

    def add(self, data: bytes) -> None:
        """Add a piece of the body."""
        self._body += data
        if self._arrival:
            self._arrival.unpark()

    def put(self, message: dict[str, Any]) -> None:
        """Add a message that comes after the body."""
        self._messages.append(message)
        if self._arrival:
            self._arrival.unpark()

    def drop(self) -> int:
        """Forget the body bytes not taken yet; return how many they were."""
        size = len(self._body)
        self._body.clear()
        return size

    async def get(self) -> dict[str, Any]:
        """Wait for the next message (ASGI's ``receive``)."""
        while (message := self.get_now()) is None:
            await self._arrival.park()
        return message

    def get_now(self) -> dict[str, Any] | None:
        """Return the next message if there is one."""
        if self._body:
            body, self._body = bytes(self._body), bytearray()
            self._taken(len(body))
            return {"type": "http.request", "body": body, "more_body": True}
        return self._messages.popleft() if self._messages else None


class Head(NamedTuple):
    """A request's head. ``version`` is ``1.0``, ``1.1`` or ``2``; method and target are ASCII."""

    version: str
    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]


class HttpStream(HTTPStream):
    """Hypercorn's stream, with an end of its own.

    A disconnect is told only to an application that has not finished: after the normal
    end there is nothing left to leave. An application that returns without having
    finished breaks its response off, whatever it had sent; Hypercorn would write a 500
    into the middle if it was cancelled in the act. Hypercorn's queue of ten messages, on
    which a connection's reader can block, is an :class:`Inbox`.

    The application finds this object in the ASGI scope (``STREAM_KEY``): ``abort`` cuts
    its client off, ``wants_body`` says that the body is wanted (and brings the client of
    an ``Expect: 100-continue`` to send it). It may set ``left`` and ``stalled``, which are
    called when the client has left or has stopped taking what there is; that comes also to
    an application that isn't receiving just now. ``send_now`` sends a piece of the body without
    waiting, if that can be done; ``lane``, where there is one, is a short way for such pieces;
    ``settled`` waits until the socket has taken what was sent.
    """

    def __init__(
        self,
        protocol: Any,
        stream_id: int,
        *,
        abort: Callable[[], None],
        body_taken: Callable[[int], None],
        wants_body: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            protocol.app,
            protocol.config,
            protocol.context,
            protocol.task_group,
            protocol.ssl,
            protocol.client,
            protocol.server,
            protocol.stream_send,
            stream_id,
        )
        self.abort = abort
        self.inbox = Inbox(body_taken)
        self.request_ended = False
        self.wants_body = wants_body
        self.stalled: Callable[[], None] = abort
        self.left: Callable[[], None] = _nothing
        self.send_now: Callable[[bytes], bytes | None] = _not_now
        self.settled: Callable[[], Awaitable[None]] = _at_once
        self.lane: Lane | None = None

    @property
    def finished(self) -> bool:
        """Whether the application has sent its response to the end."""
        return self.state is ASGIHTTPState.CLOSED

    def receive_now(self) -> dict[str, Any] | None:
        """Return the next message of the body, if there is one that needs no waiting.

        None once the client has left: its body may be gone or incomplete, and that it has left is for
        whoever waits for that.
        """
        return None if self.closed else self.inbox.get_now()

    def start(self, head: Head, fault: Callable[[BaseException], None]) -> None:
        """Start the application on a request. ``fault`` is told of an exception of it."""
        path, _, query = head.target.partition(b"?")
        self.scope: Any = {
            "type": "http",
            "http_version": head.version,
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "method": head.method.decode("ascii").upper(),
            "scheme": self.scheme,
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": head.headers,
            "client": self.client,
            "server": self.server,
            "state": ConnectionState({STREAM_KEY: self}),
            "extensions": {},
        }
        self.start_time = 0.0
        self.task_group.spawn(self._run, fault)

    async def handle(self, event: Event) -> None:
        """Take an event from the protocol."""
        if self.closed:
            return
        if isinstance(event, Body):
            self.inbox.add(event.data)
        elif isinstance(event, EndBody):
            self.request_ended = True
            self.inbox.put(_BODY_ENDS)
        elif isinstance(event, StreamClosed):
            self.closed = True
            if not self.finished:
                self.left()
                self.inbox.put(DISCONNECT)

    async def app_send(self, message: Any) -> None:
        """Take a message of the application's (ASGI's ``send``).

        A response's head goes its way without Hypercorn's check of its fields: HTTP/1.1 has its own
        (:mod:`gateway.server.heads`), and so has h2.
        """
        if (
            message is not None
            and message["type"] == "http.response.start"
            and self.state is ASGIHTTPState.REQUEST
        ):
            self.response, status = message, int(message["status"])
            await self.send(Response(self.stream_id, [*message.get("headers", ())], status))
            self.state = ASGIHTTPState.RESPONSE
        else:
            await super().app_send(message)

    def give_up(self) -> None:
        """The client has stalled. That it is gone once it has been cut off is no news."""
        self.closed = True
        self.stalled()

    async def _run(self, fault: Callable[[BaseException], None]) -> None:
        try:
            receive: Any = self.inbox.get
            await self.app(self.scope, receive, self.app_send, _no_threads, _no_threads)
        except Exception as error:  # noqa: BLE001 - the application's fault must not end the connection's others
            fault(error)
        finally:
            if not self.closed:
                with trio.CancelScope(shield=True):
                    await self.send(StreamClosed(stream_id=self.stream_id))
            self._let_go()

    def _let_go(self) -> None:
        """Forget who knows this stream too: what no cycle holds is freed now, not by the collector."""
        self.scope, self.send = {}, _dropped
        self.abort = self.left = self.stalled = self.wants_body = _nothing
        self.send_now, self.settled, self.lane = _not_now, _at_once, None


def _nothing() -> None:
    """Have nothing to do."""


def _not_now(_data: bytes) -> bytes | None:
    """Send nothing without waiting."""
    return None


async def _dropped(_event: Event) -> None:
    """Send nothing: the stream is over."""


async def _at_once() -> None:
    """Wait for nothing: on HTTP/1.1 what is sent is in the socket."""


def _no_threads(*_: Any) -> None:
    """Stand for Hypercorn's ways into threads, which WSGI applications would need."""
    raise NotImplementedError
