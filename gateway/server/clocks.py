"""Hypercorn's settings, each on purpose.

Its own ``from_mapping`` swallows misspelt names, so they are set as attributes here and
checked to exist.
"""

from __future__ import annotations

import sys

from hypercorn.config import Config

KEEP_ALIVE_SECONDS = 75.0
"""An idle connection is kept so long; nginx's default. The same clock bounds the arrival
of a request's head."""

TLS_HANDSHAKE_SECONDS = 10.0

MOST_HEAD_BYTES = 64 * 1024
"""All header fields of a request together; nginx takes 32 KiB, Node 16 KiB."""

MOST_FIELDS = 256
"""Header fields of a request; Apache takes 100, Node 2000. Each costs, however short it is."""

MOST_STREAMS = 256
"""Concurrent streams of one HTTP/2 connection (RFC 9113 asks for at least 100)."""


def hypercorn_config() -> Config:
    """Make the configuration for Hypercorn's protocols."""
    config = Config()
    for name, value in {
        # Times the client's silence, also while it waits for a long answer: would cut streams.
        "read_timeout": None,
        "keep_alive_timeout": KEEP_ALIVE_SECONDS,
        # On HTTP/2 reaching it ends the connection under its running streams.
        "keep_alive_max_requests": sys.maxsize,
        "ssl_handshake_timeout": TLS_HANDSHAKE_SECONDS,
        "h11_max_incomplete_size": MOST_HEAD_BYTES,
        "h2_max_header_list_size": MOST_HEAD_BYTES,
        "h2_max_concurrent_streams": MOST_STREAMS,
        # Messages that wait for the application. Ours always takes them.
        "max_app_queue_size": 10,
        # The engine's own Date and Server fields pass; our answers bring theirs.
        "include_date_header": False,
        "include_server_header": False,
        "accesslog": None,
        "errorlog": None,
    }.items():
        if not hasattr(config, name):
            raise AttributeError(f"Hypercorn has no setting {name!r} any more.")
        setattr(config, name, value)
    return config
