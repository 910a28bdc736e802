"""Reads HTTP/1.1 requests off a socket: as small as the gateway's requests are plain."""

from __future__ import annotations

from dataclasses import dataclass

import trio

Headers = list[tuple[str, str]]

MAX_RECV = 65536
GONE = (trio.BrokenResourceError, trio.ClosedResourceError)


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    headers: Headers
    body: bytes


class RequestReader:
    """`buffer` holds what has arrived and isn't taken yet."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.buffer = bytearray()

    async def receive(self) -> bytes:
        """What comes next, also kept in the buffer; empty at the end, however the connection ended."""
        try:
            data = bytes(await self.stream.receive_some(MAX_RECV))
        except GONE:
            return b""
        self.buffer += data
        return data

    async def request(self) -> Request | None:
        """The next request, read whole; None when the peer has left before its end."""
        head = await self._until(b"\r\n\r\n")
        if head is None:
            return None
        start, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = start.split(" ")
        pairs = [line.partition(":") for line in lines]
        headers = [(name, value.strip()) for name, _, value in pairs]
        fields = {name.lower(): value for name, value in headers}
        if "chunked" in fields.get("transfer-encoding", ""):
            body = await self._chunks()
        else:
            body = await self._take(int(fields.get("content-length", 0)))
        return None if body is None else Request(method, target, headers, body)

    async def _take(self, count: int) -> bytes | None:
        while len(self.buffer) < count:
            if not await self.receive():
                return None
        data = bytes(self.buffer[:count])
        del self.buffer[:count]
        return data

    async def _until(self, mark: bytes) -> bytes | None:
        while (at := self.buffer.find(mark)) < 0:
            if not await self.receive():
                return None
        data = bytes(self.buffer[:at])
        del self.buffer[: at + len(mark)]
        return data

    async def _chunks(self) -> bytes | None:
        body = b""
        while True:
            size = await self._until(b"\r\n")
            if size is None:
                return None
            piece = await self._take(int(size, 16) + 2)
            if piece is None:
                return None
            if len(piece) == 2:
                return body
            body += piece[:-2]
