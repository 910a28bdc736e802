"""How engines say what a request took: the shapes of it, and reading them out of what was kept of an answer.

Sources: OpenAI API reference (``usage`` of chats, completions, embeddings, responses),
Anthropic Messages API (``message_start``, ``message_delta``), Ollama's docs/api.md
(``prompt_eval_count``, ``eval_count``), llama.cpp tools/server/README.md (``timings``,
``prompt_progress``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

KEPT_BYTES = 4096
"""Kept of a line, and of each end of a whole body."""

_MOST_PLACES = 8
"""Looked at in a text without its beginning, from its end on."""


@dataclass(frozen=True, slots=True)
class Said:
    """What an engine has said of a request's tokens; None is what it hasn't."""

    prompt: int | None = None
    completion: int | None = None


_Count = Annotated[int, Meta(ge=0, le=2**53)] | None


class _Counts(Struct):
    prompt_tokens: _Count = None
    completion_tokens: _Count = None
    input_tokens: _Count = None
    output_tokens: _Count = None
    total_tokens: _Count = None
    cache_read_input_tokens: _Count = None
    cache_creation_input_tokens: _Count = None

    def said(self) -> Said:
        prompt = self.prompt_tokens if self.prompt_tokens is not None else self.input_tokens
        completion = self.completion_tokens if self.completion_tokens is not None else self.output_tokens
        if prompt is None and completion is None:
            prompt = self.total_tokens
        elif prompt is not None:
            # What Anthropic's API counts apart. (OpenAI's has such counts within others, under other names.)
            prompt += (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        return Said(prompt, completion)


class _Within(Struct):
    usage: _Counts | None = None


class _Timings(Struct):
    prompt_n: _Count = None
    predicted_n: _Count = None
    cache_n: _Count = None


class _Progress(Struct):
    total: _Count = None


class _Event(Struct):
    """A line of a stream or a whole answer, whoever it is of."""

    type: str | None = None
    usage: _Counts | None = None
    response: _Within | str | None = None
    message: _Within | str | None = None
    timings: _Timings | None = None
    prompt_progress: _Progress | None = None
    prompt_eval_count: _Count = None
    eval_count: _Count = None

    def said(self) -> Said:
        if self.usage is not None:
            return self.usage.said()
        if isinstance(self.response, _Within):
            usage = self.response.usage
            return Said() if usage is None or self.type in _BEGINNINGS else usage.said()
        if isinstance(self.message, _Within) and self.message.usage is not None:
            # message_start: what it says of the completion is where that begins.
            return Said(self.message.usage.said().prompt)
        if self.timings is not None and self.timings.prompt_n is not None:
            return Said(self.timings.prompt_n + (self.timings.cache_n or 0), self.timings.predicted_n)
        if self.prompt_progress is not None:
            return Said(self.prompt_progress.total)
        return Said(self.prompt_eval_count, self.eval_count)


_BEGINNINGS = frozenset({"response.created", "response.queued", "response.in_progress"})
"""Events that hold a response in which nothing has been made yet."""

_EVENT = msgspec.json.Decoder(_Event)
_OBJECT = re.compile(rb"\s*:\s*\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")


def _decoded(*pieces: bytes) -> Said | None:
    try:
        return _EVENT.decode(b"".join(pieces)).said()
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def read_line(line: bytes, words: Sequence[bytes]) -> Said | None:
    """Read a line of a stream; of one that is longer than ``KEPT_BYTES`` its end is given.

    ``words`` are those by which counts are told. None: it isn't understood.
    """
    if len(line) < KEPT_BYTES:
        return _decoded(line.removeprefix(b"data:"))
    return _read_end(line, words, (b"{", b'{"response":{'))


def read_body(first: bytes, last: bytes, size: int, words: Sequence[bytes]) -> Said:
    """Read a whole body of ``size`` bytes of which the two ends are given."""
    if size <= 2 * KEPT_BYTES:
        overlap = max(0, len(first) + len(last) - size)
        return _decoded(first, last[overlap:]) or Said()
    said = _read_end(last, words, (b"{",))
    if said is None and (at := first.find(b'"usage"')) >= 0:
        # llama.cpp's embeddings have it before what is long.
        found = _OBJECT.match(first, at + len(b'"usage"'))
        said = _decoded(first[: found.end()], b"}") if found else None
    return said or Said()


def _read_end(text: bytes, words: Sequence[bytes], beginnings: Sequence[bytes]) -> Said | None:
    """Read what stands at the end of ``text``, a JSON object without its beginning.

    Only members of the object itself count, or of the one that a beginning opens: what clients
    had an engine repeat stands deeper, and makes no JSON with any of them.
    """
    places: list[int] = []
    for word in words:
        at = len(text)
        while len(places) < _MOST_PLACES and (at := text.rfind(word, 0, at)) >= 0:
            places.append(text.rfind(b'"', 0, at + 1))
    for at in sorted(places):
        for begin in beginnings:
            said = _decoded(begin, text[at:]) if at >= 0 else None
            if said is not None and said != Said():
                return said
    return None
