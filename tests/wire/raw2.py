"""An HTTP/2 client that sends what the test wrote and takes notes of each frame that comes back.

It keeps no state but HPACK's, so no order of frames is wrong to it.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import hpack
import trio

from tests.support.http1 import GONE, connect
from tests.wire import frames as f


class Raw2:
    """One connection. `credit`: as it takes data it gives the windows back."""

    def __init__(self, stream: Any, *, credit: bool = True) -> None:
        self.stream, self.credit = stream, credit
        self.socket = getattr(stream, "transport_stream", stream).socket
        self.heads: dict[int, list[tuple[str, str]]] = {}
        self.bodies: dict[int, bytearray] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}  # the first code of each
        self.windows: dict[int, int] = {}  # what the server has given, by stream
        self.pongs = 0
        self.acks = 0
        self.goaway: int | None = None
        self.last: int | None = None  # the last stream that it names
        self.gone = False
        self.deaf = trio.Event()
        self._reading = trio.CancelScope()
        self._decoder = hpack.Decoder()
        self._sending = trio.Lock()
        self._lot = trio.lowlevel.ParkingLot()

    def status(self, stream: int) -> int:
        return int(dict(self.heads[stream])[":status"])

    def body(self, stream: int) -> bytes:
        return bytes(self.bodies.get(stream, b""))

    async def send(self, *frames: bytes) -> None:
        """A connection that has ended takes no more; what it said before is noted."""
        with suppress(*GONE):
            async with self._sending:
                await self.stream.send_all(b"".join(frames))

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            await self._lot.park()

    async def over(self, stream: int) -> None:
        """Until a stream or the connection has ended."""
        await self.until(lambda: self._is_over(stream))

    def _is_over(self, stream: int) -> bool:
        return stream in self.ended or stream in self.resets or self.gone

    async def upload(self, stream: int, body: bytes) -> None:
        """Send a body as its stream's window allows, until it is answered."""
        for at in range(0, len(body), 16_000):
            piece = body[at : at + 16_000]
            sent = at + len(piece)
            await self.until(
                lambda: sent - self.windows.get(stream, 0) <= 65_535 or self._is_over(stream)  # noqa: B023
            )
            if self._is_over(stream):
                return
            await self.send(f.data(stream, piece, end=sent == len(body)))

    async def answered(self) -> None:
        """Until a ping has come back: everything sent before has been looked at."""
        pongs = self.pongs
        await self.send(f.ping())
        await self.until(lambda: self.pongs > pongs or self.gone)

    async def stop_reading(self) -> None:
        self._reading.cancel()
        await self.deaf.wait()

    async def read(self) -> None:
        buffer = bytearray()
        with suppress(*GONE), self._reading:
            while more := await self.stream.receive_some(65536):
                buffer += more
                reply = b""
                while len(buffer) >= 9 and len(buffer) >= 9 + (size := int.from_bytes(buffer[:3], "big")):
                    reply += self._take(
                        buffer[3], buffer[4], int.from_bytes(buffer[5:9], "big"), bytes(buffer[9 : 9 + size])
                    )
                    del buffer[: 9 + size]
                self._lot.unpark_all()
                if reply:
                    await self.send(reply)
        self.gone = not self._reading.cancelled_caught
        self.deaf.set()
        self._lot.unpark_all()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        if kind == f.HEADERS:
            self.heads[stream] = [(str(n), str(v)) for n, v in self._decoder.decode(payload)]
        elif kind == f.DATA:
            self.bodies.setdefault(stream, bytearray()).extend(payload)
        elif kind == f.RST_STREAM:
            self.resets.setdefault(stream, int.from_bytes(payload, "big"))
        elif kind == f.GOAWAY:
            self.last, self.goaway = int.from_bytes(payload[:4], "big"), int.from_bytes(payload[4:8], "big")
        elif kind == f.WINDOW_UPDATE:
            self.windows[stream] = self.windows.get(stream, 0) + int.from_bytes(payload, "big")
        elif kind == f.PING and flags & f.ACK:
            self.pongs += 1
        elif kind == f.SETTINGS and flags & f.ACK:
            self.acks += 1
        if kind in (f.DATA, f.HEADERS) and flags & f.END_STREAM:
            self.ended.add(stream)
        return self._reply(kind, flags, stream, payload)

    def _reply(self, kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        if kind == f.SETTINGS and not flags & f.ACK:
            return f.frame(f.SETTINGS, f.ACK)
        if kind == f.PING and not flags & f.ACK:
            return f.frame(f.PING, f.ACK, 0, payload)
        if kind == f.DATA and payload and self.credit:
            return f.window(0, len(payload)) + f.window(stream, len(payload))
        return b""


@asynccontextmanager
async def raw2(
    url: str,
    *,
    tls: ssl.SSLContext | None = None,
    opening: bytes = f.PREFACE + f.settings(),
    credit: bool = True,
    segment: int | None = None,
) -> AsyncIterator[Raw2]:
    client = Raw2(await connect(url, tls=tls, alpn=["h2"], segment=segment), credit=credit)
    async with trio.open_nursery() as nursery:
        await client.send(opening)
        nursery.start_soon(client.read)
        try:
            yield client
        finally:
            await trio.aclose_forcefully(client.stream)
            nursery.cancel_scope.cancel()
