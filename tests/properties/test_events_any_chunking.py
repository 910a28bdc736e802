"""A tail says the same of the same bytes, however they are cut: that of a plain reading of the whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import combinations, pairwise
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway import events
from gateway.dialect import ROUTES
from gateway.events import NdjsonTail, SseTail, Tail

PLAIN = settings(deadline=None, derandomize=True, max_examples=300)
MARKERS = sorted({route.markers for route in ROUTES.values()})


@dataclass(frozen=True)
class Seen:
    done: bool
    at_boundary: bool
    events: int
    content_seen: bool
    complete: bool


def said_by(tail: Tail) -> Seen:
    return Seen(tail.done, tail.at_boundary, tail.events, tail.content_seen, tail.complete())


# -------------------------------------------------------------- the reference: the whole, line by line


def is_marker(line: bytes, markers: tuple[bytes, ...]) -> bool:
    bare = line.rstrip(b" \t")
    spellings = {*markers, *(marker.replace(b": ", b":") for marker in markers)}
    return bare in spellings and len(line) - len(bare) <= 16


def read_sse(data: bytes, markers: tuple[bytes, ...]) -> Seen:
    *lines, rest = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    count, inside = 0, False
    marker, done = b"", False
    for line in lines:
        if not marker and is_marker(line, markers):
            marker = line
            done = line.startswith(b"data")
        if line:
            inside = True
        elif inside:
            count, inside = count + 1, False
            done = done or marker != b""
    return Seen(
        done=done,
        at_boundary=not inside and not rest and not data.endswith(b"\n\r"),
        events=count,
        content_seen=any(line and not line.startswith(b":") for line in [*lines, rest]),
        complete=marker != b"" or is_marker(rest, markers),
    )


def line_done(line: bytes, limit: int) -> bool:
    """Whether a line says at its top level that it is done: the whole of it, or as far as it is kept."""
    if len(line) <= limit:
        try:
            value = json.loads(line)
        except ValueError:
            return False
        return isinstance(value, dict) and value.get("done") is True
    depth, inside, at = 0, False, 0
    while at < limit:
        byte = line[at : at + 1]
        if inside:
            at += byte == b"\\"
            inside = byte != b'"'
        elif byte == b'"':
            if depth == 1 and line[at:limit].replace(b" ", b"").startswith(b'"done":true'):
                return True
            inside = True
        else:
            depth += (byte in b"{[") - (byte in b"}]")
        at += 1
    return False


def read_ndjson(data: bytes, limit: int) -> Seen:
    *lines, rest = data.split(b"\n")
    done = any(line_done(line, limit) for line in lines)
    return Seen(
        done=done,
        at_boundary=not rest,
        events=len(lines),
        content_seen=data != b"",
        complete=done or line_done(rest, limit),
    )


# ------------------------------------------------------------------------------------------ streams


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(data) + 1) for place in places} - {0, len(data)}), len(data)]
    return [data[a:b] for a, b in pairwise(edges) if a < b]


CUTS = st.lists(st.integers(0, 10_000), max_size=12)
LINE_ENDS = st.sampled_from([b"\n", b"\n", b"\r\n", b"\r"])
CONTENT = st.sampled_from(
    [
        b"[DONE]",
        b"data: [DONE]",
        b"message_stop",
        b"event: message_stop",
        b'{"a":"b\\n"}',
        b"",
        b" ",
        b"x" * 60,
    ]
)


@st.composite
def sse_streams(draw: st.DrawFn, markers: tuple[bytes, ...]) -> bytes:
    line = st.one_of(
        st.just(b""),
        st.just(b""),
        st.sampled_from(markers),
        st.sampled_from([marker.replace(b": ", b":") for marker in markers]),
        st.builds(
            bytes.__add__, st.sampled_from(markers), st.sampled_from([b" ", b"x", b"\t" * 17, b" " * 70])
        ),
        st.builds(b"data: %s".__mod__, CONTENT),
        st.builds(b'data: {"content":"%s"}'.__mod__, CONTENT),
        st.builds(b": %s".__mod__, CONTENT),
        st.builds(b"event: %s".__mod__, CONTENT),
        st.integers(50, 200).map(b"y".__mul__),
    )
    pieces = draw(st.lists(st.tuples(line, LINE_ENDS), max_size=12))
    stream = b"".join(line + end for line, end in pieces)
    return stream[: len(stream) - draw(st.integers(0, 3))] if stream else stream


@PLAIN
@given(st.data(), st.sampled_from(MARKERS), CUTS)
def test_an_event_stream_is_read_as_its_lines_are(
    data: st.DataObject, markers: tuple[bytes, ...], places: list[int]
) -> None:
    check_sse(data.draw(sse_streams(markers)), markers, places)


@PLAIN
@given(st.text("\r\n: dx", max_size=40).map(str.encode), CUTS)
@example(b"\r\n\r", [1, 2])
def test_line_ends_of_every_kind_in_every_mixture(stream: bytes, places: list[int]) -> None:
    check_sse(stream, (b"data: d",), places)


def check_sse(stream: bytes, markers: tuple[bytes, ...], places: list[int]) -> None:
    tail, passed = SseTail(markers), b""
    for piece in cut(stream, places):
        tail.feed(piece)
        passed += piece
        assert said_by(tail) == read_sse(passed, markers)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=repr)
@pytest.mark.parametrize(("path", "marker"), [(p, m) for p, route in ROUTES.items() for m in route.markers])
def test_each_marker_is_found_wherever_two_cuts_fall(path: str, marker: bytes, end: bytes) -> None:
    markers = ROUTES[path].markers
    stream = b"data: {}" + end * 2 + marker + end + b"data: 1" + end * 2
    for places in combinations(range(1, len(stream)), 2):
        tail = SseTail(markers)
        for piece in cut(stream, list(places)):
            tail.feed(piece)
        assert said_by(tail) == Seen(True, True, 2, True, True)


# ------------------------------------------------------------------------------------ lines of JSON


VALUES = st.recursive(
    st.one_of(
        st.booleans(), st.integers(), st.sampled_from(['"done":true', "done", 'a"}{[]\\', "é\n", "x" * 50])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["done", "message", "a\\", '"done"']), inner, max_size=3),
    ),
    max_leaves=6,
)
SEPARATORS = st.sampled_from([(",", ":"), (", ", ": ")])
OBJECTS = st.dictionaries(st.sampled_from(["done", "message", "context", "response"]), VALUES, max_size=4)
JSON_LINES = st.builds(
    lambda value, separators: json.dumps(value, separators=separators).encode(),
    st.one_of(OBJECTS, OBJECTS, VALUES),
    SEPARATORS,
)
BROKEN_LINES = st.sampled_from([b"", b" ", b'{"done":true', b'"done":true}', b"nonsense"])


@PLAIN
@given(st.lists(st.one_of(JSON_LINES, JSON_LINES, BROKEN_LINES), max_size=6), st.booleans(), CUTS)
@pytest.mark.parametrize("limit", [events._LONGEST_FINAL_LINE, 60])
def test_lines_of_json_are_read_as_each_alone(
    limit: int, lines: list[bytes], ended: bool, places: list[int]
) -> None:
    stream = b"\n".join(lines) + (b"\n" if ended and lines else b"")
    tail, passed = NdjsonTail(), b""
    with mock.patch.object(events, "_LONGEST_FINAL_LINE", limit):
        for piece in cut(stream, places):
            tail.feed(piece)
            passed += piece
            assert said_by(tail) == read_ndjson(passed, limit)
