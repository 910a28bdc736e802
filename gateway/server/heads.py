"""Heads of HTTP/1.1: what of them h11 needs, and requests on which two readers could disagree.

h11 accepts Content-Length beside Transfer-Encoding, repeated lengths and folded lines (RFC 9112, 5.2
and 6.3).
"""

from __future__ import annotations

import re

import h11

from gateway.headers import Fields, field_lines
from gateway.server.clocks import MOST_FIELDS, MOST_HEAD_BYTES

_LENGTH = re.compile(rb"\ncontent-length[ \t]*:([^\n]*)")
_ENCODING = re.compile(rb"\ntransfer-encoding[ \t]*:")

_FRAMING = frozenset({b"connection", b"content-length", b"transfer-encoding"})
"""All that h11 reads of a response: where its body ends, and whether the connection goes on."""


def framing_apart(headers: Fields) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Part a response's fields: those by which it is framed, and the others as they are written.

    h11 would look at each of the others four times. Raises h11.LocalProtocolError as it would.
    """
    framing: list[tuple[bytes, bytes]] = []
    others: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if name.lower() in _FRAMING:
            framing.append((name, value.strip(b" \t")))
        else:
            others.append((name, value))
    try:
        return framing, field_lines(others)
    except ValueError as error:
        raise h11.LocalProtocolError(str(error)) from None


def refusal_of(head: bytes) -> int:
    """Return the status for a head that h11 would take although it is too large or dubious, or 0."""
    ends = [end for end in (head.find(b"\n\r\n"), head.find(b"\n\n")) if end >= 0]
    if not ends:
        return 0  # h11 bounds an incomplete head.
    head = head[: min(ends)]
    if len(head) > MOST_HEAD_BYTES or head.count(b"\n") > MOST_FIELDS:
        return 431
    # (Finding where a pattern may match costs a fraction of having it tried at each byte.)
    head = head.lower()
    at = head.find(b"\ncontent-length")
    lengths = _LENGTH.findall(head, at) if at >= 0 else []
    at = head.find(b"\ntransfer-encoding")
    encoded = at >= 0 and _ENCODING.search(head, at) is not None
    dubious = (
        head.find(b"\n ") >= 0
        or head.find(b"\n\t") >= 0
        or len(lengths) > 1
        or b"," in b"".join(lengths)
        or (encoded and (bool(lengths) or head.partition(b"\n")[0].rstrip().endswith(b"http/1.0")))
    )
    return 400 if dubious else 0
