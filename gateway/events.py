"""Knowing the end of a stream without parsing it.

An engine says "that was all" inside the body: ``data: [DONE]``, ``event:
message_stop``, ``"done":true``. A tail watches the bytes go by and keeps no more
than the piece of a line that a read cut in two; no JSON is decoded per event.

It answers three questions at any moment: has the terminal marker passed
(``done``), do we stand between two events (``at_boundary``: only there may an
error event or a heartbeat be put in), and how many events have passed.

Sources: WHATWG HTML 9.2.6 (event streams: lines end with LF, CRLF or CR, an empty
line ends an event), the OpenAI, Anthropic and Ollama API references (markers).
"""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

_LF, _CR = b"\n\r"

_LONGEST_MARKER = 64
"""Bytes kept of an unfinished line: more than any marker has, so that the beginning of a
longer line is none."""

_LONGEST_FINAL_LINE = 256 * 1024
"""Bytes of an unfinished NDJSON line kept to be decoded when it may be the last one
(Ollama's carries the whole context). Of a longer line only its beginning is looked at."""


_ERROR_EVENT = re.compile(
    rb"""^(?:event:[ ]?error[\r\n]"""
    rb"""|(?:data:[ ]?)?\{\s*"(?:error"\s*:\s*[{"]|(?:object|type)"\s*:\s*"error"))""",
    re.MULTILINE,
)
_DATA = re.compile(rb"^(?:data:[ ]?)?(\{[^\r\n]*\})", re.MULTILINE)


def error_in(data: bytes, *, at_first: bool = False) -> bytes | None:
    """Return the error (JSON) that ``data``, whole events of a stream, tells; None if it tells of none.

    OpenAI's and Ollama's ``{"error": …}``, vLLM's ``{"object": "error"}``, Anthropic's ``event: error``.
    ``at_first``: only if that is the first event of it.
    """
    found = _ERROR_EVENT.match(data) if at_first else _ERROR_EVENT.search(data)
    if found is None:
        return None
    said = _DATA.search(data, found.start())
    return said[1] if said else b"{}"


_ERRORS = (b'{"error":{', b'{"error":"', b'{"object":"error"', b'{"type":"error"')
_ERROR_BEGINS = (*_ERRORS, *(b"data:" + each for each in _ERRORS), b"event:error")
_LONGEST_ERROR_BEGIN = max(map(len, _ERROR_BEGINS))
_BLANKS = bytes.maketrans(b"", b""), b" \t"


def may_begin_error(data: bytes) -> bool:
    """Whether an unfinished first line of a stream may become an error, or is the beginning of one."""
    line = data[:_LONGEST_MARKER].translate(*_BLANKS)
    # A line that is longer than what it may be the beginning of begins with it, or else it isn't.
    return line.startswith(_ERROR_BEGINS) or (
        len(line) < _LONGEST_ERROR_BEGIN and any(begin.startswith(line) for begin in _ERROR_BEGINS)
    )


class Tail:
    """A body without events: only its framing tells the end."""

    __slots__ = ("at_boundary", "content_seen", "done", "events")

    def __init__(self) -> None:
        self.done = self.at_boundary = self.content_seen = False
        self.events = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        self.content_seen = True

    def complete(self) -> bool:
        """Say, once the body has ended cleanly, whether that was the end of the answer."""
        return True


