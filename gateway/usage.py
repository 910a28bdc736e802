"""How many tokens a request took, read off its answer as it passes.

An engine that says it is believed: in a stream's last events or in each (vLLM's
``continuous_usage_stats``), in a whole answer's ``usage``. No JSON is decoded while bytes
pass: of a stream the first and the last line are kept that hold one of the words by which
counts are told, of a whole body its two ends, and they are decoded once, when the request
is over. An engine that doesn't say leaves the number of events, which is an estimate: an
event may hold several tokens or none. docs/usage.md tells it to operators.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from gateway.counts import KEPT_BYTES, Said, read_body, read_line
from gateway.events import NdjsonTail, SseTail, Tail

_TEXT_BYTES_PER_TOKEN = 4
"""What tokenizers make of English, about."""

_TEXT_FIELDS = frozenset(
    {
        "messages",
        "prompt",
        "input",
        "instructions",
        "system",
        "tools",
        "functions",
        "suffix",
        "query",
        "documents",
        "content",
    }
)
"""Fields of a request that an engine makes a prompt of."""

_IN_NUMBERS = {"/v1/completions": "prompt", "/v1/embeddings": "input"}
"""Fields that may be lists of token numbers, by route."""

_NOTHING_MADE = frozenset({"/v1/embeddings", "/v1/rerank", "/tokenize", "/api/embed"})
"""Routes whose answers hold nothing generated."""

_BEFORE_CONTENT = {"/v1/chat/completions": 1, "/v1/responses": 4, "/v1/messages": 2}
"""Events at the beginning of a stream that hold nothing generated."""

_LF = ord("\n")

_OLLAMA_WORDS = (b'eval_count"',)
_OPENAI_WORDS = (b'"usage"',)
_LLAMACPP_WORDS = (b'"usage"', b'"timings"', b'"prompt_progress"')


class Source(StrEnum):
    """Where a number of tokens comes from, the most certain first."""

    ENGINE = "engine"
    """The engine said it."""
    COUNTED = "counted"
    """The gateway knows it exactly: nothing went to an engine, the prompt came as token numbers, or the
    route makes nothing."""
    ESTIMATED = "estimated"
    """From the size of the prompt's text, or the number of events."""
    UNKNOWN = "unknown"
    """Nothing can be said; the number is None."""


_ORDER = tuple(Source)


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of one request, and where each number comes from."""

    prompt: int | None
    completion: int | None
    prompt_source: Source
    completion_source: Source

    @property
    def source(self) -> Source:
        """The less certain of the two."""
        return max(self.prompt_source, self.completion_source, key=_ORDER.index)

    def fields(self) -> dict[str, Any]:
        """Its part of the access record."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "usage_source": self.source,
        }


NOTHING = Usage(0, 0, Source.COUNTED, Source.COUNTED)
"""Of a request of which no engine was sent anything, or that its engine refused."""


