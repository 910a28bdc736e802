"""Setting single fields of a request's body, by splicing at their places: every other byte stays.

A field that is there gets another value where it stands; one that isn't comes in behind the
opening brace. Where the values stand is known from :func:`gateway.peek.peek`, which says how long
each is: what lies between them is only names and punctuation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_BEFORE_VALUE = re.compile(rb'[ \t\n\r]*[{,][ \t\n\r]*"(?:[^"\\]++|\\.)*+"[ \t\n\r]*:[ \t\n\r]*', re.DOTALL)


def set_fields(body: bytes, fields: Iterable[tuple[str, int]], values: Mapping[str, bytes]) -> bytes:
    """Return ``body``, a JSON object, with ``values`` (JSON, by name) at its top level.

    ``fields`` are the names and the lengths of the raw values of all its fields, in order.
    """
    if not values:
        return body
    pieces: list[bytes] = []
    missing = dict(values)
    copied, at = 0, body.index(b"{")
    empty = True
    for name, length in fields:
        found = _BEFORE_VALUE.match(body, at)
        assert found is not None, "a body that was split before"
        empty = False
        at = found.end() + length
        if name in missing:
            pieces += (body[copied : found.end()], missing.pop(name))
            copied = at
    pieces.append(body[copied:])
    whole = b"".join(pieces)
    if not missing:
        return whole
    start = whole.index(b"{") + 1
    added = b",".join(b'"%b":%b' % (name.encode("ascii"), value) for name, value in missing.items())
    return b"".join((whole[:start], added, b"" if empty else b",", whole[start:]))
