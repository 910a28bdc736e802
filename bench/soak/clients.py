"""The clients of the soak: one asyncio loop, HTTP/1.1 and HTTP/2, fast, slow and leaving readers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions

from bench.client import Exchange, Http1, json_body
from bench.soak.mix import Plan

STALL_SECONDS = 1.5
"""`stream.stall_seconds` of the soak's gateway."""

ANSWER_SECONDS = 60.0
HALF_OPEN_SECONDS = 0.05
SLOW_PIECE, SLOW_PAUSE = 40_000, 0.05
SMALL_BUFFER = 16 * 1024
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
STREAMS_PER_CONNECTION = 12

TOKEN = re.compile(rb'" ?tk(\d{6})')


class Visit(Exchange):
    """One request and what its client saw."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("POST", plan.path, json_body(plan.body))
        self.plan = plan
        self.tokens = self.bytes = 0
        self.in_order = True
        self.tail = self._rest = b""

    def received(self, data: bytes) -> bool:
        self.bytes += len(data)
        events, _, self._rest = (self._rest + data).rpartition(b"\n\n")
        self.tail = (self.tail + data)[-1500:]
        for number in TOKEN.findall(events):
            self.in_order = self.in_order and int(number) == self.tokens
            self.tokens += 1
        return self.plan.leaves == "events" and self.tokens >= self.plan.events

    @property
    def seen(self) -> str:
        """What became of it: `left`, `completed`, the code of the gateway's error, a status, or `cut`."""
        if self.left:
            return "left"
        if found := re.search(rb'"code":"(\w+)"', self.tail):
            return found[1].decode()
        if self.error:
            return "cut" if self.status else self.error
        if self.status != 200:
            return f"status {self.status}"
        if not self.plan.stream:
            return "completed"
        whole = self.in_order and self.tokens == self.plan.tokens and b"data: [DONE]\n\n" in self.tail
        return "completed" if whole else "damaged"


