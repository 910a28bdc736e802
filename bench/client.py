"""The client's side of the wire: one connection, told what to send and when to leave.

An `Exchange` is one request and what becomes of its answer; it never sees framing. A `ClientConnection`
carries exchanges over one protocol; HTTP/2's is in `http2.py`. A client may read slowly: see `Reading`.

Leaving closes the socket at once, in the middle of whatever arrives. The instant is taken just before the
close, so every latency measured from it includes the close itself.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import dataclass
from typing import Protocol, cast

now = time.monotonic


@dataclass(frozen=True)
class Reading:
    """How a client takes what arrives. 0: as fast as it comes, and the kernel's own buffer."""

    bytes_per_second: int = 0
    buffer_bytes: int = 0  # SO_RCVBUF


class Exchange:
    """One request and its answer. Subclasses override `received`; `True` from it means: leave now."""

    def __init__(self, method: str, path: str, body: bytes | None) -> None:
        self.method, self.path, self.body = method, path, body
        self.sent = self.ended = 0.0
        self.left = 0.0  # when the client closed; 0: it didn't
        self.status = 0
        self.error: str | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def received(self, _data: bytes) -> bool:
        return False

    def end(self, error: str | None = None) -> None:
        if self.over.done():
            return
        self.ended, self.error = now(), error
        if self.timer:
            self.timer.cancel()
        self.over.set_result(None)


class ClientConnection(Protocol):
    """What the load generator needs of a connection, whatever the protocol."""

    usable: bool

    def send(self, exchange: Exchange) -> None: ...

    def leave(self, exchange: Exchange, error: str | None = None) -> None:
        """Stop the exchange now. With an error (a timeout, say) it doesn't count as the client's leaving."""

    def close(self) -> None: ...


class _Http1(asyncio.BaseProtocol):
    """HTTP/1.1, one exchange at a time, kept alive between them."""

    transport: asyncio.Transport

    def __init__(self, host: str) -> None:
        self.host, self.usable = host, True
        self.exchange: Exchange | None = None
        self.buffer = b""
        self.state, self.remaining, self.keep = "head", 0, True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, exchange: Exchange) -> None:
        self.exchange, self.buffer, self.state, self.remaining, self.keep = exchange, b"", "head", 0, True
        head = f"{exchange.method} {exchange.path} HTTP/1.1\r\nhost: {self.host}\r\naccept: */*\r\n"
        if exchange.body is not None:
            head += f"content-type: application/json\r\ncontent-length: {len(exchange.body)}\r\n"
        exchange.sent = now()
        self.transport.write(head.encode() + b"\r\n" + (exchange.body or b""))

    def leave(self, exchange: Exchange, error: str | None = None) -> None:
        if self.exchange is exchange:
            self.exchange, self.usable = None, False
            if error is None:
                exchange.left = now()
            self.transport.abort()
            exchange.end(error)

    def close(self) -> None:
        if self.usable:
            self.usable = False
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            self.usable = False  # bytes that nobody asked for
            return
        data, self.buffer = self.buffer + data, b""
        if self.state == "head":
            rest = self._head(exchange, data)
            if rest is None:
                return
            data = rest
        if self.state == "chunked":
            self._chunks(exchange, data)
            return
        self.remaining -= len(data)
        if data and exchange.received(data):
            self.leave(exchange)
        elif self.state == "length" and self.remaining <= 0:
            self._finish()

    def _head(self, exchange: Exchange, data: bytes) -> bytes | None:
        """Read the answer's head and return what follows it; None: incomplete or bad."""
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self.buffer = data
            return None
        lines = data[:end].split(b"\r\n")
        try:
            exchange.status = int(lines[0].split(b" ")[1])
            pairs = (line.partition(b":") for line in lines[1:])
            headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
            self.remaining = int(headers.get(b"content-length", b"0"))
        except (IndexError, ValueError):
            self.leave(exchange, "malformed head")
            return None
        self.keep = headers.get(b"connection", b"").lower() != b"close"
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self.state, self.remaining = "chunked", 0
        elif b"content-length" in headers:
            self.state = "length"
        else:
            self.state, self.keep = "eof", False
        return data[end + 4 :]

    def _chunks(self, exchange: Exchange, data: bytes) -> None:
        """Undo chunked framing. `remaining` is what the current chunk still lacks, with its closing CRLF."""
        at, out, last = 0, [], False
        while at < len(data) and not last:
            if self.remaining:
                taken = min(self.remaining, len(data) - at)
                out.append(data[at : at + max(0, min(taken, self.remaining - 2))])
                at += taken
                self.remaining -= taken
                continue
            line = data.find(b"\r\n", at)
            if line < 0:
                self.buffer = data[at:]
                break
            try:
                size = int(data[at:line].split(b";")[0], 16)
            except ValueError:
                return self.leave(exchange, "malformed chunk")
            if size == 0:
                if len(data) < line + 4:
                    self.buffer = data[at:]
                    break
                last = True  # trailers are not supported: nobody here sends any
            else:
                self.remaining = size + 2
            at = line + 2
        if out and exchange.received(b"".join(out)):
            self.leave(exchange)
        elif last:
            self._finish()

    def _finish(self) -> None:
        exchange, self.exchange = self.exchange, None
        if not self.keep:
            self.close()
        if exchange:
            exchange.end()

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        if self.state == "eof" and error is None:
            exchange.end()
        else:
            how = "reset" if isinstance(error, ConnectionError) else "closed"
            exchange.end(f"{how} {'mid-body' if exchange.status else 'before the head'}")


class Http1(_Http1, asyncio.Protocol):
    """A client that reads as fast as it can."""


class SlowHttp1(_Http1, asyncio.BufferedProtocol):
    """A client that takes a quarter of a second's worth, and waits until the next is due."""

    def __init__(self, host: str, bytes_per_second: int) -> None:
        super().__init__(host)
        self.rate = bytes_per_second
        self.memory = bytearray(max(256, bytes_per_second // 4))

    def get_buffer(self, _sizehint: int) -> bytearray:
        return self.memory

    def buffer_updated(self, count: int) -> None:
        self.data_received(bytes(self.memory[:count]))
        if self.exchange and not self.transport.is_closing():
            self.transport.pause_reading()
            asyncio.get_running_loop().call_later(count / self.rate, self._go_on)

    def _go_on(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()


async def open_socket(host: str, port: int, receive_buffer: int = 0) -> socket.socket:
    """A connected non-blocking socket with TCP_NODELAY; the buffer's size must be set before it connects."""
    raw = socket.socket()
    raw.setblocking(False)
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(raw, (host, port))
    except BaseException:
        raw.close()
        raise
    return raw


def json_body(fields: dict[str, object]) -> bytes:
    return json.dumps(fields).encode()
