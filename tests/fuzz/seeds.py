"""What is well-formed, taken apart into units: lines and chunks of HTTP/1.1, frames of HTTP/2.

Request bodies tell the engine of the harness what to do: `max_tokens` events, none if the prompt is silent.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable

from tests.fuzz import frames
from tests.fuzz.frames import END_HEADERS, END_STREAM, HEADERS, PADDED, PREFACE, PRIORITISED, frame
from tests.support.routes import CHAT, MESSAGES, OLLAMA_CHAT, RESPONSES, Route

Units = list[bytes]
Maker = Callable[[random.Random], Units]

MAX_BODY_BYTES = 50_000
"""`server.max_body_bytes` of the harness: a few seeds are above it."""

MODEL = "model"
"""Whose engine answers as it is asked to; the hostile engine has a model of its own."""


def body(*, tokens: int = 5, stream: bool = True, text: str = "hello", **more: object) -> bytes:
    messages = [{"role": "user", "content": text}]
    fields = {"model": MODEL, "stream": stream, "max_tokens": tokens, "messages": messages, **more}
    return json.dumps(fields).encode()


# ------------------------------------------------------------------------------------ clients, HTTP/1.1


def _get(path: str, *headers: str, method: str = "GET", version: str = "HTTP/1.1") -> Units:
    lines = [f"{method} {path} {version}", "Host: gateway.test", *headers]
    return [*(f"{line}\r\n".encode("latin-1") for line in lines), b"\r\n"]


def _post(data: bytes, path: str = CHAT.path, *headers: str, version: str = "HTTP/1.1") -> Units:
    length = f"Content-Length: {len(data)}"
    kind = "Content-Type: application/json"
    return [*_get(path, kind, length, *headers, method="POST", version=version), data]


def _chunks(data: bytes, dice: random.Random, *, extension: bytes = b"", trailer: bytes = b"") -> Units:
    units: Units = []
    while data:
        size = min(len(data), dice.choice([1, 7, 40, 1000, 40_000]))
        units += [b"%x%b\r\n" % (size, extension), data[:size], b"\r\n"]
        data = data[size:]
    return [*units, b"0\r\n", *([trailer] if trailer else []), b"\r\n"]


def _chunked(data: bytes, dice: random.Random, **how: bytes) -> Units:
    head = _get(CHAT.path, "Content-Type: application/json", "Transfer-Encoding: chunked", method="POST")
    return head + _chunks(data, dice, **how)


def _websocket(dice: random.Random) -> Units:
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    return [*_get("/v1/realtime", *upgrade, "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="), b"\x82\x05hello"]


def _form(dice: random.Random) -> Units:
    part = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--\r\n'
    head = _get(
        "/v1/audio/transcriptions",
        "Content-Type: multipart/form-data; boundary=b",
        f"Content-Length: {len(part)}",
        method="POST",
    )
    return [*head, part]


HTTP1: dict[str, Maker] = {
    "models": lambda dice: _get("/v1/models"),
    "stream": lambda dice: _post(body()),
    "long stream": lambda dice: _post(body(tokens=100)),
    "whole answer": lambda dice: _post(body(stream=False)),
    "silent prefill": lambda dice: _post(body(text="silent")),
    "silent and whole": lambda dice: _post(body(text="silent", stream=False)),
    "three sequences": lambda dice: _post(body(n=3)),
    "too many sequences": lambda dice: _post(body(n=99)),
    "messages": lambda dice: _post(body(), MESSAGES.path, "x-api-key: k"),
    "ollama": lambda dice: _post(body(), OLLAMA_CHAT.path),
    "chunked": lambda dice: _chunked(body(), dice),
    "chunk extensions and a trailer": lambda dice: _chunked(
        body(), dice, extension=b';a="b"', trailer=b"X-Sum: 1\r\n"
    ),
    "continue": lambda dice: _post(body(), CHAT.path, "Expect: 100-continue"),
    "old version": lambda dice: _post(body(), version="HTTP/1.0"),
    "pipelined": lambda dice: [*_get("/v1/models"), *_post(body()), *_get("/api/tags")],
    "pipelined behind silence": lambda dice: [*_post(body(text="silent")), *_post(body()), b"\r\n"],
    "stray line": lambda dice: [*_post(body(tokens=50)), b"\r\n"],
    "large": lambda dice: _post(body(text="x" * 40_000)),
    "too large": lambda dice: [*_post(body(text="x" * (MAX_BODY_BYTES + 10))), *_get("/v1/models")],
    "too large, chunked": lambda dice: _chunked(body(text="x" * 2 * MAX_BODY_BYTES), dice),
    "announced too large": lambda dice: _get(CHAT.path, "Content-Length: 9999999", method="POST"),
    "h2c upgrade": lambda dice: _get(
        "/v1/models",
        "Connection: Upgrade, HTTP2-Settings",
        "Upgrade: h2c",
        "HTTP2-Settings: AAMAAABkAAQAAP__",
    ),
    "websocket": _websocket,
    "form": _form,
    "connect": lambda dice: _get("example.org:443", method="CONNECT"),
    "options": lambda dice: _get("*", method="OPTIONS"),
    "head": lambda dice: _get("/v1/models", method="HEAD"),
    "absolute": lambda dice: _get("http://gateway.test/v1/models?x=%00"),
    "cookies": lambda dice: _post(
        body(),
        CHAT.path,
        "Cookie: a=b",
        "Cookie: c=d",
        "Authorization: Bearer k",
        "Connection: close, Cookie",
    ),
}


# --------------------------------------------------------------------------------------- clients, HTTP/2


def _h2(*units: bytes, settings: bytes | None = None) -> Units:
    return [PREFACE, frames.settings() if settings is None else settings, *units]


def _several(dice: random.Random) -> Units:
    units: Units = []
    for stream in (1, 3, 5, 7):
        text = dice.choice(["hello", "silent"])
        units += frames.request(stream, "POST", CHAT.path, body(tokens=30, text=text))
    units += [frames.reset(3), frames.window(0, 1000), frame(frames.PING, 0, 0, b"pingping")]
    units += [
        frames.window(1, 5),
        *frames.request(9, "GET", "/v1/models"),
        frames.reset(1),
        frames.reset(5, 0),
    ]
    return _h2(*units)


def _split_head(dice: random.Random) -> Units:
    head = frames.request(1, "GET", "/v1/models", more=[("x", "y" * 300)])[0][9:]
    at, further = sorted(dice.sample(range(1, len(head)), 2))
    return _h2(
        frame(HEADERS, END_STREAM, 1, head[:at]),
        frame(frames.CONTINUATION, 0, 1, head[at:further]),
        frame(frames.CONTINUATION, END_HEADERS, 1, head[further:]),
    )


def _padded(dice: random.Random) -> Units:
    data = body()
    fields = [(":method", "POST"), (":scheme", "http"), (":path", CHAT.path), (":authority", "x")]
    priority = b"\x00\x00\x00\x00\x10"
    flags = END_HEADERS | PADDED | PRIORITISED
    return _h2(
        frame(HEADERS, flags, 1, b"\x05" + priority + frames.block(fields) + bytes(5)),
        frame(frames.DATA, PADDED, 1, b"\x40" + data[:20] + bytes(64)),
        frame(frames.DATA, PADDED | END_STREAM, 1, b"\x00" + data[20:]),
    )


def _trailers(dice: random.Random) -> Units:
    units = frames.request(1, "POST", CHAT.path, body())
    units[-1] = frame(frames.DATA, 0, 1, units[-1][9:])
    return _h2(*units, frame(HEADERS, END_HEADERS | END_STREAM, 1, frames.block([("x-sum", "1")])))


def _too_large(dice: random.Random) -> Units:
    head = frames.request(1, "POST", CHAT.path, body(text="x" * 3 * MAX_BODY_BYTES))[0]
    late = [frame(frames.DATA, 0, 1, b"x" * 9000)] * 20
    return _h2(head, *late, *frames.request(3, "POST", CHAT.path, body()))


def _drip(dice: random.Random) -> Units:
    small = frames.settings((4, dice.choice([0, 1, 10, 300])))
    more = [frames.window(1, dice.choice([1, 50, 1000])) for _ in range(20)]
    larger = frames.settings((4, 65535), (5, 20_000))
    return _h2(*frames.request(1, "POST", CHAT.path, body(tokens=20)), *more, larger, settings=small)


HTTP2: dict[str, Maker] = {
    "models": lambda dice: _h2(*frames.request(1, "GET", "/v1/models")),
    "stream": lambda dice: _h2(*frames.request(1, "POST", CHAT.path, body())),
    "stream and reset": lambda dice: _h2(
        *frames.request(1, "POST", CHAT.path, body(tokens=100)), frames.reset(1)
    ),
    "silent prefill": lambda dice: _h2(*frames.request(1, "POST", CHAT.path, body(text="silent"))),
    "whole answer": lambda dice: _h2(*frames.request(1, "POST", CHAT.path, body(stream=False))),
    "several streams": _several,
    "continuation": _split_head,
    "padded": _padded,
    "trailers": _trailers,
    "too large": _too_large,
    "small windows": _drip,
    "goaway": lambda dice: _h2(
        *frames.request(1, "POST", CHAT.path, body(tokens=20)),
        frame(frames.GOAWAY, 0, 0, bytes(8)),
        *frames.request(3, "GET", "/v1/models"),
    ),
    "priorities": lambda dice: _h2(
        frame(frames.PRIORITY, 0, 3, b"\x00\x00\x00\x05\x10"),
        *frames.request(3, "POST", CHAT.path, body()),
        frame(frames.PRIORITY, 0, 3, b"\x80\x00\x00\x01\xff"),
    ),
    "extended connect": lambda dice: _h2(
        *frames.request(1, "CONNECT", "/v1/realtime", more=[(":protocol", "websocket")])
    ),
    "resets in a row": lambda dice: _h2(
        *(
            unit
            for stream in range(1, 61, 2)
            for unit in (*frames.request(stream, "POST", CHAT.path, body())[:2], frames.reset(stream))
        )
    ),
    "pings": lambda dice: _h2(*[frame(frames.PING, 0, 0, b"pingping")] * 100),
}


# ------------------------------------------------------------------------------------------------ engines


def answer_body(route: Route, tokens: int) -> bytes:
    assert route.parts is not None
    return route.parts.all(tokens)


def _answer(status: str, *headers: str) -> Units:
    return [*(f"{line}\r\n".encode("latin-1") for line in [f"HTTP/1.1 {status}", *headers]), b"\r\n"]


def _events(route: Route, framing: str, dice: random.Random, **how: bytes) -> Units:
    data = answer_body(route, dice.choice([0, 1, 5, 40]))
    head = f"Content-Type: {route.media}"
    if framing == "chunked":
        return _answer("200 OK", head, "Transfer-Encoding: chunked") + _chunks(data, dice, **how)
    if framing == "length":
        return [*_answer("200 OK", head, f"Content-Length: {len(data)}"), data]
    return [*_answer("200 OK", head, "Connection: close"), data]


def _json(status: str, *headers: str, data: bytes = b"") -> Units:
    data = data or CHAT.whole_bytes()
    return [
        *_answer(status, "Content-Type: application/json", f"Content-Length: {len(data)}", *headers),
        data,
    ]


ENGINE: dict[str, Maker] = {
    "events": lambda dice: _events(CHAT, "chunked", dice),
    "events of a known length": lambda dice: _events(CHAT, "length", dice),
    "events until the close": lambda dice: _events(CHAT, "close", dice),
    "named events": lambda dice: _events(MESSAGES, "chunked", dice),
    "responses": lambda dice: _events(RESPONSES, "chunked", dice),
    "lines": lambda dice: _events(OLLAMA_CHAT, "chunked", dice),
    "trailer": lambda dice: _events(
        CHAT, "chunked", dice, extension=b";x", trailer=b"X: 1\r\nContent-Length: 5\r\n"
    ),
    "whole": lambda dice: _json("200 OK"),
    "whole, chunked": lambda dice: [
        *_answer("200 OK", "Content-Type: application/json", "Transfer-Encoding: chunked"),
        *_chunks(CHAT.whole_bytes(), dice),
    ],
    "packed": lambda dice: _json(
        "200 OK", "Content-Encoding: gzip", data=gzip.compress(CHAT.whole_bytes(), mtime=0)
    ),
    "error": lambda dice: _json("500 Internal Server Error", data=b'{"error":{"message":"boom"}}'),
    "busy": lambda dice: _json("429 Too Many Requests", "Retry-After: 3", data=b'{"error":"busy"}'),
    "unprocessable": lambda dice: _json("422 Unprocessable Entity", data=b'{"detail":[]}'),
    "early hints": lambda dice: [*_answer("103 Early Hints", "Link: </x>"), *_events(CHAT, "chunked", dice)],
    "continue first": lambda dice: [*_answer("100 Continue"), *_events(CHAT, "length", dice)],
    "switching": lambda dice: [
        *_answer("101 Switching Protocols", "Upgrade: x", "Connection: Upgrade"),
        b"raw",
    ],
    "no content": lambda dice: [*_answer("204 No Content"), b"but a body"],
    "not modified": lambda dice: _answer("304 Not Modified", "Content-Length: 50"),
    "found": lambda dice: _answer("302 Found", "Location: http://elsewhere/", "Content-Length: 0"),
    "empty events": lambda dice: [*_answer("200 OK", "Content-Type: text/event-stream", "Content-Length: 0")],
    "two answers": lambda dice: [*_json("200 OK"), *_json("200 OK", data=b'{"answer":"of another"}')],
    "framed twice": lambda dice: [
        *_answer("200 OK", "Content-Length: 5", "Transfer-Encoding: chunked"),
        *_chunks(b"hello", dice),
    ],
    "many headers": lambda dice: _json("200 OK", *(f"X-{i}: {i}" for i in range(150))),
    "odd headers": lambda dice: _json(
        "200 OK",
        "Set-Cookie: a",
        "Set-Cookie: b",
        "X-Latin: \xfc",
        "Connection: close, X-Latin",
        "X-Empty:",
        "Date: x",
    ),
    "another protocol": lambda dice: [b"220 smtp.example.org ESMTP\r\n", b"250 OK\r\n"],
    "HTTP/2": lambda dice: [frames.settings(), frame(frames.GOAWAY, 0, 0, bytes(8))],
}
