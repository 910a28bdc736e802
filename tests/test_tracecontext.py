"""W3C Trace Context, without OpenTelemetry: what is read, what is refused, and what goes on."""

from __future__ import annotations

import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.tracecontext import (
    RANDOM,
    SAMPLED,
    TRACEPARENT,
    TRACESTATE,
    Parent,
    enter,
    in_share,
    new_id,
    read_traceparent,
    read_tracestate,
    traceparent,
    without_trace,
)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01".encode()

trace_ids = st.text("0123456789abcdef", min_size=32, max_size=32).filter(lambda text: int(text, 16) > 0)
span_ids = st.text("0123456789abcdef", min_size=16, max_size=16).filter(lambda text: int(text, 16) > 0)
flags = st.integers(0, 255)
keys = st.from_regex(r"[a-z][a-z0-9_\-*/]{0,20}(@[a-z][a-z0-9_\-*/]{0,13})?", fullmatch=True)
words = st.text([chr(c) for c in range(0x21, 0x7F) if chr(c) not in ",="], min_size=1, max_size=20)


@given(trace_ids, span_ids, flags)
def test_what_is_written_is_read_back(trace_id: str, span_id: str, bits: int) -> None:
    assert read_traceparent(traceparent(trace_id, span_id, bits)) == Parent(trace_id, span_id, bits)


@given(st.binary(max_size=80))
@example(GOOD + b"\n")
def test_what_is_read_is_as_the_grammar_has_it(value: bytes) -> None:
    parent = read_traceparent(value)
    if parent is not None:
        assert len(parent.trace_id) == 32
        assert len(parent.span_id) == 16
        assert value[:55].endswith(b"-%02x" % parent.flags)
        assert set(value[:55].decode()) <= set("0123456789abcdef-")


@given(
    st.sampled_from(range(55)), st.sampled_from([c for c in string.printable if c not in "0123456789abcdef-"])
)
def test_one_wrong_character_is_enough(at: int, character: str) -> None:
    text = GOOD.decode()
    assert read_traceparent((text[:at] + character + text[at + 1 :]).encode()) is None


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"00",
        GOOD[:-1],
        GOOD + b"0",
        GOOD + b"-",
        GOOD + b"-more",
        GOOD.upper(),
        b"ff" + GOOD[2:],
        f"00-{'0' * 32}-{SPAN}-01".encode(),
        f"00-{TRACE}-{'0' * 16}-01".encode(),
        b"01" + GOOD[2:] + b"more",
        GOOD.replace(b"-", b"_"),
    ],
)
def test_malformed_parents_are_none(value: bytes) -> None:
    assert read_traceparent(value) is None


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert read_traceparent(b"cc" + GOOD[2:]) == Parent(TRACE, SPAN, 1)
    assert read_traceparent(b"cc" + GOOD[2:] + b"-what-comes.then") == Parent(TRACE, SPAN, 1)


@given(st.dictionaries(keys, words, min_size=1, max_size=32), st.integers(1, 32))
def test_a_good_state_goes_on_whole_from_one_field_or_several(state: dict[str, str], cut: int) -> None:
    members = [f"{key}={value}".encode() for key, value in state.items()]
    whole = b",".join(members)
    assert read_tracestate([whole]) == whole
    assert read_tracestate([b", \t".join(members[:cut]), b" ", b",".join(members[cut:])]) == whole


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_a_state_is_all_or_nothing(fields: list[bytes]) -> None:
    read = read_tracestate(fields)
    given_ = [each.strip(b" \t") for field in fields for each in field.split(b",")]
    assert read in (b"", b",".join(filter(None, given_)))
    assert read_tracestate([read]) == read


@pytest.mark.parametrize(
    "state",
    [
        b"a",
        b"=1",
        b"a=",
        b"A=1",
        b"a=1,a=2",
        b"a=x=y",
        b"@a=1",
        b"a@=1",
        b"a@b@c=1",
        b"a=\x7f",
        b"a b=1",
        "a=ü".encode(),
    ],
)
def test_a_faulty_state_is_dropped(state: bytes) -> None:
    assert read_tracestate([b"good=1", state]) == b""


def test_a_state_has_at_most_so_many_members() -> None:
    many = [b"k%d=1" % number for number in range(33)]
    assert read_tracestate([b",".join(many[:32])])
    assert not read_tracestate([b",".join(many)])


@given(trace_ids, span_ids, flags, st.floats(0, 1))
def test_the_caller_decides(trace_id: str, span_id: str, bits: int, share: float) -> None:
    field = traceparent(trace_id, span_id, bits)
    trace = enter([(b"TraceParent", b" " + field + b"\t"), (b"tracestate", b"a=1")], share)
    assert trace.parent == Parent(trace_id, span_id, bits)
    assert (trace.trace_id, trace.sampled, trace.state) == (trace_id, bool(bits & SAMPLED), b"a=1")
    assert trace.span_id not in (span_id, "0" * 16)
    ours = new_id(8)
    (name, onward), state = trace.onward(ours)
    assert (name, state) == (TRACEPARENT, (TRACESTATE, b"a=1"))
    # Its own word if it isn't recorded, the call's if it is; no flag that nobody knows.
    assert read_traceparent(onward) == Parent(
        trace_id, ours if trace.sampled else span_id, bits & (SAMPLED | RANDOM)
    )


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"traceparent", b"nonsense")],
        [(b"traceparent", GOOD), (b"traceparent", GOOD)],
        [(b"tracestate", b"a=1")],
        [(b"traceparent", b"nonsense"), (b"tracestate", b"a=1")],
    ],
)
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_without_a_good_parent_a_trace_begins(headers: list[tuple[bytes, bytes]], share: float) -> None:
    trace = enter(headers, share)
    assert (trace.parent, trace.state, trace.sampled) == (None, b"", share == 1)
    assert trace.trace_id != TRACE
    ((_, field),) = trace.onward(SPAN)
    assert read_traceparent(field) == Parent(trace.trace_id, SPAN, int(share))


@given(trace_ids, st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_has_all_of_a_smaller_one(trace_id: str, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert in_share(trace_id, small) <= in_share(trace_id, large)
    assert in_share(trace_id, 1.0)
    assert not in_share(trace_id, 0.0)


@given(trace_ids, st.floats(0, 1))
def test_shares_are_those_of_opentelemetry(trace_id: str, share: float) -> None:
    from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

    theirs = TraceIdRatioBased(share).should_sample(None, int(trace_id, 16), "")
    assert in_share(trace_id, share) == (theirs.decision is Decision.RECORD_AND_SAMPLE)


def test_a_share_is_about_that() -> None:
    assert 350 < sum(in_share(new_id(16), 0.2) for _ in range(2500)) < 650


def test_an_engine_gets_no_field_of_trace_context_twice() -> None:
    kept = (b"X-Other", b"1")
    assert without_trace([(b"TraceParent", GOOD), kept, (b"tracestate", b"a=1")]) == [kept]
