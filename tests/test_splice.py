"""Fields are set where they stand, or behind the brace; every other byte stays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.peek import peek
from gateway.splice import set_fields


def spliced(body: bytes, values: dict[str, bytes]) -> bytes:
    return set_fields(body, [(name, len(memoryview(raw))) for name, raw in peek(body).fields], values)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a":1}', b'{"stream":true,"a":1}'),
        (b'{"a":1,"stream":false,"b":2}', b'{"a":1,"stream":true,"b":2}'),
        (b' { "stream" :\n false\t, "b" : [1, "}"] } ', b' { "stream" :\n true\t, "b" : [1, "}"] } '),
        (b'{"str\\u0065am":null}', b'{"str\\u0065am":true}'),
        (b"{}", b'{"stream":true}'),
        (b"{ }", b'{"stream":true }'),
        (b'{"a":"{\\"stream\\":false}","stream":null}', b'{"a":"{\\"stream\\":false}","stream":true}'),
        (b'{"a":"\\ud83d","stream":false}', b'{"a":"\\ud83d","stream":true}'),
        ('{"ключ":"знач","stream":false}'.encode(), '{"ключ":"знач","stream":true}'.encode()),
    ],
)
def test_one_field(body: bytes, expected: bytes) -> None:
    assert spliced(body, {"stream": b"true"}) == expected


def test_several_fields_there_or_not() -> None:
    body = b'{"x":1,"rid":"theirs","stream_options":{"include_usage":false}}'
    values = {"stream": b"true", "stream_options": b'{"include_usage":true}', "rid": b'"ours"'}
    assert spliced(body, values) == (
        b'{"stream":true,"x":1,"rid":"ours","stream_options":{"include_usage":true}}'
    )


def test_nothing_to_set_is_the_same_object() -> None:
    body = b'{"a":1}'
    assert set_fields(body, [], {}) is body


NAMES = st.text(max_size=8).filter(lambda name: name.casefold() not in ("stream", "rid", "model", "n"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(NAMES, VALUES, max_size=6),
    st.sampled_from([None, False, True]),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")]),
    st.booleans(),
)
@settings(derandomize=True, deadline=None, max_examples=300)
def test_any_body_has_the_field_and_is_otherwise_the_same(
    others: dict[str, Any], stream: bool | None, marks: tuple[str, str], ascii_only: bool
) -> None:
    looked_at = {"background", "best_of", "prompt", "return_progress", "stream_options"}
    fields = {name: value for name, value in others.items() if name.casefold() not in looked_at}
    if stream is not None:
        fields["stream"] = stream
    body = json.dumps(fields, separators=marks, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    got = spliced(body, {"stream": b"true", "rid": b'"ours"'})
    assert json.loads(got) == {**fields, "stream": True, "rid": "ours"}
    added = [b'"rid":"ours"'] + [b'"stream":true'] * (stream is None)
    shorter = 1 if stream is False else 0
    assert len(got) == len(body) + len(b",".join(added)) + bool(fields) - shorter
