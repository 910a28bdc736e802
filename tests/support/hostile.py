"""Bytes that no well-meaning client sends, by what is wrong with them."""

from __future__ import annotations

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


HOSTILE = {
    "noise": b"\x00\xff\xfe\x01" * 300,
    "no version": b"GET /\r\n\r\n",
    "bad version": b"GET / HTTP/9.9\r\n\r\n",
    "non-ascii path": b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    "non-ascii method": b"G\xc3\x89T / HTTP/1.1\r\nHost: x\r\n\r\n",
    "nul in a header": b"GET / HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "endless head": b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 200_000,
    "negative length": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "huge length": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
    "bad chunk": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "connect": b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "h2c upgrade with broken settings": (
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAA\r\n\r\n"
    ),
    "websocket with trailing bytes": (
        b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n\x82\x05hello"
    ),
    "h2 noise": PREFACE + b"\xff" * 500,
    "h2 data on stream 0": PREFACE + SETTINGS + frame(0, 0, 0, b"x"),
    "h2 data on an idle stream": PREFACE + SETTINGS + frame(0, 0, 5, b"x"),
    "h2 broken headers": PREFACE + SETTINGS + frame(1, 5, 1, b"\xff\xff\xff\xff"),
    "h2 non-ascii path": PREFACE + SETTINGS + frame(1, 5, 1, b"\x82\x86\x04\x02/\xff\x41\x01x"),
    "h2 non-ascii method": PREFACE + SETTINGS + frame(1, 5, 1, b"\x02\x02G\xff\x86\x84\x41\x01x"),
    "h2 connect without a path": PREFACE + SETTINGS + frame(1, 5, 1, b"\x02\x07CONNECT\x41\x01x"),
    "h2 headers without a method": PREFACE + SETTINGS + frame(1, 5, 1, b"\x86\x84\x41\x01x"),
    "h2 goaway": PREFACE + SETTINGS + frame(7, 0, 0, b"\x00" * 8),
    "h2 window overflow": PREFACE + SETTINGS + frame(8, 0, 0, b"\x7f\xff\xff\xff"),
    "h2 priority on itself": PREFACE + SETTINGS + frame(2, 0, 3, b"\x00\x00\x00\x03\x10"),
}
