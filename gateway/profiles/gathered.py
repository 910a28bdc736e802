"""Adding a streamed answer of llama.cpp up to the one it would have given in one piece.

llama.cpp notices soon that its client has left only while it streams. So it is asked
to stream also for those who want a whole answer, and what it streams is added up here
to that answer, field by field the same. Texts are joined; numbers and whatever else
is only passed on stay the bytes they came as, so that none loses a digit.

Where the stream lacks what the whole answer has, ``can_gather`` says no, and the
request goes up as it came. Two cases no request tells beforehand; in both llama.cpp
holds something back, and ends without sending it. A completion cut within a
character lacks its last token, which the whole answer shows with U+FFFD. And a chat
that yields nothing, like one cut within its first ``<tool_call>`` or with an empty
``<think></think>`` only, is empty, where the whole answer falls back on the raw text.

Sources: llama.cpp tools/server/README.md and tools/server/server-task.cpp
(``server_task_result_cmpl_final`` and ``_partial``), and the engine itself
(tests/engines/test_gathered.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

EXTRA_FIELDS: Mapping[str, bytes] = {
    "stream": b"true",
    "stream_options": b'{"include_usage":true}',
    "return_progress": b"true",
}
"""Top-level fields set on the request, over the client's own, and their raw values. The usage is part of
a whole answer; the progress is something to write, hence to fail at, while a long prompt is read."""

MOST_BYTES = 4 * 1024 * 1024
"""Kept of one answer."""

_OVERHEAD = 512
"""Bytes that a choice or a tool call counts besides its text."""


class GatheredError(Exception):
    """The stream isn't one of llama.cpp's, is too long to keep, or has ended too early."""


class Gathered:
    """An answer in the making: ``feed`` it the body of a streamed answer to ``path``, take the ``result``."""

    def __init__(self, path: str) -> None:
        self.done = False
        """``data: [DONE]`` or an error has been seen: the result is there."""
        self.started = False
        """Something generated has been seen: neither progress nor the chunk that only names the role."""
        self._chat = path == CHAT
        self._line = bytearray()
        self._held = 0
        self._choices: dict[int, _Gathering] = {}
        self._last = _Chunk()  # of the first choice
        self._finished = 0  # which choice ended last: a chat's usage follows in a chunk without one
        self._error: Raw | None = None

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the event stream, cut anywhere.

        Raises GatheredError when they can't be understood, or there are more than ``MOST_BYTES`` to keep.
        """
        looked_at = len(self._line)
        self._line += data
        end = self._line.rfind(b"\n", looked_at)
        if end >= 0:
            lines = bytes(self._line[:end]).split(b"\n")
            del self._line[: end + 1]
            for line in lines:
                if line.startswith(b"data:"):
                    self._event(line[5:].strip())
        if self._held + len(self._line) > MOST_BYTES:
            raise GatheredError(f"the answer is longer than {MOST_BYTES} bytes")

    def result(self) -> tuple[int, bytes]:
        """Return the HTTP status and the JSON body of the whole answer.

        An error within the stream is one that would have been the whole answer: its ``code`` is the status.
        Raises GatheredError when the stream has neither ended nor failed.
        """
        if self._error is not None:
            return _status(self._error), msgspec.json.encode({"error": self._error})
        if not self.done or not self._choices or not all(c.finish_reason for c in self._choices.values()):
            raise GatheredError("the answer ended before it was complete")
        make = _Gathering.chat if self._chat else _Gathering.completion
        answer = {
            "choices": [make(choice) for _, choice in sorted(self._choices.items())],
            "created": self._last.created,
            "model": self._last.model,
            "system_fingerprint": self._last.system_fingerprint,
            "object": "chat.completion" if self._chat else "text_completion",
            "usage": self._last.usage,
            "id": self._last.id,
            "timings": self._last.timings,
        }
        return 200, msgspec.json.encode({name: value for name, value in answer.items() if value is not UNSET})

    def _event(self, data: bytes) -> None:
        if self.done:
            return
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _CHUNK.decode(data)
            if chunk.error is not UNSET:
                self._error, self.done = chunk.error, True
            elif chunk.prompt_progress is UNSET:
                self._chunk(chunk)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise GatheredError(f"an event of the stream can't be understood: {error}") from None

    def _chunk(self, chunk: _Chunk) -> None:
        for piece in chunk.choices:
            if piece.index not in self._choices:
                self._choices[piece.index] = _Gathering(piece.index)
                self._held += _OVERHEAD
            more = self._choices[piece.index].add(piece)
            self._held += more
            self.started = self.started or more > 0 or piece.finish_reason is not None
            if piece.finish_reason is not None:
                self._finished = piece.index
        # Of several choices llama.cpp gives the first one's usage and timings.
        ends = not chunk.choices or chunk.choices[-1].finish_reason is not None
        if ends and self._finished == min(self._choices, default=0):
            self._last = chunk


