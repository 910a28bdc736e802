"""The writer: what goes to the client, in which order, and how it ends."""

from __future__ import annotations

from math import inf

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.dialect import ROUTES
from gateway.errors import Code, EngineError, GatewayError
from gateway.events import NdjsonTail, SseTail, Tail
from gateway.request import Request
from gateway.response import Response, refusal
from gateway.spool import Spool
from gateway.words import Outcome
from gateway.writer import write
from tests.fakes import CANCELLED, CHAT, DRAINED, EVENT, HALF, LAST, FakeClient, make_request

HEARTBEAT = b": heartbeat\n\n"
NOTHING_SAID = GatewayError(Code.ENGINE_FAILED, "Nothing was said about it.")
FAILED = EngineError(Code.ENGINE_FAILED, "The engine's answer broke off: reset.")


class Answer:
    """An answer on its way: a request, a spool that the test fills, and the client."""

    def __init__(self, path: str = CHAT, tail: Tail | None = None, *, length: int | None = None) -> None:
        route = ROUTES[path]
        self.request = make_request(path)
        self.spool = Spool(4096)
        self.tail = tail if tail is not None else SseTail(route.markers)
        headers = [(b"Content-Length", b"%d" % length)] if length is not None else [(b"X-A", b"b")]
        self.response = Response(200, headers, self.spool, self.tail, route)
        self.client = FakeClient()
        self.client.request = self.request

    def put(self, data: bytes) -> None:
        self.request.passed(data)
        self.tail.feed(data)
        self.spool.push(data, self.tail.done)

    async def write(self, heartbeat_seconds: float = inf) -> None:
        await write(self.request, self.client, self.response, heartbeat_seconds)
        self.request.ended(NOTHING_SAID)

    @property
    def outcome(self) -> Outcome:
        return self.request.outcome


async def test_head_bytes_and_end_go_out_in_order() -> None:
    answer = Answer()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer.write)
        await wait_all_tasks_blocked()
        assert (answer.client.status, answer.client.headers) == (200, [(b"X-A", b"b")])
        assert answer.client.sent == []
        for data in (EVENT, LAST):
            answer.put(data)
            await wait_all_tasks_blocked()
            assert answer.client.sent[-1] == data, "a piece waits for the next"
        too_early = answer.client.finished
        answer.spool.end()
    assert (too_early, answer.client.finished) == (False, True)
    assert answer.request.bytes == len(EVENT + LAST)
    assert (answer.outcome, answer.request.status) == (Outcome.COMPLETED, 200)


async def test_what_has_gathered_meanwhile_goes_in_one_piece() -> None:
    answer = Answer()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer.write)
        answer.put(EVENT)
        await wait_all_tasks_blocked()
        answer.client.stop_reading()
        answer.put(EVENT)
        await wait_all_tasks_blocked()
        for _ in range(3):
            answer.put(EVENT)
        answer.put(LAST)
        answer.spool.end()
        answer.client.read_on()
    assert answer.client.sent == [EVENT, EVENT, EVENT * 3 + LAST]


@pytest.mark.parametrize(
    ("path", "event"),
    [
        (
            CHAT,
            b'data: {"error":{"message":"The engine\'s answer broke off: reset.","type":"server_error",'
            b'"param":null,"code":"engine_failed"}}\n\n',
        ),
        (
            "/v1/responses",
            b'event: error\ndata: {"type":"error","code":"engine_failed",'
            b'"message":"The engine\'s answer broke off: reset.","param":null}\n\n',
        ),
        (
            "/v1/messages",
            b'event: error\ndata: {"type":"error","error":{"type":"api_error",'
            b'"message":"The engine\'s answer broke off: reset.","code":"engine_failed"}}\n\n',
        ),
        ("/api/chat", b'{"error":"The engine\'s answer broke off: reset.","code":"engine_failed"}\n'),
    ],
)
async def test_failure_is_the_last_event_and_the_end_abnormal(path: str, event: bytes) -> None:
    answer = Answer(path, NdjsonTail() if path == "/api/chat" else None)
    piece = b'{"done":false}\n' if path == "/api/chat" else EVENT
    answer.put(piece)
    answer.spool.end(FAILED)
    await answer.write()
    assert answer.client.got == piece + event
    assert not answer.client.finished
    assert answer.client.aborted_at is None
    assert answer.outcome is Outcome.ENGINE_FAILED
    assert answer.request.record()["status"] == 502
    assert answer.request.bytes == len(piece), "the gateway's own event isn't the engine's bytes"


@pytest.mark.parametrize(
    ("tail", "half"), [(None, HALF), (NdjsonTail(), b'{"done":fal'), (Tail(), b'{"choices":[')]
)
async def test_nothing_is_put_inside_half_an_event(tail: Tail | None, half: bytes) -> None:
    answer = Answer(CHAT, tail)
    answer.put(half)
    answer.spool.end(FAILED)
    await answer.write()
    assert answer.client.got == half
    assert not answer.client.finished
    assert answer.outcome is Outcome.ENGINE_FAILED


