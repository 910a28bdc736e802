"""Tails: the end of a stream, its boundaries and its events, case by case.

That all of it holds for every chunking is in properties/test_events_any_chunking.py.
"""

from __future__ import annotations

from unittest import mock

import pytest

from gateway import events
from gateway.dialect import ROUTES
from gateway.events import NdjsonTail, SseTail, Tail

DONE = (b"data: [DONE]",)
STOP = (b"event: message_stop",)
ENDS = [(path, marker) for path, route in ROUTES.items() for marker in route.markers]
LINE_ENDS = [b"\n", b"\r\n", b"\r"]


def sse(data: bytes, markers: tuple[bytes, ...] = DONE) -> SseTail:
    tail = SseTail(markers)
    tail.feed(data)
    return tail


def ndjson(data: bytes) -> NdjsonTail:
    tail = NdjsonTail()
    tail.feed(data)
    return tail


def test_a_body_without_events_ends_with_its_framing() -> None:
    tail = Tail()
    assert (tail.done, tail.at_boundary, tail.events, tail.content_seen) == (False, False, 0, False)
    tail.feed(b"data: [DONE]\n\n")
    assert (tail.done, tail.at_boundary, tail.events, tail.content_seen) == (False, False, 0, True)
    assert tail.complete()


def test_before_the_first_byte_there_is_room_for_an_event_and_no_end() -> None:
    for tail in (SseTail(DONE), NdjsonTail()):
        assert (tail.done, tail.at_boundary, tail.events, tail.content_seen) == (False, True, 0, False)
        assert not tail.complete()


# ------------------------------------------------------------------------------- the terminal marker


@pytest.mark.parametrize("end", LINE_ENDS, ids=repr)
@pytest.mark.parametrize(("path", "marker"), ENDS)
@pytest.mark.parametrize("space", [b": ", b":"], ids=repr)
def test_the_marker_of_each_route_ends_it(path: str, marker: bytes, space: bytes, end: bytes) -> None:
    marker = marker.replace(b": ", space)
    stream = b'data: {"x":1}' + end * 2 + marker + end + b"data: {}" + end * 2
    tail = sse(stream, ROUTES[path].markers)
    assert tail.done
    assert tail.complete()
    assert tail.events == 2
    assert tail.at_boundary


@pytest.mark.parametrize("end", [b"", *LINE_ENDS], ids=repr)
@pytest.mark.parametrize(("path", "marker"), ENDS)
def test_the_last_event_counts_without_its_empty_line(path: str, marker: bytes, end: bytes) -> None:
    tail = sse(b"data: {}\n\n" + marker + end, ROUTES[path].markers)
    assert tail.complete()
    assert not tail.at_boundary
    assert tail.events == 1
    assert tail.done == (marker.startswith(b"data") and end != b"")


@pytest.mark.parametrize("end", LINE_ENDS, ids=repr)
def test_a_named_event_is_over_only_when_its_data_have_passed(end: bytes) -> None:
    tail = sse(b"event: message_stop" + end, STOP)
    assert not tail.done
    tail.feed(b'data: {"type":"message_stop"')
    assert not tail.done
    tail.feed(b"}" + end)
    assert not tail.done
    tail.feed(end)
    assert tail.done


@pytest.mark.parametrize(
    "stream",
    [
        b'data: {"content":"data: [DONE]"}\n\n',
        b'data: {"content":"[DONE]"}\n\n',
        b'data: "[DONE]"\n\n',
        b"data: [DONE] \x00\n\n",
        b"data: [DONE]]\n\n",
        b"data:  [DONE]\n\n",
        b"data : [DONE]\n\n",
        b" data: [DONE]\n\n",
        b"xdata: [DONE]\n\n",
        b": data: [DONE]\n\n",
        b"event: [DONE]\n\n",
        b"id: [DONE]\n\n",
        b"data: [done]\n\n",
        b"[DONE]\n\n",
        b"data: [DONE\n]\n\n",
        b"data: [DO",
        b"data: " + b"x" * 100 + b"data: [DONE]\n\n",
    ],
)
def test_what_only_looks_like_the_marker_ends_nothing(stream: bytes) -> None:
    assert not sse(stream).complete()
    tail = SseTail(DONE)
    for at in range(len(stream)):
        tail.feed(stream[at : at + 1])
        assert not tail.done
    assert not tail.complete()


def test_another_routes_marker_ends_nothing() -> None:
    assert not sse(b"event: message_stop\ndata: {}\n\n", DONE).complete()
    assert not sse(b"data: [DONE]\n\n", STOP).complete()
    assert not sse(b"event: response.completed\ndata: {}\n\n", STOP).complete()
    assert not sse(b"event: response.complete\ndata: {}\n\n", ROUTES["/v1/responses"].markers).complete()


def test_a_marker_may_have_spaces_behind_it_but_not_without_end() -> None:
    assert sse(b"data: [DONE] \t\n").done
    spaces = b"data: [DONE]" + b" " * 100
    assert not sse(spaces + b"\n").done
    cut = sse(spaces)
    cut.feed(b"\n")
    assert not cut.done


def test_the_end_stays_the_end() -> None:
    tail = sse(b"data: [DONE]\n\n")
    tail.feed(b"data: more\n")
    assert tail.done
    assert tail.complete()


# ------------------------------------------------------------------------- boundaries and counting


