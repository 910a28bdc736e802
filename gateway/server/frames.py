"""h2's connection, in which a malformed request is the fault of its own stream.

HTTP/2 has faults of a stream and faults of the connection (RFC 9113, 5.4). h2 ends the
connection for a malformed request (8.1.1), a body that isn't as long as it was announced,
and one stream too many (5.1.2); each of these is a stream's fault, and the other streams
have nothing to do with it. Frames are counted here too, because h2 answers or ignores
many of them without a word to the application.
"""

from __future__ import annotations

import re
import struct
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import h2.stream
from hypercorn.utils import filter_pseudo_headers
from hyperframe.frame import DataFrame, GoAwayFrame, HeadersFrame, PriorityFrame, WindowUpdateFrame

from gateway.server.clocks import MOST_FIELDS
from gateway.server.stream import Head

_STREAM_FAULTS = (h2.exceptions.ProtocolError, h2.exceptions.InvalidBodyLengthError)
"""Exactly these classes; what is derived from them concerns windows, frames, stream numbers."""

_LENGTH_BYTES = 3

_DATA_HEAD = struct.Struct(">HBBBI")
"""Length (24 bits), type (DATA is 0), flags, stream (RFC 9113, 4.1)."""

_CONNECTION_SENDS = h2.connection.ConnectionInputs.SEND_DATA
_STREAM_SENDS = h2.stream.StreamInputs.SEND_DATA

_VISIBLE = re.compile(rb"[\x21-\x7e]+")

SMALL_BYTES = 128
"""A DATA frame below this size brings little for what it costs."""


class _Values(list[int]):
    """The values of one setting: h2 uses a deque, which is six times the size, for each of its dozen."""

    def popleft(self) -> int:
        return self.pop(0)


