"""The client's side of HTTP/2, prior knowledge: many exchanges on one connection, leaving by RST_STREAM.

Windows are as wide as HTTP/2 allows and widened again long before they close, so that flow control never
paces what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import cast

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from bench.client import Exchange

now = time.monotonic
WIDEST = 2**31 - 1
DEFAULT_WINDOW = 65_535
WIDEN_EVERY = 1 << 26  # received bytes between two WINDOW_UPDATEs


class Http2(asyncio.Protocol):
    """One connection, shared by the exchanges of many clients."""

    transport: asyncio.Transport

    def __init__(self, host: str) -> None:
        self.host, self.usable = host, True
        config = h2.config.H2Configuration(header_encoding=None, validate_inbound_headers=False)
        self.h2 = h2.connection.H2Connection(config)
        self.exchanges: dict[int, Exchange] = {}
        self.owed = 0  # bytes received since the connection's window was last widened

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.h2.local_settings[h2.settings.SettingCodes.INITIAL_WINDOW_SIZE] = WIDEST
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(WIDEST - DEFAULT_WINDOW)
        self._flush()

    def _flush(self) -> None:
        if (data := self.h2.data_to_send()) and not self.transport.is_closing():
            self.transport.write(data)

    def send(self, exchange: Exchange) -> None:
        body, stream = exchange.body, self.h2.get_next_available_stream_id()
        self.exchanges[stream] = exchange
        fields = [
            (":method", exchange.method),
            (":scheme", "http"),
            (":path", exchange.path),
            (":authority", self.host),
        ]
        if body is not None:
            fields += [("content-type", "application/json"), ("content-length", str(len(body)))]
        self.h2.send_headers(stream, fields, end_stream=body is None)
        if body is not None:
            self.h2.send_data(stream, body, end_stream=True)
        exchange.sent = now()
        self._flush()

    def leave(self, exchange: Exchange, error: str | None = None) -> None:
        stream = next((number for number, one in self.exchanges.items() if one is exchange), None)
        if stream is None:
            return
        del self.exchanges[stream]
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self.h2.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        if error is None:
            exchange.left = now()
        self._flush()
        exchange.end(error)

    def close(self) -> None:
        """The last exchange to finish ends the connection."""
        if self.usable and not self.exchanges:
            self.usable = False
            self.h2.close_connection()
            self._flush()
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            self._take(event)
        if self.owed > WIDEN_EVERY:
            self.h2.increment_flow_control_window(self.owed)
            self.owed = 0
        self._flush()

    def _take(self, event: h2.events.Event) -> None:
        exchange = self.exchanges.get(getattr(event, "stream_id", None) or 0)
        if isinstance(event, h2.events.DataReceived):
            self.owed += event.flow_controlled_length or 0
            if exchange is not None and exchange.received(bytes(event.data or b"")):
                self.leave(exchange)
        elif exchange is None:
            return
        elif isinstance(event, h2.events.ResponseReceived):
            exchange.status = next(int(value) for name, value in event.headers or () if name == b":status")
        elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
            del self.exchanges[event.stream_id or 0]
            exchange.end("stream reset" if isinstance(event, h2.events.StreamReset) else None)

    def connection_lost(self, _error: Exception | None) -> None:
        self.usable = False
        for exchange in self.exchanges.values():
            exchange.end("connection lost")
        self.exchanges.clear()
