"""Writing a request down as HTTP/1.1 (RFC 9112, 2 and 3)."""

from __future__ import annotations

import re

import httpx

from gateway.headers import Fields, field_lines

_TARGET = re.compile(rb"[\x21-\x7e\x80-\xff]+")

LARGE_BYTES = 64 * 1024
"""A body of this size isn't copied behind its head."""


def encoded(method: bytes, target: bytes, headers: Fields, body: bytes) -> list[bytes | memoryview]:
    """Write a request down in as few pieces as that makes sense.

    What can't be said in HTTP/1.1 raises httpx.LocalProtocolError.
    """
    if not _TARGET.fullmatch(target):
        raise httpx.LocalProtocolError("illegal request target")
    try:
        lines = field_lines(headers)
    except ValueError:
        raise httpx.LocalProtocolError("illegal header field") from None
    head = b"%b %b HTTP/1.1\r\n%b\r\n" % (method, target, lines)
    return [head + body] if len(body) < LARGE_BYTES else [head, body]


async def encoded_request(request: httpx.Request) -> list[bytes | memoryview]:
    """Write down a request of httpx's. Raises httpx.LocalProtocolError."""
    assert isinstance(request.stream, httpx.AsyncByteStream)
    body = b"".join([piece async for piece in request.stream])
    target = request.extensions.get("target") or request.url.raw_path
    return encoded(request.method.encode("ascii"), target, request.headers.raw, body)
