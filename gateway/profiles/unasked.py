"""Asking for a stream's usage for the gateway, and keeping it from clients that didn't ask.

OpenAI's ``stream_options`` has the engine tell its usage in one more chunk, without choices, before
the stream's end. vLLM can put the usage so far into every chunk too (``continuous_usage_stats``),
which an answer that is cut short needs. What the client sees is, byte for byte, the stream that it
would have got without: the additional chunk goes, and so does the field in the others.

Sources: OpenAI API reference (``stream_options``), vLLM's protocol of chats and completions
(``exclude_unset``: a chunk without usage has no such field), and behaviour measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from gateway.profiles.base import AskUsage, Rewrite

_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})

_MOST_HELD_BYTES = 64 * 1024
"""Of an event that isn't there whole. A chunk of usage has some hundred bytes."""

_EVENT_END = re.compile(rb"\r?\n\r?\n|\r\r(?!\n)")
_ONLY_USAGE = re.compile(rb'"choices"[ \t]*:[ \t]*\[[ \t]*\]')
_USAGE = re.compile(rb'"usage"[ \t]*:[ \t]*\{[^{}\r\n]*(?:\{[^{}\r\n]*\}[^{}\r\n]*)*\}')


def ask_usage(rewrite: Rewrite, path: str, fields: Mapping[str, bytes], how: AskUsage) -> Rewrite:
    """Return ``rewrite`` with the usage asked for at the ``end`` of a stream, or in ``each`` chunk.

    The client's own options stay. Nothing is asked for where it asked itself, since it is to see exactly
    what it asked for; nor where its options aren't an object, which the engine is to say.
    """
    if how == "no" or path not in _PATHS:
        return rewrite
    try:
        given = msgspec.json.decode(fields.get("stream_options", b"null"), type=dict[str, Any] | None) or {}
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return rewrite
    if given.get("include_usage"):
        return rewrite
    options = {**given, "include_usage": True}
    if how == "each" or "continuous_usage_stats" in given:
        options["continuous_usage_stats"] = how == "each"
    asked = {**rewrite.fields, "stream_options": msgspec.json.encode(options)}
    return replace(rewrite, fields=asked, without_usage=True)


class WithoutUsage:
    """Takes an event stream in pieces, and gives it without usage.

    Events are looked at only where there is the word. Of one that isn't there whole nothing passes,
    unless it is longer than any that is meant.
    """

    def __init__(self) -> None:
        self._held = b""
        self._long = False
        """What is held is the end of an event whose beginning has passed."""

    def feed(self, data: bytes) -> bytes:
        """Take a piece; return the whole events in it, without usage."""
        if not self._held and data.endswith(b"\n\n"):
            return self._sifted(data) if data.find(b'"usage"') >= 0 else data
        window = self._held + data
        end = 0
        for found in _EVENT_END.finditer(window, max(0, len(self._held) - 3)):
            end = found.end()
        passing, self._held = window[:end], window[end:]
        if b'"usage"' in passing:
            passing = self._sifted(passing)
        elif end:
            self._long = False
        if len(self._held) > _MOST_HELD_BYTES:
            passing += self._held[:-3]
            self._held = self._held[-3:]
            self._long = True
        return passing

    def rest(self) -> bytes:
        """Return what is held back of an unfinished event, once no more of it comes."""
        held, self._held = self._held, b""
        return held

    def _sifted(self, events: bytes) -> bytes:
        passing = []
        for event in _split(events):
            if self._long or b'"usage"' not in event:
                self._long = False
                passing.append(event)
            elif _ONLY_USAGE.search(event) is None:
                passing.append(_without_field(event))
        return b"".join(passing)


def _split(events: bytes) -> Iterator[bytes]:
    if b"\r" not in events and events.endswith(b"\n\n"):
        for event in events[:-2].split(b"\n\n"):
            yield event + b"\n\n"
        return
    at = 0
    while at < len(events):
        found = _EVENT_END.search(events, at)
        end = found.end() if found else len(events)
        yield events[at:end]
        at = end


def _without_field(event: bytes) -> bytes:
    """Take the usage out of a chunk: the last object of that name, and the comma before it."""
    at = len(event)
    while (at := event.rfind(b'"usage"', 0, at)) >= 0:
        found = _USAGE.match(event, at)
        before = event[:at].rstrip(b" \t")
        if found is not None and before.endswith(b","):
            return before[:-1] + event[found.end() :]
    return event
