"""Header fields as we write them are read as the same fields, or aren't written."""

from __future__ import annotations

import h11
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.headers import field_lines

TOKEN = st.sampled_from([bytes([each]) for each in b"abZ09-_.~!#$%&'*+^`|"])
ODD = st.sampled_from(
    [b":", b" ", b"\t", b"\r", b"\n", b"\r\n", b"\x00", b"\x0b", b"\x7f", b"\xff", b"\xe9", b"a"]
)


def text(alphabet: st.SearchStrategy[bytes], most: int) -> st.SearchStrategy[bytes]:
    return st.lists(alphabet, max_size=most).map(b"".join)


NAME = st.one_of(text(TOKEN, 8), text(st.one_of(TOKEN, ODD), 8))
VALUE = st.one_of(text(TOKEN, 12), text(st.one_of(TOKEN, ODD), 12)).map(lambda value: value.strip(b" \t"))


def as_read(lines: bytes) -> list[tuple[bytes, bytes]]:
    """What a strict reader that isn't ours makes of it."""
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="GET", target="/", headers=[("Host", "h")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n")
    head = reader.next_event()
    assert isinstance(head, h11.Response)
    return list(head.headers.raw_items())


@given(st.lists(st.tuples(NAME, VALUE), max_size=5))
@example([(b"A", b"1\r\nSet-Cookie: b")])
@example([(b"A: 1\r\nB", b"2")])
@example([(b"A", b"1\nB: 2")])
@example([(b"A: 1", b"2")])
@example([(b"", b"1")])
@example([(b"A\n", b"1")])
@example([])
def test_what_is_written_is_read_as_the_same_fields(fields: list[tuple[bytes, bytes]]) -> None:
    try:
        lines = field_lines(fields)
    except ValueError:
        bad_name = any(
            not name or any(each in b":\r\n\x00 \t\x0b\x7f\xff\xe9" for each in name) for name, _ in fields
        )
        assert bad_name or any(each in value for _, value in fields for each in (b"\r", b"\n", b"\x00"))
        return
    assert lines.count(b"\n") == len(fields)
    if not any(
        each in value for _, value in fields for each in (b"\x0b", b"\x0c")
    ):  # h11 reads no such value.
        assert as_read(lines) == fields