async def test_farewell_is_bounded_and_a_stuck_client_is_cut_off(autojump_clock: MockClock) -> None:
    answer = Answer()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer.write)
        answer.put(EVENT)
        await wait_all_tasks_blocked()
        answer.client.stop_reading()
        since = trio.current_time()
        answer.spool.end(FAILED)
    assert trio.current_time() - since == pytest.approx(1)
    assert answer.client.aborted_at == trio.current_time()
    assert answer.client.got == EVENT
    assert answer.outcome is Outcome.ENGINE_FAILED


async def test_slow_reader_gets_everything_before_the_farewell(autojump_clock: MockClock) -> None:
    """The second of the farewell begins with it, not with the engine's failure."""
    answer = Answer()
    async with trio.open_nursery() as nursery:
        answer.client.stop_reading()
        nursery.start_soon(answer.write)
        answer.put(EVENT)
        answer.spool.end(FAILED)
        await trio.sleep(600)
        answer.client.read_on()
    assert answer.client.got.startswith(EVENT + b'data: {"error"')
    assert answer.client.aborted_at is None


@pytest.mark.parametrize(
    ("reason", "outcome", "status"),
    [(CANCELLED, Outcome.CANCELLED, 503), (DRAINED, Outcome.DRAINED, 503)],
)
async def test_stuck_client_is_cut_off_a_second_after_the_stop(
    reason: GatewayError, outcome: Outcome, status: int, autojump_clock: MockClock
) -> None:
    answer = Answer()
    async with trio.open_nursery() as nursery:
        answer.client.stop_reading()
        nursery.start_soon(answer.write)
        answer.put(EVENT)
        await trio.sleep(5)
        answer.request.stop(reason)
        answer.spool.end(reason)
    assert answer.client.aborted_at == trio.current_time() == 6
    assert (answer.client.status, answer.client.got, answer.client.finished) == (None, b"", False)
    assert (answer.outcome, answer.request.record()["status"]) == (outcome, status)
    assert answer.request.record()["code"] == reason.code


async def test_one_who_reads_within_that_second_is_told(autojump_clock: MockClock) -> None:
    answer = Answer()
    async with trio.open_nursery() as nursery:
        answer.client.stop_reading()
        nursery.start_soon(answer.write)
        answer.put(EVENT)
        await trio.sleep(5)
        answer.request.stop(CANCELLED)
        answer.spool.end(CANCELLED)
        await trio.sleep(0.9)
        answer.client.read_on()
    assert answer.client.aborted_at is None
    assert b'"code":"cancelled"' in answer.client.got
    assert answer.outcome is Outcome.CANCELLED


async def test_refusal_that_nobody_takes_is_given_up_when_the_drain_is_over(
    autojump_clock: MockClock,
) -> None:
    request, client = make_request(), FakeClient()
    error = GatewayError(Code.QUEUE_FULL, "Too many.")
    request.failed(error)
    async with trio.open_nursery() as nursery:
        client.stop_reading()
        nursery.start_soon(write, request, client, refusal(request, error), inf)
        await wait_all_tasks_blocked()
        request.stop(DRAINED)
    assert client.aborted_at == 1
    request.ended(NOTHING_SAID)
    assert request.outcome is Outcome.SHED


# What counts as the whole answer.


async def gone_after(answer: Answer) -> Request:
    """The client leaves when everything put so far has been sent; then the writer is cancelled."""
    with trio.CancelScope() as answer.request.whole:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer.write)
            await wait_all_tasks_blocked()
            answer.client.leave()
    answer.request.ended(NOTHING_SAID)
    return answer.request


async def test_leaving_after_the_last_event_is_no_abort() -> None:
    answer = Answer()
    answer.put(EVENT + LAST)
    request = await gone_after(answer)
    assert (request.outcome, request.record()["status"]) == (Outcome.COMPLETED, 200)


async def test_leaving_after_the_announced_length_is_no_abort() -> None:
    answer = Answer(tail=Tail(), length=4)
    answer.put(b'"ok"')
    assert (await gone_after(answer)).outcome is Outcome.COMPLETED


@pytest.mark.parametrize("length", [None, 5])
async def test_leaving_before_the_whole_answer_is(length: int | None) -> None:
    answer = Answer(tail=Tail(), length=length)
    answer.put(b'"ok"')
    request = await gone_after(answer)
    assert (request.outcome, request.record()["status"]) == (Outcome.CLIENT_GONE, 499)


async def test_leaving_with_the_last_bytes_stuck_is_an_abort() -> None:
    """The write that is let go of returns as if it had been read; it hasn't."""
    answer = Answer()
    answer.client.stop_reading()
    answer.put(EVENT + LAST)
    answer.spool.end()
    request = await gone_after(answer)
    assert request.outcome is Outcome.CLIENT_GONE
    assert request.bytes == 0