class Frames(h2.connection.H2Connection):
    """Server's side of one HTTP/2 connection. ``cost`` grows with frames that only cost."""

    cost = 0.0

    begun = 0
    """The last stream that was begun, which is what each GOAWAY names (RFC 9113, 6.8): a client may try all
    after it again. h2 knows only the last that has come."""

    _told = False

    def __init__(self, *, most_streams: int, most_head_bytes: int) -> None:
        super().__init__(h2.config.H2Configuration(client_side=False, header_encoding=None))
        codes = h2.settings.SettingCodes
        # Hypercorn offers WebSocket over HTTP/2 (RFC 8441) besides; we have none.
        self.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                codes.MAX_CONCURRENT_STREAMS: most_streams,
                codes.MAX_HEADER_LIST_SIZE: most_head_bytes,
            },
        )
        settings: Any
        for settings in (self.local_settings, self.remote_settings):
            settings._settings = {code: _Values(values) for code, values in settings._settings.items()}

    @property
    def open_inbound_streams(self) -> int:
        """Streams that are open; never so many that h2 would end the connection for one more."""
        return min(super().open_inbound_streams, self.local_settings.max_concurrent_streams - 1)

    def is_closed(self, stream_id: int) -> bool:
        """Whether a stream is closed already, by a frame whose event is still to be handled."""
        stream = self.streams.get(stream_id)
        return stream is None or stream.closed

    def receive_data(self, data: Any) -> list[h2.events.Event]:
        """Take bytes; raise ProtocolError for a fault of the connection."""
        events = super().receive_data(data)
        # h2 waits for the whole of a frame before it finds it too long, and holds it meanwhile.
        unfinished: Any = self.incoming_buffer
        head = bytes(unfinished._data[:_LENGTH_BYTES])
        if len(head) == _LENGTH_BYTES and int.from_bytes(head, "big") > self.max_inbound_frame_size:
            self.close_connection(h2.errors.ErrorCodes.FRAME_SIZE_ERROR)
            raise h2.exceptions.FrameTooLargeError("announced too long")
        return events

    def data_head(self, stream_id: int, size: int) -> bytes:
        """Account for a DATA frame of ``size`` bytes and return its head; the data follows it.

        The same as h2's ``send_data``, which copies the data about and takes thrice the time.
        The caller minds the windows. Raises ProtocolError when the stream is closed.
        """
        stream: Any = self._get_stream_by_id(stream_id)
        self.state_machine.process_input(_CONNECTION_SENDS)
        stream.state_machine.process_input(_STREAM_SENDS)
        stream.outbound_flow_control_window -= size
        self.outbound_flow_control_window -= size
        return _DATA_HEAD.pack(size >> 8, size & 0xFF, 0, 0, stream_id)

    def say_goaway(self) -> None:
        """Say that nothing more is begun. With h2's own way of saying it nothing could follow."""
        self._told = True
        self._prepare_for_sending([GoAwayFrame(0, last_stream_id=self.begun)])

    def close_connection(self, error_code: int = 0, *_: Any, **__: Any) -> None:
        """Say GOAWAY; nothing may follow. Raises ProtocolError when it is closed already."""
        super().close_connection(error_code, last_stream_id=self.begun)

    def _terminate_connection(self, error_code: Any) -> None:
        self.close_connection(error_code)

    def _receive_frame(self, frame: Any) -> list[h2.events.Event]:
        self.cost += _cost(frame)
        if self._told and isinstance(frame, GoAwayFrame) and not frame.error_code:
            return []  # It answers ours, as Node's does, and waits for the streams that it has.
        if isinstance(frame, PriorityFrame):
            return []  # Deprecated (RFC 9113, 5.3), and we never looked at it.
        try:
            return super()._receive_frame(frame)
        except h2.exceptions.ProtocolError as error:
            if not self._is_a_streams_fault(frame, error):
                raise
        number = frame.stream_id
        if isinstance(frame, DataFrame):
            self.acknowledge_received_data(frame.flow_controlled_length, number)
        self.reset_stream(number, h2.errors.ErrorCodes.PROTOCOL_ERROR)
        return [
            h2.events.StreamReset(
                stream_id=number, error_code=h2.errors.ErrorCodes.PROTOCOL_ERROR, remote_reset=False
            )
        ]

    def _is_a_streams_fault(self, frame: Any, error: h2.exceptions.ProtocolError) -> bool:
        """Whether the connection is sound: the fields were decoded, and the stream can be reset."""
        if not isinstance(frame, HeadersFrame | DataFrame) or type(error) not in _STREAM_FAULTS:
            return False
        stream = self.streams.get(frame.stream_id)
        # When HPACK failed, its tables aren't the client's any more.
        decoded = error.__cause__ is None or type(error.__cause__) is ValueError
        return stream is not None and not stream.closed and decoded


def let_go(connection: h2.connection.H2Connection) -> None:
    """Forget what h2 keeps of a connection's own methods: cycles. Nothing passes over it any more."""
    connection._frame_dispatch_table = {}
    connection.state_machine._transitions = {}


def head_of(fields: list[tuple[bytes, bytes]]) -> Head | None:
    """Make a request's head of its fields; None if it can't become an ASGI scope."""
    named: dict[bytes, bytes] = dict(fields)
    method, path = named.get(b":method", b""), named.get(b":path", b"")
    if not (_VISIBLE.fullmatch(method) and _VISIBLE.fullmatch(path)) or len(fields) > MOST_FIELDS:
        return None
    return Head("2", method, path, filter_pseudo_headers(fields))


def _cost(frame: Any) -> float:
    if isinstance(frame, HeadersFrame):
        return 0.0  # Paid for by whoever resets or refuses the stream.
    if isinstance(frame, DataFrame):
        if "END_STREAM" in frame.flags or len(frame.data) >= SMALL_BYTES:
            return 0.0
        return 0.1 if frame.data else 1.0
    if isinstance(frame, WindowUpdateFrame):
        return 0.1
    return 1.0
