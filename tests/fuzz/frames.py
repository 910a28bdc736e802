"""HTTP/2 frames by hand (RFC 9113, 4 and 6), as a well-behaved library wouldn't write them."""

from __future__ import annotations

import random

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITISED = 0x20

Fields = list[tuple[str, str]]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def block(fields: Fields) -> bytes:
    """A header block of plain literals (RFC 7541, 6.2.2): a spoilt byte of it often still makes a header."""
    out = b""
    for name, value in fields:
        out += b"\x00" + _string(name.encode()) + _string(value.encode())
    return out


def _string(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes([size]) + text
    size -= 127
    out = b"\x7f"
    while size >= 128:
        out += bytes([size % 128 + 128])
        size //= 128
    return out + bytes([size]) + text


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(k.to_bytes(2, "big") + v.to_bytes(4, "big") for k, v in pairs))


def window(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, size.to_bytes(4, "big"))


def reset(stream: int, code: int = 8) -> bytes:
    return frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def request(
    stream: int, method: str, path: str, body: bytes = b"", more: Fields | None = None
) -> list[bytes]:
    """The frames of one request: HEADERS, and DATA in two pieces if there is a body."""
    fields = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "gateway.test")]
    fields += more or []
    if not body:
        return [frame(HEADERS, END_HEADERS | END_STREAM, stream, block(fields))]
    fields += [("content-type", "application/json"), ("content-length", str(len(body)))]
    half = len(body) // 2
    return [
        frame(HEADERS, END_HEADERS, stream, block(fields)),
        frame(DATA, 0, stream, body[:half]),
        frame(DATA, END_STREAM, stream, body[half:]),
    ]


def whole_frames(data: bytes) -> list[bytes]:
    """Take frames apart; raises ValueError at what is none. The last one may be cut."""
    frames = []
    while len(data) >= 9:
        size, kind = 9 + int.from_bytes(data[:3], "big"), data[3]
        if kind > CONTINUATION or size > 9 + 16384:
            raise ValueError(f"no frame of ours: {data[:16].hex()}")
        frames.append(data[:size])
        data = data[size:]
    return frames


def hostile(dice: random.Random) -> bytes:
    """A frame that has no place, or not this one."""
    stream = dice.choice([0, 1, 1, 1, 2, 3, 3, 5, 7, 99, 0x7FFFFFFF, 0x80000001])
    number = dice.choice([0, 1, 2, 8, 16384, 65535, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]).to_bytes(4, "big")
    noise = dice.randbytes(dice.choice([0, 1, 4, 5, 6, 7, 8, 9, 40, 300]))
    choices = [
        frame(DATA, dice.choice([0, END_STREAM, PADDED]), stream, noise),
        frame(DATA, PADDED, stream, b"\xff" + noise),
        frame(DATA, 0, stream, b"x" * dice.choice([16384, 16385])),
        frame(HEADERS, dice.randrange(256), stream, noise),
        frame(HEADERS, END_HEADERS | END_STREAM, stream, block(_odd_fields(dice))),
        frame(HEADERS, END_HEADERS, stream, block(_odd_fields(dice))),
        frame(HEADERS, 0, stream, block(_odd_fields(dice))),
        frame(CONTINUATION, dice.choice([0, END_HEADERS]), stream, noise),
        frame(PRIORITY, 0, stream, number + b"\x10"),
        frame(RST_STREAM, 0, stream, number),
        frame(SETTINGS, dice.choice([0, ACK]), dice.choice([0, 0, stream]), noise),
        settings((dice.choice([1, 2, 3, 4, 5, 6, 8, 99]), int.from_bytes(number, "big"))),
        frame(PUSH_PROMISE, END_HEADERS, stream, number + block(_odd_fields(dice))),
        frame(PING, dice.choice([0, ACK]), dice.choice([0, stream]), dice.choice([b"12345678", noise])),
        frame(GOAWAY, 0, dice.choice([0, stream]), number + number + noise),
        frame(WINDOW_UPDATE, 0, stream, number),
        frame(WINDOW_UPDATE, 0, 0, number),
        frame(dice.randrange(10, 256), dice.randrange(256), stream, noise),
    ]
    return dice.choice(choices) * dice.choice([1, 1, 1, 2, 10])


def _odd_fields(dice: random.Random) -> Fields:
    usual = [(":method", "POST"), (":scheme", "http"), (":path", "/v1/models"), (":authority", "x")]
    odd = [
        (":method", "CONNECT"),
        (":method", "PO\u00c4ST"),
        (":path", ""),
        (":path", "*"),
        (":path", "/v1/\u00fc"),
        (":path", "/%ff%00"),
        (":path", "http://elsewhere/v1/models"),
        (":protocol", "websocket"),
        (":status", "200"),
        (":unknown", "x"),
        ("Upper", "case"),
        ("connection", "upgrade"),
        ("upgrade", "websocket"),
        ("transfer-encoding", "chunked"),
        ("content-length", "5"),
        ("content-length", "-1"),
        ("content-length", "99999999999999999999"),
        ("te", "gzip"),
        ("host", "other"),
        ("expect", "100-continue"),
        ("", "no name"),
        ("new\nline", "x"),
        ("x", "new\r\nline: y"),
        ("x", "\x00"),
        ("x", "y" * dice.choice([300, 20_000])),
        ("x-request-id", "\u00fc"),
        ("content-type", "multipart/form-data"),
    ]
    fields = usual[:]
    for _ in range(dice.randrange(4)):
        action = dice.randrange(3)
        if action == 0 and fields:
            del fields[dice.randrange(len(fields))]
        elif action == 1 and fields:
            fields[dice.randrange(len(fields))] = dice.choice(odd)
        else:
            fields.insert(dice.randint(0, len(fields)), dice.choice(odd))
    return fields
