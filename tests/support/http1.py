"""A raw HTTP/1.1 client: nothing is sent that the test didn't write, and nothing malformed is forgiven.

The reader takes chunks apart by hand, so that a test sees framing as it was: an end without the last chunk
is `Truncated`, never a short body.
"""

from __future__ import annotations

import json
import math
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import trio

GONE = (trio.BrokenResourceError, trio.ClosedResourceError)


class Truncated(Exception):  # noqa: N818 — it is what the response is
    """The connection ended within a response; `got` is what came of its body."""

    def __init__(self, got: bytes) -> None:
        super().__init__(f"response cut after {len(got)} bytes")
        self.got = got


@dataclass(frozen=True)
class Head:
    """Status line and fields of a response, names lower case, repeated ones in order."""

    status: int
    fields: tuple[tuple[str, str], ...]
    version: str = "HTTP/1.1"

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.fields if key == name]

    def __getitem__(self, name: str) -> str:
        values = self.all(name)
        assert len(values) == 1, f"{name}: {values}"
        return values[0]

    def __contains__(self, name: str) -> bool:
        return bool(self.all(name))


@dataclass(frozen=True)
class Answer:
    """A whole response."""

    head: Head
    body: bytes

    @property
    def status(self) -> int:
        return self.head.status

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def request_bytes(
    path: str,
    payload: Any = None,
    *,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    version: str = "HTTP/1.1",
) -> bytes:
    """One request with a JSON body of known length."""
    body = b"" if payload is None else payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    fields = {"Host": "gateway.localhost"}
    if payload is not None:
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    fields |= headers or {}
    lines = [f"{method} {path} {version}", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class Http1:
    """One connection."""

    def __init__(self, stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]) -> None:
        self.stream = stream
        transport = stream if isinstance(stream, trio.SocketStream) else stream.transport_stream
        self.socket = transport.socket
        self.buffer = bytearray()
        self.left: float | None = 0  # of the body being read: bytes; inf until EOF; None: chunked
        self.got = bytearray()  # of the body being read

    # Out.

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def post(self, path: str, payload: Any, headers: Mapping[str, str] | None = None) -> None:
        await self.send(request_bytes(path, payload, headers=headers))

    async def half_close(self) -> None:
        assert isinstance(self.stream, trio.SocketStream)
        await self.stream.send_eof()

    async def close(self) -> None:
        """FIN (or RST, if something was left unread: as any client that goes)."""
        await trio.aclose_forcefully(self.stream)

    async def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await trio.aclose_forcefully(self.stream)

    # In.

    async def _more(self) -> bool:
        try:
            data = await self.stream.receive_some(65536)
        except GONE:
            return False
        self.buffer += data
        return bool(data)

    async def _line(self) -> bytes:
        while (at := self.buffer.find(b"\r\n")) < 0:
            if not await self._more():
                raise Truncated(bytes(self.got))
        line = bytes(self.buffer[:at])
        del self.buffer[: at + 2]
        return line

    async def head(self, *, bodyless: bool = False) -> Head:
        """The head of the next response."""
        self.got.clear()
        version, status, _ = (await self._line()).decode("latin-1").split(" ", 2)
        fields = []
        while line := await self._line():
            name, colon, value = line.decode("latin-1").partition(":")
            assert colon, line
            fields.append((name.lower(), value.strip()))
        head = Head(int(status), tuple(fields), version)
        assert not ("transfer-encoding" in head and "content-length" in head), "framed twice"
        if bodyless or head.status in (204, 304):
            self.left = 0
        elif "transfer-encoding" in head:
            assert head["transfer-encoding"] == "chunked"
            self.left = None
        else:
            self.left = int(head["content-length"]) if "content-length" in head else math.inf
        return head

    async def piece(self) -> bytes | None:
        """The next piece of the body (a whole chunk, if chunked); None at its clean end."""
        if self.left is None:
            return await self._chunk()
        if self.left == 0:
            return None
        if not self.buffer and not await self._more():
            if self.left == math.inf:
                self.left = 0
                return None
            raise Truncated(bytes(self.got))
        data = bytes(self.buffer[: int(min(self.left, len(self.buffer)))])
        del self.buffer[: len(data)]
        self.left -= len(data)
        self.got += data
        return data

    async def _chunk(self) -> bytes | None:
        size = int(await self._line(), 16)
        while len(self.buffer) < size + 2:
            if not await self._more():
                raise Truncated(bytes(self.got + self.buffer[:size]))
        data = bytes(self.buffer[:size])
        assert self.buffer[size : size + 2] == b"\r\n", "no line end behind a chunk"
        del self.buffer[: size + 2]
        self.got += data
        if size == 0:
            self.left = 0
            return None
        return data

    async def until(self, mark: bytes, count: int = 1) -> bytes:
        """The body so far, as soon as the mark has come so many times."""
        while self.got.count(mark) < count:
            assert await self.piece() is not None, f"ended without {mark!r}: {bytes(self.got)!r}"
        return bytes(self.got)

    async def rest(self) -> bytes:
        """The whole body, at its clean end."""
        while await self.piece() is not None:
            pass
        return bytes(self.got)

    async def answer(self) -> Answer:
        head = await self.head()
        return Answer(head, await self.rest())

    async def ask(
        self,
        path: str,
        payload: Any = None,
        *,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        method = method or ("GET" if payload is None else "POST")
        await self.send(request_bytes(path, payload, method=method, headers=headers))
        return await self.answer()

    async def eof(self) -> bytes:
        """Wait for the other side's close; what came before it and wasn't read."""
        while await self._more():
            pass
        return bytes(self.buffer)


async def connect(
    address: str,
    *,
    tls: ssl.SSLContext | None = None,
    alpn: list[str] | None = None,
    segment: int | None = None,
) -> trio.SocketStream | trio.SSLStream[trio.SocketStream]:
    """Connect to an address of `Service.listen`. `segment`: TCP_MAXSEG, for clients that read slowly."""
    if address.startswith("unix:"):
        return await trio.open_unix_socket(address.removeprefix("unix:"))
    parts = urlsplit(address)
    assert parts.hostname is not None
    assert parts.port is not None
    raw = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if segment is not None:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
    try:
        await raw.connect((parts.hostname, parts.port))
    except BaseException:
        raw.close()
        raise
    stream = trio.SocketStream(raw)
    if parts.scheme != "https":
        return stream
    assert tls is not None, "an https address needs the authority's context"
    tls.set_alpn_protocols(alpn or ["http/1.1"])
    secure = trio.SSLStream(stream, tls, server_hostname=parts.hostname, https_compatible=True)
    try:
        await secure.do_handshake()
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return secure


@asynccontextmanager
async def http1(
    address: str, *, tls: ssl.SSLContext | None = None, segment: int | None = None
) -> AsyncIterator[Http1]:
    client = Http1(await connect(address, tls=tls, segment=segment))
    try:
        yield client
    finally:
        await client.close()