async def test_client_cut_off_in_the_last_write_has_not_got_the_answer(autojump_clock: MockClock) -> None:
    answer = Answer()
    answer.put(EVENT + LAST)
    answer.spool.end()
    answer.client.stop_reading()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer.write)
        await wait_all_tasks_blocked()
        answer.request.stop(CANCELLED)
    assert answer.outcome is Outcome.CANCELLED
    assert not answer.client.finished


# Past the spool: what the client takes without waiting.


async def outlet(at_once: int, nursery: trio.Nursery, heartbeat_seconds: float = inf) -> Answer:
    answer = Answer()
    answer.client.at_once = at_once
    nursery.start_soon(answer.write, heartbeat_seconds)
    await wait_all_tasks_blocked()
    return answer


async def test_piece_is_with_the_client_at_once_while_the_writer_waits() -> None:
    async with trio.open_nursery() as nursery:
        answer = await outlet(1000, nursery)
        for number in (1, 2, 3):
            answer.put(EVENT)
            assert answer.client.sent == [EVENT] * number
            assert (answer.request.bytes, answer.spool.held) == (number * len(EVENT), 0)
        answer.put(LAST)
        answer.spool.end()
    assert (answer.client.finished, answer.outcome) == (True, Outcome.COMPLETED)


async def test_rest_of_a_piece_goes_before_all_that_follows() -> None:
    async with trio.open_nursery() as nursery:
        answer = await outlet(5, nursery)
        answer.put(EVENT)
        answer.put(EVENT)
        assert answer.client.sent == [EVENT[:5]]
        await wait_all_tasks_blocked()
        assert answer.client.sent == [EVENT[:5], EVENT[5:], EVENT]
        answer.client.stop_reading()
        answer.put(EVENT)
        answer.spool.end(FAILED)
        await wait_all_tasks_blocked()
        answer.client.read_on()
    assert answer.client.got.startswith(EVENT * 3 + b'data: {"error"')
    assert answer.request.bytes == 3 * len(EVENT)


@pytest.mark.parametrize(("at_once", "outcome"), [(1000, Outcome.COMPLETED), (5, Outcome.CLIENT_GONE)])
async def test_answer_is_whole_when_its_last_event_went_at_once(at_once: int, outcome: Outcome) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            answer = await outlet(at_once, nursery)
            answer.request.whole = scope
            answer.put(EVENT + LAST)
            answer.client.leave()
    answer.request.ended(NOTHING_SAID)
    assert answer.request.outcome is outcome


async def test_nothing_goes_past_a_writer_that_minds_heartbeats() -> None:
    async with trio.open_nursery() as nursery:
        answer = await outlet(1000, nursery, 10)
        answer.put(EVENT)
        assert EVENT not in answer.client.sent
        await wait_all_tasks_blocked()
        assert answer.client.sent == [HEARTBEAT, EVENT]
        answer.put(LAST)
        answer.spool.end()


# Heartbeats.


async def test_heartbeats_fill_silence_between_events(autojump_clock: MockClock) -> None:
    answer = Answer()
    answer.put(EVENT)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer.write, 10)
        await trio.sleep(25)
        answer.put(EVENT)
        await trio.sleep(9)
        answer.put(LAST)
        answer.spool.end()
    assert answer.client.sent == [EVENT, HEARTBEAT, HEARTBEAT, EVENT, LAST]
    assert answer.client.sent_at == [0, 10, 20, 25, 34]
    assert answer.request.bytes == len(EVENT * 2 + LAST)


async def test_no_heartbeat_inside_an_event(autojump_clock: MockClock) -> None:
    answer = Answer()
    answer.put(EVENT + HALF)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer.write, 10)
        await trio.sleep(35)
        answer.put(b"1}\n\n")
        await trio.sleep(12)
        answer.put(LAST)
        answer.spool.end()
    assert answer.client.sent == [EVENT + HALF, b"1}\n\n", HEARTBEAT, LAST]


@pytest.mark.parametrize("tail", [Tail(), NdjsonTail()])
async def test_only_event_streams_have_heartbeats(tail: Tail, autojump_clock: MockClock) -> None:
    answer = Answer("/api/chat", tail)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer.write, 10)
        await trio.sleep(100)
        answer.put(b'{"done":true}\n')
        answer.spool.end()
    assert answer.client.sent == [b'{"done":true}\n']


async def test_the_heartbeat_that_commits_goes_out_at_once(autojump_clock: MockClock) -> None:
    answer = Answer()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer.write, 10)
        await trio.sleep(15)
        answer.put(LAST)
        answer.spool.end()
    assert (answer.client.sent, answer.client.sent_at) == ([HEARTBEAT, HEARTBEAT, LAST], [0, 10, 15])


async def test_no_heartbeat_before_bytes_that_are_there(autojump_clock: MockClock) -> None:
    answer = Answer()
    answer.put(LAST)
    answer.spool.end()
    await answer.write(10)
    assert answer.client.sent == [LAST]
