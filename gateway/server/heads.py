"""Heads of HTTP/1.1 requests on which two readers could disagree (RFC 9112, 5.2 and 6.3).

h11 accepts Content-Length beside Transfer-Encoding, repeated lengths and folded lines.
"""

from __future__ import annotations

import re

from gateway.server.clocks import MOST_FIELDS, MOST_HEAD_BYTES

_FOLDED = re.compile(rb"\n[ \t]")
_LENGTH = re.compile(rb"\ncontent-length[ \t]*:([^\n]*)", re.IGNORECASE)
_ENCODING = re.compile(rb"\ntransfer-encoding[ \t]*:", re.IGNORECASE)


def refusal_of(head: bytes) -> int:
    """Return the status for a head that h11 would take although it is too large or dubious, or 0."""
    ends = [end for end in (head.find(b"\n\r\n"), head.find(b"\n\n")) if end >= 0]
    if not ends:
        return 0  # h11 bounds an incomplete head.
    head = head[: min(ends)]
    if len(head) > MOST_HEAD_BYTES or head.count(b"\n") > MOST_FIELDS:
        return 431
    lengths = _LENGTH.findall(head)
    encoded = _ENCODING.search(head) is not None
    dubious = (
        _FOLDED.search(head) is not None
        or len(lengths) > 1
        or any(b"," in length for length in lengths)
        or (encoded and (bool(lengths) or head.partition(b"\n")[0].rstrip().endswith(b"HTTP/1.0")))
    )
    return 400 if dubious else 0
