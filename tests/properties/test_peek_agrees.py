"""Peek reads what Python's own decoder reads, and of whatever bytes it raises nothing but its refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.peek import LOOKED_AT, Peek, peek

PLAIN = settings(deadline=None, derandomize=True, max_examples=300)
PATH = "/v1/completions"

# Lone surrogates have no UTF-8; a body with one is refused as no JSON.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(-1e9, 1e9), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)
PROMPTS = st.one_of(
    TEXT,
    st.none(),
    st.lists(TEXT, max_size=5),
    st.lists(st.integers(0, 9), max_size=5),
    st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=5),
)
COUNTS = st.one_of(st.none(), st.integers(-2, 20))
KNOWN = st.fixed_dictionaries(
    {},
    optional={
        "model": st.one_of(st.none(), TEXT),
        "stream": st.one_of(st.none(), st.booleans()),
        "background": st.sampled_from([None, False]),
        "n": COUNTS,
        "best_of": COUNTS,
        "prompt": PROMPTS,
    },
)
OTHERS = st.dictionaries(TEXT.filter(lambda name: name.casefold() not in LOOKED_AT), VALUES, max_size=6)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    fields = list({**draw(KNOWN), **draw(OTHERS)}.items())
    text = json.dumps(
        dict(draw(st.permutations(fields))),
        separators=draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")])),
        indent=draw(st.sampled_from([None, None, 0, 3])),
        ensure_ascii=draw(st.booleans()),
    )
    space = draw(st.sampled_from(["", " ", "\r\n\t "]))
    return (space + text + space).encode()


def look(body: bytes) -> Peek | None:
    """What is seen of a body; None if it is refused."""
    try:
        return peek(body, path=PATH)
    except GatewayError as error:
        refusal = error
    assert refusal.status == 400
    refusal.message.encode()
    return None


def expected(fields: dict[str, Any]) -> Peek:
    prompt = fields.get("prompt")
    prompts = 1
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompts = len(prompt)
    each = max(1, fields.get("n") or 1, fields.get("best_of") or 1)
    return Peek(fields.get("model"), fields.get("stream"), each * prompts)


@PLAIN
@given(bodies())
def test_peek_reads_what_pythons_decoder_reads(body: bytes) -> None:
    assert peek(body, path=PATH) == expected(json.loads(body))


def spelt(name: str, escapes: list[bool]) -> str:
    return "".join(
        f"\\u{ord(letter):04x}" if escape else letter for letter, escape in zip(name, escapes, strict=False)
    )


@PLAIN
@given(bodies(), st.sampled_from(sorted(LOOKED_AT)), st.booleans(), st.data())
def test_a_second_one_of_a_field_that_counts_is_refused(
    body: bytes, name: str, upper: bool, data: st.DataObject
) -> None:
    fields = json.loads(body)
    if name not in fields and not upper:
        fields[name] = None
    second = spelt(
        name.upper() if upper else name, data.draw(st.lists(st.booleans(), min_size=30, max_size=30))
    )
    pairs = [f"{json.dumps(key)}:{json.dumps(value)}" for key, value in fields.items()]
    pairs.insert(data.draw(st.integers(0, len(pairs))), f'"{second}":{json.dumps(data.draw(VALUES))}')
    with pytest.raises(GatewayError) as caught:
        peek(("{" + ",".join(pairs) + "}").encode(), path=PATH)
    assert caught.value.status == 400


@settings(PLAIN, max_examples=600)
@given(st.one_of(st.binary(max_size=60), st.text('{}[]",:\\ntrue\x00ſ0-9e. u', max_size=40).map(str.encode)))
@example(b'{"model":"\xff"}')
@example(b'{"prompt":[\xff]}')
@example(b'{"n":' + b"9" * 400 + b"}")
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    look(body)


@given(st.lists(st.sampled_from([r"\ud83d", r"\ude00", r"\uDFFF", "x", r"\u00e9"]), max_size=6).map("".join))
def test_whole_emoji_are_read_as_they_are_and_halves_as_replacements(name: str) -> None:
    body = f'{{"model":"{name}"}}'.encode()
    meant = json.loads(body)["model"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert peek(body, path=PATH).model == meant


@pytest.mark.parametrize("cut", range(2, 6))
def test_an_escape_that_is_cut_short_is_no_half_of_an_emoji(cut: int) -> None:
    escape = rb"\ud800\udc00"
    assert look(b'{"model":"' + escape[:cut] + escape[6:] + b'"}') is None
    assert look(b'{"model":"' + escape[:6] + escape[6 : 6 + cut] + b'"}') is None


@PLAIN
@given(bodies(), st.data())
def test_a_damaged_body_is_read_or_refused(body: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(body)))
    until = data.draw(st.integers(at, len(body)))
    damaged = body[:at] + data.draw(st.binary(max_size=3)) + body[until:]
    seen = look(damaged)
    if seen is not None:
        # What a skipped string holds isn't looked at, and needn't be UTF-8.
        model = json.loads(damaged.decode(errors="replace")).get("model")
        # Half an emoji is read as a replacement character.
        assert seen.model == (model and model.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
