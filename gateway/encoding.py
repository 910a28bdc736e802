"""Writing an httpx request down as HTTP/1.1 (RFC 9112, 2 and 3)."""

from __future__ import annotations

import re

import httpx

_NAME = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+")
_TARGET = re.compile(rb"[\x21-\x7e\x80-\xff]+")
_NOT_IN_VALUES = re.compile(rb"[\x00\r\n]")
"""RFC 9110, 5.1 and 5.5. A client's field that came over HTTP/2 may hold what HTTP/1.1 can't say."""


LARGE_BYTES = 64 * 1024
"""A body of this size isn't copied behind its head."""


async def encoded(request: httpx.Request) -> list[bytes]:
    """Write the request down in as few pieces as that makes sense.

    What can't be said in HTTP/1.1 raises httpx.LocalProtocolError.
    """
    target = request.extensions.get("target") or request.url.raw_path
    if not _TARGET.fullmatch(target):
        raise httpx.LocalProtocolError("illegal request target")
    head = [request.method.encode("ascii"), b" ", target, b" HTTP/1.1\r\n"]
    for name, value in request.headers.raw:
        if not _NAME.fullmatch(name) or _NOT_IN_VALUES.search(value):
            raise httpx.LocalProtocolError("illegal header field")
        head += (name, b": ", value, b"\r\n")
    head.append(b"\r\n")
    assert isinstance(request.stream, httpx.AsyncByteStream)
    pieces = [piece async for piece in request.stream]
    if sum(map(len, pieces)) < LARGE_BYTES:
        return [b"".join(head + pieces)]
    return [b"".join(head), *pieces]
