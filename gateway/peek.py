"""Looking at a request's body without rebuilding it.

The body goes up byte for byte. Only a handful of top-level fields are read, and
those must be beyond dispute: decoders differ on which of two ``model`` fields
counts (msgspec and Python take the last, some take the first) and on whether
``Model`` is ``model`` (Go's encoding/json says yes, so does Ollama). Whoever could
make gateway and engine disagree could run a model he may not use. Hence a
looked-at field that stands twice or in another case is refused.

How: msgspec splits the top level into names and raw values in one pass at memory
speed (a 20 MB body takes about 10 ms). The names are of a type of our own, none of
which equals another, so that a repeated one stays and an excess of them ends the
pass early.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import msgspec

from gateway.errors import Code, GatewayError

LOOKED_AT = frozenset(
    {
        "model",
        "stream",
        "n",
        "best_of",
        "n_cmpl",
        "prompt",
        "background",
        "stream_options",
        "return_progress",
        "rid",
        "request_id",
        "messages",
        "input",
        "options",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "n_predict",
    }
)
"""Fields that are read here, or set for an engine."""

_MOST_FIELDS = 1024
"""Top-level fields of a body. The largest request of any API here has about 60."""

_MOST_SEQUENCES = 4096

_HEX = rb"[0-9a-fA-F]"
_SURROGATES = re.compile(
    rb"(\\u[dD][89abAB]%b{2}\\u[dD][c-fC-F]%b{2})|\\u[dD][89a-fA-F]%b{2}" % (_HEX, _HEX, _HEX)
)
"""Both halves of a character beyond the first 65,536 (the group), or one alone."""


@dataclass(frozen=True, slots=True)
class Peek:
    """What the gateway needs to know of a body.

    ``stream`` is None where the body doesn't say; ``sequences`` is how many sequences
    the engine will make at once for it, its cost in slots. ``max_tokens`` is how long an answer
    may be, if it says; ``inputs`` is how many texts it has that the engine may count one by one,
    though they are done in a moment. ``fields`` are all top-level
    fields in order: their names and their values as they stand in the body.
    """

    model: str | None
    stream: bool | None
    sequences: int
    max_tokens: int | None = field(default=None, compare=False)
    inputs: int = field(default=1, compare=False)
    fields: Sequence[tuple[str, msgspec.Raw]] = field(default=(), compare=False)


def peek(body: bytes, *, path: str = "") -> Peek:
    """Look at ``body``, the request to ``path``.

    Raises GatewayError ``invalid_json`` when it isn't JSON, ``invalid_request`` when it
    is no object or a looked-at field is repeated, in another case, or of a wrong type.
    """
    fields: dict[str, msgspec.Raw] = {}
    everything = _split(body)
    for name, raw in everything:
        folded = name.casefold()
        if folded not in LOOKED_AT:
            continue
        if name != folded:
            raise _bad(name, f"The field {name!r} must be written {folded!r}.")
        if name in fields:
            raise _bad(name, f"The field {name!r} stands in the request body more than once.")
        fields[name] = raw
    if path == "/v1/responses" and _value(fields, "background", bool):
        raise _bad("background", "background: true is not supported: the answer would be made for nobody.")
    return Peek(
        model=_value(fields, "model", str),
        stream=_value(fields, "stream", bool),
        sequences=_sequences(fields, path),
        max_tokens=_max_tokens(everything),
        inputs=_inputs(everything, path),
        fields=everything,
    )


class _Name:
    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def _split(body: bytes) -> list[tuple[str, msgspec.Raw]]:
    """Split ``body`` into its top-level fields, repeated ones too, in order."""
    left = iter(range(_MOST_FIELDS))

    def name(_: type, text: str) -> _Name:
        if next(left, None) is None:
            raise GatewayError(
                Code.INVALID_REQUEST, f"The request body has more than {_MOST_FIELDS} top-level fields."
            )
        return _Name(text)

    try:
        try:
            fields = msgspec.json.decode(body, type=dict[_Name, msgspec.Raw], dec_hook=name)
        except (msgspec.DecodeError, UnicodeDecodeError):
            # JavaScript writes half an emoji as a lone surrogate, and most decoders take it.
            looked_at = _SURROGATES.sub(lambda found: found[1] or rb"\ufffd", body)
            if looked_at == body:
                raise
            left = iter(range(_MOST_FIELDS))
            fields = msgspec.json.decode(looked_at, type=dict[_Name, msgspec.Raw], dec_hook=name)
    except msgspec.ValidationError:
        raise GatewayError(Code.INVALID_REQUEST, "The request body must be a JSON object.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = f"not valid JSON: {error}" if body.strip() else "empty"
        raise GatewayError(Code.INVALID_JSON, f"The request body is {reason}.") from None
    except RecursionError:
        raise GatewayError(Code.INVALID_JSON, "The request body is nested too deeply.") from None
    return [(name.text, raw) for name, raw in fields.items()]


def _bad(param: str, message: str) -> GatewayError:
    return GatewayError(Code.INVALID_REQUEST, message, param=param)


_DECODERS: dict[type[Any], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind | None) for kind in (str, bool, int)
}
"""Made once: to understand a type takes longer than to decode a value of it."""


def _value(fields: dict[str, msgspec.Raw], name: str, kind: type[Any]) -> Any:
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return _DECODERS[kind].decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        what = {str: "a string", bool: "true or false", int: "a whole number"}[kind]
        raise _bad(name, f"The field {name!r} must be {what}.") from None


def _sequences(fields: dict[str, msgspec.Raw], path: str) -> int:
    each = max(
        [1, *(_value(fields, name, int) or 1 for name in ("n", "best_of", "n_cmpl") if name in fields)]
    )
    prompts = _prompts(fields["prompt"]) if path == "/v1/completions" and "prompt" in fields else 1
    if each * prompts > _MOST_SEQUENCES:
        raise _bad(
            "n", f"The request asks for more than {_MOST_SEQUENCES} sequences, the most that are possible."
        )
    return each * prompts


_INPUTS = {"/v1/embeddings": "input", "/v1/rerank": "documents"}


def _inputs(fields: Sequence[tuple[str, msgspec.Raw]], path: str) -> int:
    if (wanted := _INPUTS.get(path)) is None:
        return 1
    return max((_prompts(raw, name) for name, raw in fields if name == wanted), default=1)


_LIMITS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"})

MAX_TOKENS = 10**9
"""More than any engine makes; numbers beyond it are taken for it."""


def _max_tokens(fields: Sequence[tuple[str, msgspec.Raw]]) -> int | None:
    """Read how long the answer may be: the most that any engine could understand.

    Engines read numbers leniently: vLLM takes "100" and 1e2 for 100, Ollama any case of a name.
    """
    said = [_number(raw) for name, raw in fields if name in _LIMITS]
    for name, raw in fields:
        if name == "options":
            try:
                options = _OPTIONS.decode(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
            given = {key.casefold(): value for key, value in (options or {}).items()}
            said += [_number(given["num_predict"])] if "num_predict" in given else []
    return max([number for number in said if number is not None], default=None)


_OPTIONS = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_NUMBER = msgspec.json.Decoder(int | float | str | None)


def _number(raw: msgspec.Raw) -> int | None:
    try:
        value = float(_NUMBER.decode(raw) or 0)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError):
        return None  # The engine refuses it.
    return int(min(value, MAX_TOKENS)) if value >= 1 else None


_FirstItems = msgspec.defstruct(
    "_FirstItems",
    [(f"item{i}", msgspec.Raw, None) for i in range(_MOST_SEQUENCES + 1)],
    array_like=True,
)
"""The beginning of a list: what is beyond its fields is skipped, and so costs no memory."""


def _prompts(raw: msgspec.Raw, name: str = "prompt") -> int:
    """Count the prompts: a string or one list of token numbers is one prompt."""
    if bytes(memoryview(raw)[:1]) != b"[":
        return 1
    try:
        items = takewhile(bool, msgspec.structs.astuple(msgspec.json.decode(raw, type=_FirstItems)))
    except (msgspec.DecodeError, RecursionError):
        raise _bad(name, f"The field {name!r} must be a string or a list.") from None
    return max(1, sum(bytes(memoryview(item)[:1]) in (b'"', b"[", b"{") for item in items))
