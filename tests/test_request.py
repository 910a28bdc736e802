"""A request's marks: how it ended, its record, its times; and the list of those alive."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.errors import Code, EngineError, GatewayError
from gateway.headers import Caller
from gateway.request import FAREWELL_SECONDS, Request
from gateway.requests import Requests
from gateway.spool import Spool
from gateway.words import Outcome

STOP = GatewayError(Code.CANCELLED, "The request was cancelled by an operator.")
DRAIN = GatewayError(Code.DRAINING, "The gateway is shutting down.")
FAILURE = EngineError(Code.ENGINE_FAILED, "broke off")
TIMEOUT = EngineError(Code.ENGINE_TIMEOUT, "too slow")
OTHERWISE = GatewayError(Code.ENGINE_FAILED, "The gateway failed; its log says why.")
REFUSAL = GatewayError(Code.INVALID_REQUEST, "no model", param="model")


def make(path: str = "/v1/chat/completions", **changes: Any) -> Request:
    given: dict[str, Any] = {
        "method": "POST",
        "path": path,
        "query": b"",
        "headers": [(b"X-Request-Id", b"theirs")],
        "caller": Caller("203.0.113.9", "http"),
    }
    return Request(**{**given, **changes})


# ------------------------------------------------------------------------------------ how it ended


async def test_without_a_word_it_ended_as_its_keeper_says() -> None:
    request = make()
    request.status = 200
    request.ended(OTHERWISE)
    record = request.record()
    assert (record["outcome"], record["status"], record["code"]) == ("engine_failed", 502, "engine_failed")
    assert record["detail"] == OTHERWISE.message


ENDS: dict[str, Callable[[Request], None]] = {
    "completed": Request.answered,
    "client_gone": Request.client_left,
    "client_stalled": Request.client_stalled,
    "cancelled": lambda request: request.failed(STOP),
    "drained": lambda request: request.failed(DRAIN),
    "engine_timeout": lambda request: request.failed(TIMEOUT),
    "engine_failed": lambda request: request.failed(FAILURE),
    "rejected": lambda request: request.failed(REFUSAL),
}


async def test_each_end_has_its_outcome() -> None:
    for outcome, end in ENDS.items():
        request = make()
        end(request)
        request.ended(OTHERWISE)
        assert request.outcome == outcome


async def test_of_two_ends_at_once_the_first_in_the_order_of_the_contract_counts() -> None:
    order = list(ENDS)
    for one, other in permutations(order[1:], 2):
        if (one, other) == ("client_stalled", "client_gone"):
            continue
        request = make()
        ENDS[one](request)
        ENDS[other](request)
        request.ended(OTHERWISE)
        assert request.outcome == min(one, other, key=order.index)


async def test_a_connection_that_was_cut_off_says_nothing_about_the_client(autojump_clock: MockClock) -> None:
    request = make()
    request.client_stalled()
    request.client_left()
    request.ended(OTHERWISE)
    assert request.outcome is Outcome.CLIENT_STALLED
    request = make()
    request.stop(STOP)
    await trio.sleep(FAREWELL_SECONDS)
    request.client_left()
    request.ended(OTHERWISE)
    assert request.outcome is Outcome.CANCELLED
    request = make()
    request.stop(STOP)
    await trio.sleep(FAREWELL_SECONDS / 2)
    request.client_left()
    request.ended(OTHERWISE)
    assert request.outcome is Outcome.CLIENT_GONE


async def test_nothing_changes_an_answer_that_was_complete() -> None:
    for other, end in ENDS.items():
        request = make()
        request.status = 200
        request.answered()
        end(request)
        request.stop(STOP)
        request.ended(OTHERWISE)
        record = request.record()
        assert (record["outcome"], record["status"], record["code"]) == ("completed", 200, None), other
        assert record["teardown_ms"] is None


async def test_who_leaves_just_before_the_last_byte_was_answered_all_the_same() -> None:
    request = make()
    request.client_left()
    request.answered()
    request.ended(OTHERWISE)
    assert request.outcome is Outcome.COMPLETED


async def test_a_refusal_that_was_sent_whole_stays_a_refusal() -> None:
    request = make()
    request.failed(REFUSAL)
    request.answered()
    request.client_left()
    request.stop(DRAIN)
    request.ended(OTHERWISE)
    assert request.outcome is Outcome.REJECTED
    assert request.record()["code"] == "invalid_request"


async def test_what_stopped_it_counts_when_nothing_else_was_said() -> None:
    for reason, outcome in ((STOP, "cancelled"), (DRAIN, "drained")):
        request = make()
        request.status = 200
        request.stop(reason)
        request.ended(OTHERWISE)
        record = request.record()
        assert (record["outcome"], record["code"], record["status"]) == (outcome, reason.code, 503)


async def test_of_two_reasons_to_stop_it_the_first_in_the_order_of_outcomes_is_told() -> None:
    for reasons in ((STOP, DRAIN), (DRAIN, STOP)):
        request = make()
        for reason in reasons:
            request.stop(reason)
        assert request.stopped_by is STOP
        request.ended(OTHERWISE)
        assert request.outcome is Outcome.CANCELLED


async def test_whoever_is_refused_as_he_is_stopped_is_told_of_the_stop() -> None:
    request = make()
    request.stop(DRAIN)
    request.failed(REFUSAL)
    assert request.error is DRAIN
    request.ended(OTHERWISE)
    assert request.outcome is Outcome.DRAINED


async def test_an_engine_that_fails_once_its_request_is_stopped_is_not_to_blame() -> None:
    for error in (FAILURE, TIMEOUT):
        request = make()
        request.stop(STOP)
        request.failed(error)
        request.ended(OTHERWISE)
        record = request.record()
        assert (record["outcome"], record["code"], record["status"]) == ("cancelled", "cancelled", 503)


async def test_a_leaver_is_never_an_engines_fault() -> None:
    request = make()
    request.failed(FAILURE)
    request.client_left()
    request.ended(OTHERWISE)
    assert request.outcome is Outcome.CLIENT_GONE
    assert request.record()["status"] == 499


# --------------------------------------------------------------------------- ending it from outside


async def test_a_client_that_leaves_cancels_everything_at_once() -> None:
    for leave in (Request.client_left, Request.client_stalled):
        request = make()
        leave(request)  # Before there is a nursery nothing is to be cancelled.
        request = make()
        with trio.CancelScope() as whole:
            request.whole = whole
            leave(request)
            await trio.lowlevel.checkpoint()
        assert whole.cancelled_caught


async def test_a_stop_cancels_the_engines_side_and_leaves_the_client_a_second(
    autojump_clock: MockClock,
) -> None:
    request = make()
    request.reading = trio.CancelScope()
    stopped = []

    async def prepare() -> None:
        with pytest.raises(GatewayError) as told:
            await request.unless_stopped(trio.Event().wait())
        stopped.append(told.value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(prepare)
        await wait_all_tasks_blocked()
        request.stop(STOP)
        with request.reading:
            await trio.lowlevel.checkpoint()
    assert request.reading.cancelled_caught
    assert stopped == [STOP]
    start = trio.current_time()
    with request.writing:
        await trio.sleep(100)
    assert trio.current_time() - start == FAREWELL_SECONDS


async def test_a_stop_never_gives_the_client_more_time_than_it_had(autojump_clock: MockClock) -> None:
    request = make()
    request.writing.deadline = trio.current_time() + 0.25
    request.stop(STOP)
    assert request.writing.deadline == trio.current_time() + 0.25


# -------------------------------------------------------------------------------------- while it lives


async def test_its_view_while_it_lives(autojump_clock: MockClock) -> None:
    request = make()
    assert request.view()["spooled_bytes"] == 0
    request.route, request.model, request.stream = "/v1/chat/completions", "m", False
    request.dispatched("gpu0")
    request.spool = Spool(100)
    request.spool.push(b"12345")
    await trio.sleep(1.5)
    assert request.view() == {
        "id": request.id,
        "caller_id": "theirs",
        "tenant": None,
        "route": "/v1/chat/completions",
        "model": "m",
        "engine": "gpu0",
        "stream": False,
        "phase": "connecting",
        "age_seconds": 1.5,
        "bytes": 0,
        "events": 0,
        "spooled_bytes": 5,
    }
    assert request.id in repr(request)


async def test_the_list_of_live_requests() -> None:
    requests = Requests()
    with trio.fail_after(0):
        await requests.none_left()
    one, two = make(), make()
    requests.add(one)
    requests.add(two)
    assert len(requests) == 2
    assert [*requests] == [one, two]
    assert requests.get(two.id) is two
    for request in requests:
        requests.remove(request)
    assert requests.get(two.id) is None
    with pytest.raises(KeyError):
        requests.remove(one)


async def test_whoever_waits_for_the_last_to_go_isnt_woken_before() -> None:
    requests = Requests()
    woken: list[str] = []

    async def wait() -> None:
        await requests.none_left()
        woken.append("woken")

    one, two = make(), make()
    requests.add(one)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        requests.remove(one)
        requests.add(two)  # Before the waiter has run: it goes on waiting.
        await wait_all_tasks_blocked()
        assert woken == []
        requests.remove(two)
    assert woken == ["woken"]
