"""HTTP/2 frames put together by hand, right or wrong. Header blocks use no dynamic table, so that they
disturb nobody else's on the connection.
"""

from __future__ import annotations

from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM, END_HEADERS, PADDED, WITH_PRIORITY, ACK = 1, 4, 8, 32, 1
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, _, STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED = (
    range(8)
)
CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 8, 9, 11

Fields = Iterable[tuple[bytes, bytes]]


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def number(value: int, prefix: int) -> bytes:
    """An integer of HPACK (RFC 7541, 5.1) with nothing in front of its prefix."""
    most = (1 << prefix) - 1
    if value < most:
        return bytes([value])
    out, value = [most], value - most
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes([*out, value])


def text(value: bytes) -> bytes:
    return number(len(value), 7) + value


def block(fields: Fields) -> bytes:
    """Literals without indexing, without Huffman."""
    return b"".join(b"\x00" + text(name) + text(value) for name, value in fields)


def head(
    path: bytes = b"/v1/chat/completions", method: bytes = b"POST", more: Fields = ()
) -> list[tuple[bytes, bytes]]:
    return [
        (b":method", method),
        (b":path", path),
        (b":scheme", b"http"),
        (b":authority", b"gateway.test"),
        *more,
    ]


def headers(stream: int, fields: Fields, *, end: bool = True) -> bytes:
    return frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream, block(fields))


def data(stream: int, payload: bytes = b"", *, end: bool = False) -> bytes:
    return frame(DATA, END_STREAM if end else 0, stream, payload)


def post(stream: int, body: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    """A whole request; its body fits into one frame."""
    return headers(stream, head(path), end=False) + data(stream, body, end=True)


def reset(stream: int, code: int = CANCEL) -> bytes:
    return frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def settings(*pairs: tuple[int, int]) -> bytes:
    payload = b"".join(name.to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in pairs)
    return frame(SETTINGS, 0, 0, payload)


def window(stream: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


def ping(payload: bytes = b"12345678") -> bytes:
    return frame(PING, 0, 0, payload)


def goaway(last: int = 0, code: int = NO_ERROR) -> bytes:
    return frame(GOAWAY, 0, 0, last.to_bytes(4, "big") + code.to_bytes(4, "big"))
