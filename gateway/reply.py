"""One response of an engine, parsed: no socket, no task.

The parser (llhttp) undoes the chunk framing and appends the pieces to a list in C, so that a
read with a hundred chunks costs no hundred steps of Python. It is strict where that protects:
conflicting lengths, bad chunking and oversized heads fail the response, and bytes behind a
response close its connection.
"""

from __future__ import annotations

from typing import Any

import httptools
import httpx

MOST_HEAD_BYTES = 64 * 1024


class Reply:
    """A response as far as it has come. Raises httpx.RemoteProtocolError, as httpx's transports do.

    ``parts`` are the body's pieces that nobody has taken yet. A ``failure`` behind the head is
    kept until what came well before it has been taken.
    """

    __slots__ = (
        "_head_bytes",
        "_objection",
        "_parser",
        "_until_eof",
        "begun",
        "complete",
        "failure",
        "head_complete",
        "headers",
        "parts",
        "reusable",
        "status",
    )

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self.status = 0
        self.head_complete = self.complete = self.reusable = False
        self.failure: httpx.RemoteProtocolError | None = None
        self.begun = False
        self._objection = ""
        self._until_eof = False
        self._head_bytes = 0
        self._parser: Any = httptools.HttpResponseParser(_Callbacks(self))

    def take(self) -> bytes:
        """Return the body's bytes that nobody has taken yet, all in one."""
        parts = self.parts
        if not parts:
            return b""
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        return data

    def let_go(self) -> None:
        """Forget the parser, which knows this reply too: no cycle is to be left to the collector."""
        self._parser = None

    def feed(self, data: bytes | memoryview) -> None:
        """Take what one read of the connection brought; nothing is its end."""
        if not data:
            self._end_of_file()
            return
        self.begun = True
        if not self.head_complete:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.fail("the engine switched protocols")
        except httptools.HttpParserError as error:
            if self.complete:
                self.reusable = False  # Something came behind the response; nobody asked for it.
            else:
                self.fail(self._objection or str(error))
        if not self.head_complete and self._head_bytes > MOST_HEAD_BYTES:
            self.fail(f"the response's head is larger than {MOST_HEAD_BYTES} bytes")

    def fail(self, what: str) -> None:
        """Fail, but not before what came well in the same read has been taken."""
        self.failure = httpx.RemoteProtocolError(what)
        if not self.head_complete:
            raise self.take_failure()

    def take_failure(self) -> httpx.RemoteProtocolError:
        """Return the failure and forget it: its traceback will lead back to here."""
        failure, self.failure = self.failure, None
        assert failure is not None
        return failure

    def _end_of_file(self) -> None:
        if self.head_complete and self._until_eof:
            self.complete = True
        elif self.begun:
            self.fail("the engine closed its connection before the response was complete")
        else:
            self.fail("the engine disconnected without a response")

    # Called by the parser.

    def message_begins(self) -> None:
        if self.complete:
            raise _StopParsingError

    def head_is_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers.clear()
            return
        fields = {name.lower(): value for name, value in self.headers}
        encoding = fields.get(b"transfer-encoding")
        if encoding is not None and encoding.strip().lower() != b"chunked":
            self._objection = "the response has a transfer encoding other than chunked"
            raise _StopParsingError
        self.head_complete = True
        framed = encoding is not None or b"content-length" in fields or self.status in (204, 304)
        self._until_eof = not framed
        self.reusable = framed and self._parser.should_keep_alive()

    def message_is_complete(self) -> None:
        if self.head_complete:
            self.complete = True


class _StopParsingError(Exception):
    """Stops the parser: at what comes behind a complete response, or at what we object to."""


class _Callbacks:
    """What the parser calls. Body pieces go to the list without a step of Python."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.on_body = reply.parts.append
        self.on_message_begin = reply.message_begins
        self.on_headers_complete = reply.head_is_complete
        self.on_message_complete = reply.message_is_complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._reply.head_complete:  # Trailers are dropped (RFC 9110, 6.5.1).
            # White space around a value isn't part of it (RFC 9112, 5.1); the parser leaves what is behind.
            self._reply.headers.append((name, value.rstrip(b" \t")))
