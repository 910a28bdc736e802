"""An HTTP/2 client (prior knowledge, or ALPN over TLS): several streams, resets, a held window.

One task reads; whoever waits for something of a stream is woken by each event of the connection.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import trio

from tests.support.http1 import GONE, Answer, Head, Truncated, connect


def frame_size(data: bytearray) -> int:
    """Bytes of the first frame, its head included (more than there are, while it is incomplete)."""
    return 9 + int.from_bytes(data[:3], "big") if len(data) >= 9 else 9


class Stream:
    """One request of a connection."""

    def __init__(self, connection: Http2, number: int) -> None:
        self.connection, self.number = connection, number
        self.got = bytearray()
        self.fields: tuple[tuple[str, str], ...] | None = None
        self.ended = False
        self.reset_by_server: int | None = None  # the error code

    @property
    def over(self) -> bool:
        return self.ended or self.reset_by_server is not None or self.connection.gone

    async def head(self) -> Head:
        await self.connection.until(lambda: self.fields is not None or self.over)
        if self.fields is None:
            raise Truncated(b"")
        fields = dict(self.fields)
        return Head(int(fields[":status"]), tuple(f for f in self.fields if f[0] != ":status"), "HTTP/2")

    async def until(self, mark: bytes, count: int = 1) -> bytes:
        await self.connection.until(lambda: self.got.count(mark) >= count or self.over)
        assert self.got.count(mark) >= count, f"ended without {mark!r}: {bytes(self.got)!r}"
        return bytes(self.got)

    async def rest(self) -> bytes:
        await self.connection.until(lambda: self.over)
        if not self.ended:
            raise Truncated(bytes(self.got))
        return bytes(self.got)

    async def answer(self) -> Answer:
        head = await self.head()
        return Answer(head, await self.rest())

    async def reset(self, code: int = h2.errors.ErrorCodes.CANCEL) -> None:
        await self.connection.do(lambda: self.connection.h2.reset_stream(self.number, code))

    async def send_data(self, data: bytes, *, end: bool = False) -> None:
        """Within the window; a test that needs more waits for it."""
        await self.connection.do(lambda: self.connection.h2.send_data(self.number, data, end_stream=end))


class Http2:
    """One connection. `credit` off: received bytes give no window back, so the server runs dry."""

    def __init__(
        self,
        stream: trio.SocketStream | trio.SSLStream[trio.SocketStream],
        *,
        credit: bool = True,
        window: int | None = None,
    ) -> None:
        self.stream, self.credit = stream, credit
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        )
        if window is not None:
            self.h2.local_settings[h2.settings.SettingCodes.INITIAL_WINDOW_SIZE] = window
        self.streams: dict[int, Stream] = {}
        self.gone = False  # the connection has ended
        self.goaway: int | None = None
        self._lot = trio.lowlevel.ParkingLot()
        self._writing = trio.Lock()

    async def do(self, step: Callable[[], None]) -> None:
        """Change the connection's state and send what comes of it."""
        async with self._writing:
            step()
            if data := self.h2.data_to_send():
                await self.stream.send_all(data)

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            await self._lot.park()

    async def read(self) -> None:
        buffer = bytearray()
        try:
            while data := await self.stream.receive_some(65536):
                buffer += data
                while (size := frame_size(buffer)) <= len(buffer):
                    for event in self.h2.receive_data(bytes(buffer[:size])):
                        self._take(event)
                    del buffer[:size]
                await self.do(lambda: None)
                self._lot.unpark_all()
        except GONE:
            pass
        self.gone = True
        self._lot.unpark_all()

    def _take(self, event: h2.events.Event) -> None:
        stream = self.streams.get(getattr(event, "stream_id", 0) or 0)
        if isinstance(event, h2.events.ConnectionTerminated):
            self.goaway = int(event.error_code or 0)
            # h2 takes it for the end; but streams that have begun go on (RFC 9113, 6.8).
            self.h2.state_machine.state = h2.connection.ConnectionState.CLIENT_OPEN
        elif stream is None:
            return
        elif isinstance(event, h2.events.ResponseReceived):
            stream.fields = tuple((str(name), str(value)) for name, value in event.headers or [])
        elif isinstance(event, h2.events.DataReceived):
            stream.got += event.data or b""
            if self.credit:
                self.h2.acknowledge_received_data(event.flow_controlled_length or 0, stream.number)
        elif isinstance(event, h2.events.StreamEnded):
            stream.ended = True
        elif isinstance(event, h2.events.StreamReset):
            stream.reset_by_server = int(event.error_code or 0)

    async def request(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, *, end: bool = True
    ) -> Stream:
        stream = Stream(self, self.h2.get_next_available_stream_id())
        self.streams[stream.number] = stream
        fields = [
            (":method", method),
            (":path", path),
            (":scheme", "http"),
            (":authority", "gateway.localhost"),
            *(headers or {}).items(),
        ]
        await self.do(lambda: self.h2.send_headers(stream.number, fields, end_stream=end))
        return stream

    async def post(self, path: str, payload: Any, headers: Mapping[str, str] | None = None) -> Stream:
        body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        stream = await self.request("POST", path, fields, end=False)
        await stream.send_data(body, end=True)
        return stream

    async def ask(
        self, path: str, payload: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> Answer:
        stream = await (
            self.request("GET", path, headers) if payload is None else self.post(path, payload, headers)
        )
        return await stream.answer()

    async def close(self) -> None:
        """The whole connection, without a word."""
        await trio.aclose_forcefully(self.stream)


@asynccontextmanager
async def http2(
    address: str, *, tls: ssl.SSLContext | None = None, credit: bool = True, window: int | None = None
) -> AsyncIterator[Http2]:
    client = Http2(await connect(address, tls=tls, alpn=["h2"]), credit=credit, window=window)
    async with trio.open_nursery() as nursery:
        await client.do(client.h2.initiate_connection)
        nursery.start_soon(client.read)
        try:
            yield client
        finally:
            await client.close()
            nursery.cancel_scope.cancel()
