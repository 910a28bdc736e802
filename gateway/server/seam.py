"""Whether the installed Hypercorn and h11 are what our connection classes are written for.

The classes are built upon Hypercorn's protocols: without what they build upon nothing can be
served. The short way past h11 (:mod:`gateway.server.lane`) asks more, namely what these do with a
body: with versions it isn't known for, bodies take the ordinary ASGI way, and a line in the log says so.
"""

from __future__ import annotations

from importlib.metadata import version

import h11
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.tcp_server import TCPServer

KNOWN_HYPERCORN = ("0.18.",)
"""Versions whose inner workings are known."""

_BUILT_UPON: dict[type, tuple[str, ...]] = {
    TCPServer: ("protocol_send", "_read_data"),
    H11Protocol: (
        *("initiate", "handle", "stream_send", "_handle_events", "_check_protocol", "_create_stream"),
        *("_send_h11_event", "_send_error_response", "_maybe_recycle", "_close_stream"),
    ),
    H2Protocol: ("initiate", "handle", "stream_send", "_close_stream"),
    HTTPStream: ("handle", "app_send", "_send_closed"),
}
"""What our classes override or call."""


class UnknownHypercornError(Exception):
    """The installed Hypercorn isn't one that our connection classes can be built upon."""


def check_hypercorn() -> None:
    """Raise UnknownHypercornError if the installed Hypercorn lacks what our classes build upon."""
    missing = [
        f"{kind.__name__}.{name}"
        for kind, names in _BUILT_UPON.items()
        for name in names
        if not hasattr(kind, name)
    ]
    if missing:
        raise UnknownHypercornError(
            f"Hypercorn {version('hypercorn')} is installed, which has no {', '.join(missing)}; this gateway "
            f"is written for {_known()}. Install the versions in constraints.txt."
        )


def why_ordinary() -> str | None:
    """Return why HTTP/1.1 bodies have to take the ordinary ASGI way; None where the short one fits."""
    installed = version("hypercorn")
    if not installed.startswith(KNOWN_HYPERCORN):
        return f"Hypercorn {installed} is installed, and the short way is known to fit {_known()}"
    if not _h11_counts_no_chunks():
        return f"h11 {version('h11')} ends a body that it hasn't seen in another way than the short way needs"
    return None


def _known() -> str:
    return " or ".join(f"{each}*" for each in KNOWN_HYPERCORN)


def _h11_counts_no_chunks() -> bool:
    """Whether h11 writes a head before, and an end after, chunks that it hasn't seen."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    connection.next_event(), connection.next_event()  # The request, and its end.
    head = connection.send(h11.Response(status_code=200, headers=[])) or b""
    return b"chunked" in head and connection.send(h11.EndOfMessage()) == b"0\r\n\r\n"
