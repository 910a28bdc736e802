"""The access record of a request, and the times in it."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gateway.dialect import ROUTES
from gateway.errors import Code, EngineError, GatewayError
from gateway.events import SseTail
from gateway.headers import Caller
from gateway.request import Request
from gateway.spool import Spool
from gateway.words import Phase

STOP = GatewayError(Code.CANCELLED, "The request was cancelled by an operator.")
TIMEOUT = EngineError(Code.ENGINE_TIMEOUT, "too slow")
OTHERWISE = GatewayError(Code.ENGINE_FAILED, "The gateway failed; its log says why.")


def make(path: str = "/v1/chat/completions", **changes: Any) -> Request:
    given: dict[str, Any] = {
        "method": "POST",
        "path": path,
        "query": b"",
        "headers": [(b"X-Request-Id", b"theirs")],
        "caller": Caller("203.0.113.9", "http"),
    }
    return Request(**{**given, **changes})


async def test_the_record_of_a_stream(autojump_clock: MockClock) -> None:
    request = make()
    request.route = "/v1/chat/completions"
    request.model, request.stream, request.status = "m", True, 200
    request.tail = SseTail(ROUTES[request.route].markers)
    phases, dispatched = [request.phase], [request.dispatched_to_engine]
    await trio.sleep(1)
    request.queued()
    phases.append(request.phase)
    dispatched.append(request.dispatched_to_engine)
    await trio.sleep(2)
    request.dispatched("gpu0")
    phases.append(request.phase)
    dispatched.append(request.dispatched_to_engine)
    await trio.sleep(3)
    request.passed(b": still alive\n\n")
    phases.append(request.phase)
    assert phases == [Phase.RECEIVING, Phase.QUEUED, Phase.CONNECTING, Phase.STREAMING]
    assert dispatched == [False, False, True]
    await trio.sleep(1)
    request.passed(b"data: {}\n\n")
    await trio.sleep(1)
    request.passed(b"data: [DONE]\n\n")
    request.spool = Spool(100)
    request.spool.sent = 40
    request.upstream_closed()
    request.answered()
    await trio.sleep(1)
    request.ended(OTHERWISE)
    assert request.record() == {
        "id": request.id,
        "caller_id": "theirs",
        "client": "203.0.113.9",
        "tenant": None,
        "priority": None,
        "method": "POST",
        "route": "/v1/chat/completions",
        "path": None,
        "model": "m",
        "served_model": "m",
        "engine": "gpu0",
        "stream": True,
        "status": 200,
        "outcome": "completed",
        "phase": "streaming",
        "code": None,
        "detail": None,
        "attempts": 1,
        "reserved_tokens": None,
        "queue_ms": 2000,
        "ttft_ms": 7000,
        "duration_ms": 9000,
        "bytes": 40,
        "events": 3,
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "usage_source": "counted",
        "teardown_ms": None,
        "reclaim_ms": None,
        "reclaimed_by": None,
    }


async def test_the_record_of_a_refusal(autojump_clock: MockClock) -> None:
    request = make("/v1/audio/" + "x" * 1000, caller=Caller("", "http"), headers=[])
    request.status = 404
    request.failed(GatewayError(Code.NOT_FOUND, "There is no such path."))
    await trio.sleep(0.25)
    request.ended(OTHERWISE)
    record = request.record()
    assert record["path"] == request.path[:256]
    assert (record["route"], record["client"], record["caller_id"]) == ("other", None, None)
    assert (record["status"], record["code"], record["outcome"]) == (404, "not_found", "rejected")
    assert record["detail"] == "There is no such path."
    assert (record["engine"], record["attempts"], record["queue_ms"], record["ttft_ms"]) == (
        None,
        0,
        None,
        None,
    )
    assert record["duration_ms"] == 250


async def test_an_answer_that_broke_off_counts_as_what_broke_it_off() -> None:
    request = make()
    request.status = 200
    request.failed(TIMEOUT)
    request.ended(OTHERWISE)
    assert (request.record()["status"], request.record()["outcome"]) == (504, "engine_timeout")


async def test_a_long_model_name_is_cut_in_the_record() -> None:
    request = make()
    request.model = "m" * 1000
    request.ended(OTHERWISE)
    assert request.record()["model"] == "m" * 256


async def test_who_didnt_have_to_wait_waited_for_no_time(autojump_clock: MockClock) -> None:
    request = make()
    await trio.sleep(1)
    request.dispatched("gpu0")
    assert request.queue_seconds == 0


async def test_a_second_attempt_is_counted_and_the_wait_began_with_the_first(
    autojump_clock: MockClock,
) -> None:
    request = make()
    request.queued()
    await trio.sleep(1)
    request.dispatched("gpu0")
    request.queued()
    await trio.sleep(1)
    request.dispatched("gpu1")
    assert (request.attempts, request.engine, request.queue_seconds) == (2, "gpu1", 1)


async def test_ids_are_minted_one_for_each_request() -> None:
    ids = {make().id for _ in range(100)}
    assert len(ids) == 100
    assert all(len(each) == 24 and each.isalnum() for each in ids)


# ----------------------------------------------------------------------------------------- teardown


@pytest.mark.parametrize("cut", [Request.client_left, Request.client_stalled, lambda r: r.stop(STOP)])
async def test_teardown_is_from_the_cut_to_the_close_of_the_engines_side(
    cut: Any, autojump_clock: MockClock
) -> None:
    request = make()
    request.dispatched("gpu0")
    await trio.sleep(1)
    cut(request)
    await trio.sleep(0.25)
    cut(request)  # The first one counts.
    await trio.sleep(0.25)
    request.upstream_closed()
    await trio.sleep(1)
    request.ended(OTHERWISE)
    assert request.teardown_seconds == 0.5
    assert request.record()["teardown_ms"] == 500


async def test_there_is_no_teardown_where_no_engine_was_called_or_it_had_ended(
    autojump_clock: MockClock,
) -> None:
    request = make()
    request.client_left()
    request.upstream_closed()
    request.ended(OTHERWISE)
    assert request.teardown_seconds is None
    request = make()
    request.dispatched("gpu0")
    request.upstream_closed()
    await trio.sleep(1)
    request.client_left()
    request.ended(OTHERWISE)
    assert request.teardown_seconds is None
