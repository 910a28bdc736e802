"""Answers of the gateway's own, and knowing when the client has all of one."""

from __future__ import annotations

import json

import pytest

from gateway.dialect import ROUTES
from gateway.errors import Code, GatewayError
from gateway.events import SseTail, Tail
from gateway.headers import Caller
from gateway.request import Request
from gateway.response import Response, refusal, whole
from gateway.spool import Spool
from gateway.words import RawHeaders


def make(path: str, headers: RawHeaders | None = None) -> Request:
    return Request(method="POST", path=path, query=b"", headers=headers or [], caller=Caller("", "http"))


async def test_an_answer_of_our_own_is_complete_from_the_start() -> None:
    request = make("/v1/models")
    response = whole(request, 200, [(b"X-Extra", b"1")], b'{"data":[]}')
    assert response.status == 200
    assert response.headers == [
        (b"Content-Type", b"application/json"),
        (b"Content-Length", b"11"),
        (b"X-Request-Id", request.id.encode()),
        (b"X-Extra", b"1"),
    ]
    assert await response.spool.get() == b'{"data":[]}'
    assert await response.spool.get() == b""
    assert response.spool.failure is None
    assert response.route is None
    assert type(response.tail) is Tail


async def test_an_empty_answer_ends_at_once() -> None:
    response = whole(make("/"), 204, [], b"")
    assert (b"Content-Length", b"0") in response.headers
    assert await response.spool.get() == b""


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        (
            "/v1/chat/completions",
            {"error": {"message": "m", "type": "rate_limit_error", "param": None, "code": "queue_full"}},
        ),
        (
            "/v1/messages",
            {"type": "error", "error": {"type": "rate_limit_error", "message": "m", "code": "queue_full"}},
        ),
        ("/api/chat", {"error": "m", "code": "queue_full"}),
        (
            "/nowhere",
            {"error": {"message": "m", "type": "rate_limit_error", "param": None, "code": "queue_full"}},
        ),
    ],
)
async def test_a_refusal_has_the_shape_of_the_api_that_was_called(path: str, shape: object) -> None:
    response = refusal(make(path), GatewayError(Code.QUEUE_FULL, "m"))
    body = await response.spool.get()
    assert json.loads(body) == shape
    assert (b"Content-Length", b"%d" % len(body)) in response.headers
    assert response.status == 429


@pytest.mark.parametrize("code", Code)
async def test_429_and_503_say_when_to_come_again(code: Code) -> None:
    error = GatewayError(code, "m")
    response = refusal(make("/v1/completions"), error)
    names = [name for name, _ in response.headers]
    assert response.status == error.status
    assert (b"Retry-After" in names) == (error.status in (429, 503))
    assert (b"Retry-After", b"1") in response.headers or error.status not in (429, 503)


async def test_what_an_operator_cancelled_is_not_to_be_tried_again() -> None:
    for code in Code:
        response = refusal(make("/v1/completions"), GatewayError(code, "m"))
        assert ((b"x-should-retry", b"false") in response.headers) == (code is Code.CANCELLED)


async def test_the_callers_own_id_is_echoed() -> None:
    response = refusal(make("/", [(b"x-request-id", b"theirs")]), GatewayError(Code.NOT_FOUND, "m"))
    assert (b"X-Request-Id", b"theirs") in response.headers


def test_by_its_length_a_client_knows_that_it_has_all() -> None:
    response = Response(200, [(b"content-LENGTH", b"10")], Spool(100), Tail())
    told = []
    for response.spool.sent in (0, 9, 10, 11):
        told.append(response.is_all())
    assert told == [False, False, True, False]


async def test_by_the_last_event_a_client_knows_that_it_has_all() -> None:
    tail, spool = SseTail(ROUTES["/v1/completions"].markers), Spool(100)
    response = Response(200, [], spool, tail)
    tail.feed(b"data: [DONE]\n\n")
    spool.push(b"data: [DONE]\n\n")
    assert not response.is_all()
    await spool.get()
    assert response.is_all()


def test_without_length_or_last_event_only_the_end_tells() -> None:
    response = Response(200, [], Spool(100), SseTail(ROUTES["/v1/completions"].markers))
    assert not response.is_all()
    response.spool.sent = 100
    assert not response.is_all()
