"""What passes from an engine into the spool: all of it, counted, its end looked at, however reads cut it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.clocks import EngineClock
from gateway.config import Stream
from gateway.dialect import ROUTES
from gateway.events import SseTail, error_in
from gateway.intake import Intake
from gateway.passing import Passing
from gateway.profiles import AS_IT_IS
from gateway.spool import PIECE_BYTES, Spool
from gateway.usage import Meter
from tests.fakes import make_request

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"out of memory","code":500}}\n\n'
LOOKED_AT = 4096

words = st.sampled_from(
    ["a", "an error of mine", "\\n\\n", '\\"error\\":{', "x" * 90, "data: [DONE]", "line\\n"]
)
events = st.lists(st.builds(lambda word: b'data: {"choices":[{"text":"%b"}]}\n\n' % word.encode(), words))


async def passing(stream: bytes, cuts: list[int]) -> tuple[Passing, Spool, SseTail]:
    request, spool = make_request(CHAT), Spool(1 << 20)
    request.tail = tail = SseTail(ROUTES[CHAT].markers)
    intake = Intake(AS_IT_IS, CHAT, Meter(CHAT, "vllm", True, b"", []))
    intake.meter.answered(200, tail)
    way = Passing(request, intake, spool, EngineClock(Stream()))
    pieces = [stream[start:end] for start, end in pairwise([0, *cuts, len(stream)]) if end > start]
    for number, piece in enumerate(pieces):
        if number == 0:
            intake.meter.feed(piece)
            way.begin(piece)
        else:
            assert bool(way.take(piece)) is not tail.done
    return way, spool, tail


def cut(stream: bytes, places: list[float]) -> list[int]:
    return sorted({int(place * len(stream)) for place in places} - {0})


@given(events, st.booleans(), st.lists(st.floats(0, 0.999), max_size=30))
@example([], True, [0.5])
@settings(max_examples=300, deadline=None)
def test_however_it_is_cut_all_passes_and_an_error_at_the_end_is_seen(
    before: list[bytes], fails: bool, places: list[float]
) -> None:
    stream = b"".join(before) + (ERROR if fails else b"") + DONE

    async def main() -> None:
        way, spool, tail = await passing(stream, cut(stream, places))
        assert await spool.get() == stream
        assert tail.done
        assert tail.events == len(before) + fails + 1
        assert (error_in(way.end) is not None) is fails

    trio.run(main)


@given(st.lists(st.sampled_from([b"error ", b"x" * 700, b"\n", b"no line", b"data: {}\n\n"]), max_size=200))
@settings(max_examples=100, deadline=None)
def test_of_a_streams_end_enough_is_kept_and_not_much_more(pieces: list[bytes]) -> None:
    async def main() -> None:
        stream = b"".join([b"error", *pieces])
        way, _, _ = await passing(stream, cut(stream, [number / 97 for number in range(97)]))
        assert len(way.end) <= 2 * LOOKED_AT
        assert stream.endswith(way.end.removeprefix(b"\0"))
        if b"error" in stream[-LOOKED_AT:]:
            assert way.end.find(b"error") >= 0

    trio.run(main)


async def test_of_plain_events_nothing_is_kept() -> None:
    stream = b'data: {"choices":[]}\n\n' * 50
    way, _, _ = await passing(stream, list(range(22, len(stream), 22)))
    assert way.end == b""


async def test_an_error_is_forgotten_once_enough_has_come_behind_it() -> None:
    stream = ERROR + b'data: {"choices":[]}\n\n' * 1000
    way, _, _ = await passing(stream, list(range(len(ERROR), len(stream), 22)))
    assert way.end == b""


@pytest.mark.parametrize("read", [500, 5000, 20_000])
@pytest.mark.parametrize("before", range(10))
async def test_where_it_cuts_it_makes_no_error_of_the_middle_of_a_line(before: int, read: int) -> None:
    text = b'data: {"text":"%b' % (b"x" * before) + b'{"error":"' * 1200 + b'"}\n\n'
    way, _, _ = await passing(b"data: {}\n\n" + text + DONE, list(range(10, len(text), read)))
    assert way.end.find(b"error") >= 0
    assert error_in(way.end) is None


async def test_the_next_read_is_for_as_much_as_the_spool_has_room_for() -> None:
    way, spool, _ = await passing(b"data: {}\n\n", [])
    assert way.take(b"data: {}\n\n") == PIECE_BYTES
    spool.piece_bytes = 1000
    assert way.take(b"data: {}\n\n") == 1000
    spool.limit = spool.held
    assert way.take(b"data: {}\n\n") == 0


FIRST = b'data: {"choices":[]}\n\n'


@pytest.mark.parametrize(
    ("pieces", "seen"),
    [
        ([b"data: {\n", b'"error": {"message":"x"}}\n\n'], True),
        ([b'data: {"object":\n', b'"error"}\n\n'], True),
        ([b"{\n", b'  "error": "x"\n}\n'], True),
        ([ERROR, b'data: {"text":"' + b"y" * 60_000 + b'"}\n\n'], False),
        ([ERROR, b": a comment\n\n", DONE], True),
        ([b": a comment\n\n", ERROR], True),
        ([b'data: {"choices":[]}\r\n\r\n', ERROR], True),
    ],
)
async def test_an_error_in_several_reads_or_far_from_the_end(pieces: list[bytes], seen: bool) -> None:
    stream = b"".join([FIRST, *pieces])
    cuts = [len(FIRST), *(len(b"".join([FIRST, *pieces[:number]])) for number in range(1, len(pieces)))]
    way, _, _ = await passing(stream, cuts)
    assert (error_in(way.end) is not None) is seen