@pytest.mark.parametrize(
    ("stream", "count", "boundary"),
    [
        (b"data: 1\n", 0, False),
        (b"data: 1\n\n", 1, True),
        (b"data: 1\r\n\r\n", 1, True),
        (b"data: 1\r\r", 1, True),
        (b"data: 1\n\r\n", 1, True),
        (b"data: 1\r\n\n", 1, True),
        (b"data: 1\r\r\n", 1, True),
        (b"data: 1\r\n\r", 1, False),
        (b"data: 1\r\n", 0, False),
        (b"data: 1\n\n\n\n\n", 1, True),
        (b"data: 1\n\ndata: 2\n\n", 2, True),
        (b"data: 1\n\ndata: 2\n", 1, False),
        (b"\n\n\ndata: 1\n\n", 1, True),
        (b"\r\n", 0, True),
        (b"a\n\nb\r\n\r\nc\r\rd", 3, False),
    ],
)
def test_events_end_with_an_empty_line(stream: bytes, count: int, boundary: bool) -> None:
    whole = sse(stream)
    assert (whole.events, whole.at_boundary) == (count, boundary)
    bytewise = SseTail(DONE)
    for at in range(len(stream)):
        bytewise.feed(stream[at : at + 1])
    assert (bytewise.events, bytewise.at_boundary) == (count, boundary)


def test_nothing_is_put_between_the_halves_of_a_line_end() -> None:
    tail = sse(b"data: 1\r\n\r")
    assert (tail.at_boundary, tail.events) == (False, 1)
    tail.feed(b"\n")
    assert (tail.at_boundary, tail.events) == (True, 1)


def test_a_comment_is_no_content() -> None:
    tail = SseTail(DONE)
    for piece in (b":", b" keep-alive\n\n", b": data: x\r\n\r\n", b"\n"):
        tail.feed(piece)
        assert not tail.content_seen
    tail.feed(b"d")
    assert tail.content_seen


# --------------------------------------------------------------------------------- lines of JSON


@pytest.mark.parametrize(
    "last", [b'{"done":true}', b'{"a":[1],"done" :\t true,"context":[1]}', b'{"done": true} ']
)
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"], ids=repr)
def test_the_last_line_says_that_it_is_done(last: bytes, end: bytes) -> None:
    tail = ndjson(b'{"done":false}\n' + last + end)
    assert tail.complete()
    assert tail.done == (end != b"")
    assert tail.events == 1 + (end != b"")
    assert tail.at_boundary == (end != b"")


@pytest.mark.parametrize(
    "line",
    [
        b'{"message":{"tool_calls":[{"function":{"arguments":{"done":true}}}]},"done":false}',
        b'{"response":"\\"done\\":true","done":false}',
        b'{"response":"{\\"done\\": true}"}',
        b'["done",true]',
        b'[{"done":true}]',
        b'"done":true',
        b'{"done":"true"}',
        b'{"done":1}',
        b'{"done":null}',
        b'{"Done":true}',
        b'{"done":true',
        b'{"done":true}}',
        b"[" * 5000 + b'{"done":true}' + b"]" * 5000,
        b"",
        b'{"error":"out of memory"}',
    ],
)
def test_done_elsewhere_in_a_line_ends_nothing(line: bytes) -> None:
    assert not ndjson(line + b"\n").done
    assert not ndjson(line).complete()


def overlong(before: bytes, after: bytes) -> bytes:
    return before + b'"context":"' + b"x" * 400 + b'"' + after


@pytest.mark.parametrize("pieces", [1, 7, 64, 1000])
@pytest.mark.parametrize(
    ("line", "done"),
    [
        (overlong(b'{"done":true,', b"}"), True),
        (overlong(b'{"message":{"a":"}"},"done": true,', b"}"), True),
        (overlong(b'{"message":{"done":true},', b"}"), False),
        (overlong(b'{"a":[{"done":true}],', b"}"), False),
        (overlong(b'{"a":"\\"done\\":true",', b"}"), False),
        (overlong(b'{"done":false,', b"}"), False),
        # What stands beyond the part that is kept is not seen.
        (overlong(b"{", b',"done":true}'), False),
    ],
)
def test_of_an_overlong_line_the_beginning_decides(line: bytes, done: bool, pieces: int) -> None:
    with mock.patch.object(events, "_LONGEST_FINAL_LINE", 100):
        for end in (b"", b"\n", b"\n{}\n"):
            tail = NdjsonTail()
            stream = line + end
            for at in range(0, len(stream), pieces):
                tail.feed(stream[at : at + pieces])
            assert tail.complete() == done
            assert tail.done == (done and end != b"")


def test_after_an_overlong_line_the_next_one_is_read_as_ever() -> None:
    with mock.patch.object(events, "_LONGEST_FINAL_LINE", 100):
        tail = NdjsonTail()
        for piece in (
            overlong(b"{", b"}"),
            b"more",
            b'\n{"done":true x}\n',
            b'{"done":false}\n',
            b'{"done":',
        ):
            tail.feed(piece)
            assert not tail.complete()
        tail.feed(b"true}\n")
        assert tail.done


# ------------------------------------------------------------------------------------------- memory


def kept(tail: Tail) -> int:
    names = [name for kind in type(tail).__mro__ for name in getattr(kind, "__slots__", ())]
    return sum(len(value) for name in names if isinstance(value := getattr(tail, name), bytes))


@pytest.mark.parametrize("piece", [b"x" * 65536, b"data: " + b"y" * 1000, b": c\n", b"\n" * 1000, b"\r\n\r"])
def test_of_an_event_stream_no_more_is_kept_than_a_marker(piece: bytes) -> None:
    tail = SseTail(DONE)
    for _ in range(200):
        tail.feed(piece)
        assert kept(tail) <= 80


def test_of_lines_no_more_is_kept_than_the_longest_that_counts() -> None:
    tail = NdjsonTail()
    for _ in range(100):
        tail.feed(b"x" * 65536)
        assert kept(tail) <= 256 * 1024 + 1
    tail.feed(b"\n{")
    assert kept(tail) == 1