class SseTail(Tail):
    """An event stream whose last event has one of the given ``markers``.

    A marker is a whole line, with its field name and one space, as in ``data: [DONE]``;
    the space may be missing in the stream. A ``data`` line is all there is of its event; an
    ``event`` line only names it, and what it names (a whole answer, perhaps) has passed
    with the empty line. ``content_seen`` turns true with the first line that isn't a comment.
    """

    __slots__ = ("_hints", "_line", "_marker", "_named", "_newlines", "_plain")

    def __init__(self, markers: tuple[bytes, ...]) -> None:
        super().__init__()
        self.at_boundary = True
        self._marker = _marker_pattern(markers)
        self._hints = _hints(markers)
        self._named = False
        self._line = b""
        self._newlines = b"\r\r"
        self._plain = False
        """Content has been seen, and we stand right behind the LF LF of an event that wasn't the last."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        if self._plain and _CR not in data and (end := data.find(b"\n")) > 0:
            # What engines mostly send: an event of one line, too long for a marker; or several events.
            if end == len(data) - 2 and end > _LONGEST_MARKER and data[-1] == _LF:
                self.events += 1
                return
            if self._are_whole(data):
                self.events += data.count(b"\n\n")
                return
        if self._count(data) and self._named:
            self.done = True
        window = self._line + data
        self._look(window)
        start = max(window.rfind(b"\n"), window.rfind(b"\r")) + 1
        self._line = window[start : start + _LONGEST_MARKER]
        self._plain = self.content_seen and self._newlines == b"\n\n" and not (self._named or self.done)

    def _are_whole(self, data: bytes) -> bool:
        """Whether ``data`` is whole events, none of them the last, with LF alone.

        (``find`` is the cheap way to look for bytes: CPython's ``in`` begins with an exception.)
        """
        if not data.endswith(b"\n\n") or data.find(b"\n\n\n") >= 0:
            return False
        for hint in self._hints:  # noqa: SIM110 - for each read, and a generator is a step of its own
            if data.find(hint) >= 0:
                return False
        return True

    def _look(self, window: bytes) -> None:
        if not self.content_seen and _FIELD.search(window):
            self.content_seen = True
        if self._named or self.done:
            return
        markers = [found for hint in self._hints if (found := self._marker_with(hint, window))]
        if markers:
            found = min(markers, key=re.Match.start)
            self._named = b"event:" in found.group()
            self.done = not self._named or _EVENT_END.search(window, found.end() - 1) is not None

    def _marker_with(self, hint: bytes, window: bytes) -> re.Match[bytes] | None:
        """Find the first line that is a marker and has ``hint`` in it: only lines that have are looked at.

        (The pattern alone would be tried at each byte, some ten times as slow.)
        """
        since, at = 0, window.find(hint)
        while at >= 0:
            line = max(window.rfind(b"\n", since, at), window.rfind(b"\r", since, at), since)
            if found := self._marker.match(window, line):
                return found
            since = window.find(b"\n", at)
            carriage_return = window.find(b"\r", at, since if since >= 0 else None)
            if carriage_return >= 0:
                since = carriage_return
            at = window.find(hint, since) if since >= 0 else -1
        return None

    def _count(self, data: bytes) -> int:
        """Count the events that end in ``data``; the line ends before it may be half of one's end."""
        window = self._newlines + data
        if _CR in window or window.find(b"\n\n\n") >= 0:
            ends = len(_EVENT_END.findall(window))
        else:
            ends = window.count(b"\n\n")
        ends -= self._newlines not in _NO_EVENT_END
        self.events += ends
        last = window[-4:]
        self._newlines = last[len(last.rstrip(b"\r\n")) :]
        # A CR after a line's end may be the first half of a CRLF: nothing is put in between.
        self.at_boundary = self._newlines not in _NO_EVENT_END and not last.endswith(b"\n\r")
        return ends

    def complete(self) -> bool:
        """Say, once the body has ended cleanly, whether the marker was there.

        The last event counts also without its last empty line.
        """
        return self.done or self._named or self._marker.search(self._line + b"\n") is not None


class NdjsonTail(Tail):
    """Lines of JSON whose last one has ``"done": true`` (Ollama)."""

    __slots__ = ("_line",)

    def __init__(self) -> None:
        super().__init__()
        self.at_boundary = True
        self._line = b""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        self.content_seen = True
        self.events += data.count(b"\n")
        self.at_boundary = data.endswith(b"\n")
        if len(self._line) > _LONGEST_FINAL_LINE and b"\n" not in data:
            return
        head, newline, rest = (self._line + data).rpartition(b"\n")
        if newline and not self.done and _DONE_TRUE.search(head):
            self.done = any(map(_says_done, head.split(b"\n")))
        self._line = rest[: _LONGEST_FINAL_LINE + 1]

    def complete(self) -> bool:
        """Say, once the body has ended cleanly, whether the last line said it was done."""
        return self.done or _says_done(self._line)


class _OllamaLine(msgspec.Struct):
    done: bool = False


_DONE_TRUE = re.compile(rb'"done"[ \t]*:[ \t]*true')
_JSON_TOKEN = re.compile(
    rb'(?P<done>"done"[ \t]*:[ \t]*true)|"(?:[^"\\]++|\\.)*+"|(?P<opens>[{\[])|(?P<closes>[}\]])', re.DOTALL
)
_FIELD = re.compile(rb"(?:^|[\r\n])[^:\r\n]")
_EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))[\r\n]+")
_NO_EVENT_END = frozenset({b"", b"\n", b"\r", b"\r\n"})


@lru_cache
def _hints(markers: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return tuple(marker.partition(b": ")[2] for marker in markers)


@lru_cache
def _marker_pattern(markers: tuple[bytes, ...]) -> re.Pattern[bytes]:
    lines = b"|".join(re.escape(marker).replace(rb":\ ", rb":\ ?") for marker in markers)
    return re.compile(rb"(?:^|[\r\n])(?:" + lines + rb")[ \t]{0,16}[\r\n]")


def _says_done(line: bytes) -> bool:
    if _DONE_TRUE.search(line) is None:
        return False
    if len(line) > _LONGEST_FINAL_LINE:
        return _top_level_done(line[:_LONGEST_FINAL_LINE])
    try:
        return msgspec.json.decode(line, type=_OllamaLine).done
    except (msgspec.MsgspecError, RecursionError):
        return False


def _top_level_done(beginning: bytes) -> bool:
    depth = 0
    for token in _JSON_TOKEN.finditer(beginning):
        if token["done"] and depth == 1:
            return True
        depth += bool(token["opens"]) - bool(token["closes"])
    return False