class OverHttp1(Http1):
    """A connection of one client's own."""

    def send(self, exchange: Exchange) -> None:
        assert isinstance(exchange, Visit)
        self.exchange, self.buffer, self.state, self.remaining, self.keep = exchange, b"", "head", 0, True
        body, plan = exchange.body or b"", exchange.plan
        sent = body[: len(body) // 2] if plan.leaves == "sending" else body
        head = (
            f"POST {exchange.path} HTTP/1.1\r\nhost: {self.host}\r\nx-request-id: {plan.name}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        exchange.sent = asyncio.get_running_loop().time()
        self.transport.write(head.encode() + sent)

    def leave(self, exchange: Exchange, error: str | None = None) -> None:
        assert isinstance(exchange, Visit)
        if self.exchange is exchange and error is None and exchange.plan.how != "close":
            with contextlib.suppress(OSError), self.transport.get_extra_info("socket").dup() as raw:
                if exchange.plan.how == "reset":
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                else:
                    raw.shutdown(socket.SHUT_WR)
                    self._close_later(exchange)
                    return
        super().leave(exchange, error)

    def _close_later(self, visit: Visit) -> None:
        """The other half stays open for a while."""
        loop = asyncio.get_running_loop()
        self.exchange, self.usable = None, False
        visit.left = loop.time()
        visit.end()
        loop.call_later(HALF_OPEN_SECONDS, self.transport.abort)


class OverHttp2(asyncio.Protocol):
    """A connection that several clients share."""

    transport: asyncio.Transport

    def __init__(self, host: str) -> None:
        self.host, self.usable = host, True
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        self.visits: dict[int, Visit] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.h2.initiate_connection()
        self._flush()

    def _flush(self) -> None:
        if (data := self.h2.data_to_send()) and not self.transport.is_closing():
            self.transport.write(data)

    def send(self, visit: Visit) -> None:
        body, stream = visit.body or b"", self.h2.get_next_available_stream_id()
        self.visits[stream] = visit
        fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", visit.path),
            (":authority", self.host),
            ("x-request-id", visit.plan.name),
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
        ]
        self.h2.send_headers(stream, fields)
        unfinished = visit.plan.leaves == "sending"
        self.h2.send_data(stream, body[: len(body) // 2] if unfinished else body, end_stream=not unfinished)
        self._flush()

    def leave(self, visit: Visit, error: str | None = None) -> None:
        stream = next((number for number, one in self.visits.items() if one is visit), None)
        if stream is None:
            return
        now = asyncio.get_running_loop().time()
        if error is None and visit.plan.how == "connection":
            self.usable = False
            for one in self.visits.values():
                one.left = now
                one.end()
            self.visits.clear()
            self.transport.abort()
            return
        del self.visits[stream]
        if error is None:
            visit.left = now
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self.h2.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        self._flush()
        visit.end(error)

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            self._take(event)
        self._flush()

    def _take(self, event: h2.events.Event) -> None:
        stream = getattr(event, "stream_id", None) or 0
        visit = self.visits.get(stream)
        if isinstance(event, h2.events.DataReceived):
            length = event.flow_controlled_length or 0
            if length and visit is not None and visit.plan.pace != "fast":
                self._later(visit, stream, length)
            else:
                self._acknowledge(stream, length)
            if visit is not None and visit.received(event.data or b""):
                self.leave(visit)
        elif isinstance(event, h2.events.ConnectionTerminated):
            self.usable = False
        elif visit is None:
            return
        elif isinstance(event, h2.events.ResponseReceived):
            visit.status = int(dict(event.headers or [])[b":status"])
        elif isinstance(event, h2.events.StreamEnded):
            del self.visits[stream]
            visit.end()
        elif isinstance(event, h2.events.StreamReset):
            del self.visits[stream]
            visit.end("reset")

    def _later(self, visit: Visit, stream: int, length: int) -> None:
        """A slow reader gives the stream's window back later, one that never reads not at all."""
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self.h2.increment_flow_control_window(length)
        if visit.plan.pace == "slow":
            pause = SLOW_PAUSE * length / SLOW_PIECE
            asyncio.get_running_loop().call_later(pause, self._acknowledge_stream, stream, length)

    def _acknowledge_stream(self, stream: int, length: int) -> None:
        # The stream may be over, and long forgotten.
        with contextlib.suppress(h2.exceptions.ProtocolError, KeyError):
            self.h2.increment_flow_control_window(length, stream)
        self._flush()

    def _acknowledge(self, stream: int, length: int) -> None:
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self.h2.acknowledge_received_data(length, stream)

    def connection_lost(self, _error: Exception | None) -> None:
        self.usable = False
        for visit in self.visits.values():
            visit.end("closed")
        self.visits.clear()

    def close(self) -> None:
        self.usable = False
        self.transport.close()


@dataclass
class Round:
    """The requests of one round, so many at a time."""

    host: str
    port: int
    plans: Iterator[Plan]
    at_once: int
    visits: list[Visit] = field(default_factory=list)
    shared: dict[int, OverHttp2] = field(default_factory=dict)
    connecting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self) -> list[Visit]:
        await asyncio.gather(*(self._client(number) for number in range(self.at_once)))
        for connection in self.shared.values():
            connection.close()
        return self.visits

    async def _client(self, number: int) -> None:
        own: OverHttp1 | None = None
        for plan in self.plans:
            visit = Visit(plan)
            self.visits.append(visit)
            try:
                if plan.http2:
                    await self._visit(await self._share(number), visit)
                    continue
                if own is None or not own.usable or plan.pace != "fast":
                    if own is not None:
                        own.close()
                    own = await self._own(plan)
                await self._visit(own, visit)
            except OSError as error:
                visit.end(f"connect {type(error).__name__}")
        if own is not None:
            own.close()

    async def _visit(self, connection: OverHttp1 | OverHttp2, visit: Visit) -> None:
        plan, loop = visit.plan, asyncio.get_running_loop()
        connection.send(visit)
        leaves_by_time = plan.leaves and plan.leaves != "events"
        after, error = (plan.after, None) if leaves_by_time else (ANSWER_SECONDS, "timeout")
        visit.timer = loop.call_later(after, connection.leave, visit, error)
        if plan.pace != "fast" and isinstance(connection, OverHttp1):
            await _read_slowly(connection, visit)
        await visit.over

    async def _share(self, number: int) -> OverHttp2:
        place = number // STREAMS_PER_CONNECTION
        async with self.connecting:
            connection = self.shared.get(place)
            if connection is None or not connection.usable:
                raw = await self._connect()
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(lambda: OverHttp2(self.host), sock=raw)
                self.shared[place] = connection
        return connection

    async def _own(self, plan: Plan) -> OverHttp1:
        raw = await self._connect(small=plan.pace != "fast")
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: OverHttp1(self.host), sock=raw)
        return connection

    async def _connect(self, *, small: bool = False) -> socket.socket:
        raw = socket.socket()
        raw.setblocking(False)
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if small:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
            await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", self.port))
        except BaseException:
            raw.close()
            raise
        return raw


async def _read_slowly(connection: OverHttp1, visit: Visit) -> None:
    """Read a little now and then, or not at all for longer than the gateway's patience."""
    transport = connection.transport
    pause = STALL_SECONDS + 1.5 if visit.plan.pace == "never" else SLOW_PAUSE
    while not visit.over.done() and not transport.is_closing():
        transport.pause_reading()
        await asyncio.sleep(pause)
        if not transport.is_closing():
            transport.resume_reading()
        await asyncio.sleep(SLOW_PAUSE / 10)