class Meter:
    """Measures one request that goes up to an engine of ``kind``.

    ``stream``: whether its answer is to stream; ``fields`` are those of its ``body``. The answer is
    told by :meth:`answered`, its bytes as they come from the engine by :meth:`feed`. Memory: two
    lines, or two ends of a body, of ``KEPT_BYTES`` each, and as much of an unfinished line.
    """

    __slots__ = ("_first", "_last", "_line", "_path", "_prompt", "_size", "_status", "_tail", "_words")

    def __init__(
        self, path: str, kind: str, stream: bool, body: bytes, fields: Iterable[tuple[str, msgspec.Raw]]
    ) -> None:
        self._path = path
        self._prompt = prompt_size(path, body, fields)
        self._words = _words(path, kind)
        self._status = 0
        self._tail: Tail = NdjsonTail() if stream else Tail()
        self._size: int | None = None
        """Bytes of a whole body so far; None for a stream."""
        self._first = b""
        self._last = b""
        self._line = b""

    @property
    def refused(self) -> bool:
        """Whether the engine has answered with an error."""
        return self._status >= 400

    def answered(self, status: int, tail: Tail) -> None:
        """The head of the answer is there, and ``tail`` watches its body."""
        self._status, self._tail = status, tail
        self._size = None if isinstance(tail, SseTail | NdjsonTail) else 0
        self._first = self._last = self._line = b""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body. They are only looked through, once, for a word or two."""
        if self._size is not None:
            self._ends(data)
        elif self._line or not data or data[-1] != _LF:
            self._pieces(data)
        else:
            for word in self._words:
                if data.find(word) >= 0:  # Which is cheaper than ``in``: gateway/events.py.
                    self._keep(data)
                    return

    def _ends(self, data: bytes) -> None:
        assert self._size is not None
        if self._size < KEPT_BYTES:
            self._first += data[: KEPT_BYTES - self._size]
        self._size += len(data)
        self._last = data[-KEPT_BYTES:] if len(data) >= KEPT_BYTES else (self._last + data)[-KEPT_BYTES:]

    def _pieces(self, data: bytes) -> None:
        """Lines that reads have cut: those that are whole now are looked at, the beginning of one is kept."""
        end = data.rfind(b"\n") + 1
        if end:
            lines = self._line + data[:end]
            self._line = b""
            if any(word in lines for word in self._words):
                self._keep(lines)
        # Of a line that is too long its end is kept: counts stand behind what they count.
        self._line = (self._line + data[end:])[-KEPT_BYTES:]

    def _keep(self, lines: bytes) -> None:
        """Keep ``lines``, in one of which there is a word. A short piece is kept as it is."""
        if not self._first:
            self._first = self._line_at(lines, min(at for at in map(lines.find, self._words) if at >= 0))
        self._last = lines if len(lines) <= KEPT_BYTES else self._last_line(lines)

    def _last_line(self, lines: bytes) -> bytes:
        return self._line_at(lines, max(map(lines.rfind, self._words)))

    @staticmethod
    def _line_at(lines: bytes, at: int) -> bytes:
        end = lines.find(b"\n", at)
        end = len(lines) if end < 0 else end
        return lines[max(lines.rfind(b"\n", 0, at) + 1, end - KEPT_BYTES) : end]

    def usage(self) -> Usage:
        """Say what it took, as far as can be told now. Decodes what was kept."""
        if 400 <= self._status < 500:
            return NOTHING
        said = self._said()
        prompt, prompt_source = self._prompt
        if said.prompt is not None:
            prompt, prompt_source = said.prompt, Source.ENGINE
        if said.completion is not None:
            return Usage(prompt, said.completion, prompt_source, Source.ENGINE)
        if self._path in _NOTHING_MADE:
            made = Source.COUNTED if said.prompt is None else Source.ENGINE
            return Usage(prompt, 0, prompt_source, made)
        if isinstance(self._tail, SseTail | NdjsonTail):
            without = _BEFORE_CONTENT.get(self._path, 0) + self._tail.done
            return Usage(prompt, max(0, self._tail.events - without), prompt_source, Source.ESTIMATED)
        return Usage(prompt, None, prompt_source, Source.UNKNOWN)

    def _said(self) -> Said:
        if self._size is not None:
            return read_body(self._first, self._last, self._size, self._words)
        said = Said()
        for line in (self._first, self._last and self._last_line(self._last), self._line):
            if line and (more := read_line(line, self._words)) is not None:
                # Its first event may be the only one that tells the prompt, its last the completion.
                said = Said(
                    said.prompt if more.prompt is None else max(more.prompt, said.prompt or 0),
                    said.completion if more.completion is None else more.completion,
                )
        return said


def _words(path: str, kind: str) -> tuple[bytes, ...]:
    """Return the words by which counts are told."""
    if path.startswith("/api/"):
        return _OLLAMA_WORDS
    return _LLAMACPP_WORDS if kind == "llamacpp" else _OPENAI_WORDS


def usage_of(meter: Meter | None) -> Usage:
    """Say what a request took; without a meter no engine was sent it."""
    return NOTHING if meter is None else meter.usage()


def prompt_size(path: str, body: bytes, fields: Iterable[tuple[str, msgspec.Raw]]) -> tuple[int, Source]:
    """Say how many tokens a prompt has that no engine has counted yet, from a body and its ``fields``.

    Everything counts that an engine may make a prompt of: what it would ignore costs its client only.
    """
    size, exact = 0, 0
    for name, raw in fields:
        if name in _TEXT_FIELDS:
            view = memoryview(raw)
            numbers = _token_numbers(view) if _IN_NUMBERS.get(path) == name else None
            if numbers is None:
                size += len(view)
            else:
                exact += numbers
    size = max(0, size - _embedded(body))
    if exact and not size:
        return exact, Source.COUNTED
    return exact - (-size // _TEXT_BYTES_PER_TOKEN), Source.ESTIMATED


def _token_numbers(view: memoryview) -> int | None:
    """Count the tokens of a prompt that is given by their numbers, in one list or several."""
    if _NUMBERS.match(view[:64]) is None:
        return None
    text = bytes(view)
    return text.count(b",") + 1 if _NUMBERS.fullmatch(text) else None


def _embedded(text: bytes) -> int:
    """Measure the files in ``text``: base64 isn't what tokenizers see.

    Only where a field of its own holds one: within a text it is text.
    """
    if text.find(b";base64,") < 0:
        return 0
    return sum([found.end(1) - found.start(1) for found in _FILE.finditer(text)])


_FILE = re.compile(rb'"(?:url|image_url|file_data)"\s*:\s*"data:[^",]{0,200};base64,([A-Za-z0-9+/=_\\-]*+)"')


_NUMBERS = re.compile(rb"[\s\[]*[0-9][0-9\s,\[\]]*")