def can_gather(path: str, fields: Mapping[str, bytes]) -> bool:
    """Whether the answer to a request with these top-level ``fields`` can be added up exactly.

    ``fields`` has the raw JSON value of each. False for what changes the answer's shape in a way that the
    stream doesn't show, and for what isn't of the type it should be: the engine is to say that itself.
    """
    if path not in (CHAT, COMPLETIONS):
        return False
    try:
        given = {name: known.decode(fields[name]) for name, known in _LOOKED_AT.items() if name in fields}
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    if given.get("stream") or given.get("verbose") or given.get("n_indent"):
        return False  # debugging extras have the text in one piece; n_indent takes back what was streamed
    if given.get("reasoning_format") == "deepseek-legacy":
        return False  # made for streams of another shape than the whole answer's
    messages = given.get("messages")
    if messages and messages[-1].role == "assistant":
        return False  # the whole answer begins with that message, the stream behind it
    candidates = given.get("logprobs") or given.get("n_probs")
    if not candidates:
        return True
    # A chat's chunks come with texts only, and the last token has none. Behind a stop string llama.cpp takes
    # back the candidates of its tokens, which were streamed.
    return path == COMPLETIONS and candidates is not True and not given.get("stop")


class _Message(Struct):
    role: str


_Candidates = Annotated[int, Meta(ge=0, le=5)]
"""Of each token, as many as OpenAI's API gives; they are some 100 bytes each."""

_Character = Annotated[str, Meta(min_length=1, max_length=1)]
"""A stop string. Of a longer one llama.cpp holds back what may be its beginning, and never sends it when
``max_tokens`` ends the answer there."""

_LOOKED_AT: dict[str, msgspec.json.Decoder[Any]] = {
    **dict.fromkeys(("stream", "return_progress", "verbose"), msgspec.json.Decoder(bool | None)),
    "stream_options": msgspec.json.Decoder(dict[str, bool] | None),
    "n_indent": msgspec.json.Decoder(int | None),
    "reasoning_format": msgspec.json.Decoder(str | None),
    "messages": msgspec.json.Decoder(list[_Message] | None),
    "stop": msgspec.json.Decoder(_Character | list[_Character] | None),
    "logprobs": msgspec.json.Decoder(bool | _Candidates | None),
    "n_probs": msgspec.json.Decoder(_Candidates | None),
}


class _Function(Struct):
    name: str | None = None
    arguments: str = ""


class _Call(Struct):
    index: int
    function: _Function
    id: str | None = None
    type: str | None = None


class _Delta(Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] = []


class _Logprobs(Struct):
    content: list[Raw]


class _Piece(Struct):
    index: int = 0
    finish_reason: str | None = None
    delta: _Delta = _Delta()
    text: str = ""
    logprobs: _Logprobs | None = None


class _Chunk(Struct):
    choices: list[_Piece] = []
    created: Raw | UnsetType = UNSET
    model: Raw | UnsetType = UNSET
    system_fingerprint: Raw | UnsetType = UNSET
    id: Raw | UnsetType = UNSET
    usage: Raw | UnsetType = UNSET
    timings: Raw | UnsetType = UNSET
    prompt_progress: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


_CHUNK = msgspec.json.Decoder(_Chunk)


class _Error(Struct):
    code: Annotated[int, Meta(ge=400, le=599)] = 500


def _status(error: Raw) -> int:
    try:
        return msgspec.json.decode(error, type=_Error).code
    except (msgspec.MsgspecError, RecursionError):
        return 500


class _GatheringCall:
    def __init__(self) -> None:
        self.id = self.type = self.name = ""
        self.arguments = bytearray()

    def whole(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments.decode()}
        return {"type": self.type, "function": function, "id": self.id}


class _Gathering:
    """One choice in the making. Texts are kept as UTF-8, for many short strings are ten times the size."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self._text = bytearray()
        self._reasoning = bytearray()
        self._calls: dict[int, _GatheringCall] = {}
        self._logprobs = bytearray()

    def add(self, piece: _Piece) -> int:
        """Add a piece, and return how many bytes more are kept."""
        self.finish_reason = piece.finish_reason or self.finish_reason
        delta = piece.delta
        text = (piece.text or delta.content or "").encode()
        reasoning = (delta.reasoning_content or "").encode()
        logprobs = b"".join(b"," + bytes(raw) for raw in piece.logprobs.content) if piece.logprobs else b""
        self._text += text
        self._reasoning += reasoning
        self._logprobs += logprobs
        return len(text) + len(reasoning) + len(logprobs) + sum(map(self._call, delta.tool_calls))

    def _call(self, call: _Call) -> int:
        known = call.index in self._calls
        kept = self._calls.setdefault(call.index, _GatheringCall())
        arguments = call.function.arguments.encode()
        kept.arguments += arguments
        kept.id, kept.type = call.id or kept.id, call.type or kept.type
        kept.name = call.function.name or kept.name
        return len(arguments) + (0 if known else _OVERHEAD + len(kept.id) + len(kept.name))

    def chat(self) -> dict[str, Any]:
        """Return it as a choice of ``/v1/chat/completions``."""
        message: dict[str, Any] = {"role": "assistant", "content": self._text.decode()}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning.decode()
        if self._calls:
            message["tool_calls"] = [call.whole() for _, call in sorted(self._calls.items())]
        return {"finish_reason": self.finish_reason, "index": self.index, "message": message}

    def completion(self) -> dict[str, Any]:
        """Return it as a choice of ``/v1/completions``."""
        return {
            "text": self._text.decode(),
            "index": self.index,
            "logprobs": Raw(b'{"content":[%b]}' % bytes(self._logprobs[1:])) if self._logprobs else None,
            "finish_reason": self.finish_reason,
        }
