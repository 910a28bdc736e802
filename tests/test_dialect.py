"""The APIs: which paths there are, how each says it is done, how each is told an error."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from gateway.config import Kind
from gateway.dialect import (
    ROUTES,
    Api,
    Route,
    api_of_path,
    error_body,
    error_event,
    tail_for,
    unknown_path,
)
from gateway.errors import Code, GatewayError
from gateway.events import NdjsonTail, SseTail, Tail
from gateway.profiles import PROFILES

CHAT = ROUTES["/v1/chat/completions"]
RESPONSES = ROUTES["/v1/responses"]
MESSAGES = ROUTES["/v1/messages"]
OLLAMA = ROUTES["/api/chat"]
SSE = (b"Content-Type", b"text/event-stream")
NDJSON = (b"content-type", b"application/x-ndjson")

OPENAI_PATHS = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/responses",
    "/v1/messages",
    "/tokenize",
}
OLLAMA_PATHS = {"/api/chat", "/api/generate", "/api/embed"}


# ----------------------------------------------------------------------------------------- the table


def test_the_table_is_closed() -> None:
    assert {*ROUTES} == OPENAI_PATHS | OLLAMA_PATHS
    assert all(path == route.path for path, route in ROUTES.items())


@pytest.mark.parametrize("kind", get_args(Kind))
def test_each_kind_has_its_routes(kind: Kind) -> None:
    if kind == "ollama":
        assert PROFILES[kind].paths == (OPENAI_PATHS | OLLAMA_PATHS) - {"/v1/rerank", "/tokenize"}
    else:
        assert PROFILES[kind].paths == OPENAI_PATHS


def test_an_absent_stream_means_true_on_ollamas_native_routes_alone() -> None:
    assert {path for path, route in ROUTES.items() if route.streams} == {"/api/chat", "/api/generate"}


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", Api.OPENAI),
        ("/v1/messages", Api.ANTHROPIC),
        ("/v1/messages/batches", Api.ANTHROPIC),
        ("/v1/messagesx", Api.OPENAI),
        ("/api/chat", Api.OLLAMA),
        ("/api/pull", Api.OLLAMA),
        ("/apix", Api.OPENAI),
        ("/", Api.OPENAI),
        ("*", Api.OPENAI),
        ("", Api.OPENAI),
    ],
)
def test_every_path_has_an_api_whose_errors_it_gets(path: str, api: Api) -> None:
    assert api_of_path(path) is api
    assert path not in ROUTES or ROUTES[path].api is api


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/chat", None),
        ("/v1/v1/v1/messages", None),
    ],
)
def test_a_base_url_with_too_much_or_too_little_is_guessed(path: str, meant: str | None) -> None:
    message = unknown_path(path, {"/v1/chat/completions", "/v1/messages"}).message
    assert (f" Is {meant} meant, with another base URL? " in message) == (meant is not None)
    assert ("meant" in message) == (meant is not None)


def test_a_slash_too_many_is_pointed_at() -> None:
    message = unknown_path("/v1/messages/", {"/v1/messages"}).message
    assert message.startswith("There is no /v1/messages/ here. Is /v1/messages meant?")


def test_an_unknown_path_is_told_the_known_ones_and_no_more_than_its_beginning() -> None:
    error = unknown_path("/api/delete" + "x" * 1000, {"/v1/completions", "/api/chat"})
    assert error.code is Code.NOT_FOUND
    assert len(error.message) < 400
    assert "/api/chat, /v1/completions;" in error.message


# ---------------------------------------------------------------------------- what watches an answer


@pytest.mark.parametrize(
    "kind",
    [
        b"text/event-stream",
        b"TEXT/Event-Stream",
        b" text/event-stream ; charset=utf-8",
        b"text/event-stream;",
    ],
)
@pytest.mark.parametrize("route", ROUTES.values(), ids=lambda route: route.path)
def test_an_event_stream_is_known_by_its_content_type(route: Route, kind: bytes) -> None:
    assert type(tail_for(route, [(b"CONTENT-TYPE", kind)], 200)) is SseTail


def test_lines_of_json_end_with_done_on_the_routes_that_stream_them() -> None:
    ndjson = [path for path, route in ROUTES.items() if type(tail_for(route, [NDJSON], 200)) is NdjsonTail]
    assert ndjson == ["/api/chat", "/api/generate"]
    assert type(tail_for(ROUTES["/api/embed"], [NDJSON], 200)) is Tail


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"Content-Type", b"")],
        [(b"Content-Type", b"application/json")],
        [(b"Content-Type", b"text/event-streams")],
        [(b"Content-Type", b"text/plain; text/event-stream")],
        [(b"X-Content-Type", b"text/event-stream")],
        [SSE, (b"Content-Encoding", b"gzip")],
        [NDJSON, (b"content-encoding", b"br")],
    ],
)
def test_any_other_body_is_opaque(headers: list[tuple[bytes, bytes]]) -> None:
    for route in ROUTES.values():
        assert type(tail_for(route, headers, 200)) is Tail


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503, 599])
def test_an_error_answer_is_opaque_whatever_its_type(status: int) -> None:
    assert type(tail_for(CHAT, [SSE], status)) is Tail
    assert type(tail_for(OLLAMA, [NDJSON], status)) is Tail


@pytest.mark.parametrize("status", [200, 201, 299, 399])
def test_an_unencoded_stream_is_watched(status: int) -> None:
    assert type(tail_for(CHAT, [SSE, (b"Content-Encoding", b" Identity ")], status)) is SseTail


# ----------------------------------------------------------------------------------------- of errors


def body(api: Api, code: Code, param: str | None = None) -> Any:
    return json.loads(error_body(api, GatewayError(code, 'said "so"\n', param=param)))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.INVALID_JSON, "invalid_request_error"),
        (Code.INVALID_REQUEST, "invalid_request_error"),
        (Code.INVALID_API_KEY, "authentication_error"),
        (Code.MODEL_NOT_ALLOWED, "permission_error"),
        (Code.MODEL_NOT_FOUND, "not_found_error"),
        (Code.NOT_FOUND, "not_found_error"),
        (Code.BODY_TIMEOUT, "invalid_request_error"),
        (Code.BODY_TOO_LARGE, "invalid_request_error"),
        (Code.RATE_LIMITED, "rate_limit_error"),
        (Code.QUEUE_FULL, "rate_limit_error"),
        (Code.NOT_SUPPORTED, "server_error"),
        (Code.ENGINE_FAILED, "server_error"),
        (Code.DRAINING, "server_error"),
        (Code.ENGINE_TIMEOUT, "server_error"),
    ],
)
def test_an_error_as_openai_has_it(code: Code, kind: str) -> None:
    expected = {"message": 'said "so"\n', "type": kind, "param": "n", "code": code.value}
    assert body(Api.OPENAI, code, "n") == {"error": expected}
    assert body(Api.OPENAI, code) == {"error": {**expected, "param": None}}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.INVALID_JSON, "invalid_request_error"),
        (Code.INVALID_API_KEY, "authentication_error"),
        (Code.MODEL_NOT_ALLOWED, "permission_error"),
        (Code.MODEL_NOT_FOUND, "not_found_error"),
        (Code.BODY_TIMEOUT, "invalid_request_error"),
        (Code.BODY_TOO_LARGE, "request_too_large"),
        (Code.QUEUE_FULL, "rate_limit_error"),
        (Code.NOT_SUPPORTED, "api_error"),
        (Code.ENGINE_FAILED, "api_error"),
        (Code.QUEUE_TIMEOUT, "overloaded_error"),
        (Code.ENGINE_TIMEOUT, "api_error"),
    ],
)
def test_an_error_as_anthropic_has_it(code: Code, kind: str) -> None:
    inner = {"type": kind, "message": 'said "so"\n', "code": code.value}
    assert body(Api.ANTHROPIC, code) == {"type": "error", "error": inner}


def test_an_error_as_ollama_has_it() -> None:
    assert body(Api.OLLAMA, Code.QUEUE_FULL) == {"error": 'said "so"\n', "code": "queue_full"}


FAILURE = GatewayError(Code.ENGINE_FAILED, "The engine broke off.\n\n")


@pytest.mark.parametrize("route", ROUTES.values(), ids=lambda route: route.path)
def test_an_error_event_is_one_whole_event(route: Route) -> None:
    tail = SseTail(route.markers)
    event = error_event(route, tail, FAILURE)
    assert event is not None
    assert event.endswith(b"\n\n")
    assert event.count(b"\n\n") == 1
    *names, data = event.strip().split(b"\n")
    assert names == ([b"event: error"] if route in (RESPONSES, MESSAGES) else [])
    said = json.loads(data.removeprefix(b"data: "))
    if route is RESPONSES:
        assert said == {"type": "error", "code": "engine_failed", "message": FAILURE.message, "param": None}
    else:
        assert said == json.loads(error_body(route.api, FAILURE))
    tail.feed(event)
    assert (tail.events, tail.at_boundary, tail.complete()) == (1, True, False)


def test_an_error_line_among_lines_of_json() -> None:
    tail = NdjsonTail()
    line = error_event(OLLAMA, tail, FAILURE)
    assert line == error_body(Api.OLLAMA, FAILURE) + b"\n"
    assert line.count(b"\n") == 1


@pytest.mark.parametrize("started", [b"data", b"data: {}", b"data: {}\n", b": comment", b"data: {}\r\n\r"])
def test_inside_an_event_nothing_is_said(started: bytes) -> None:
    tail = SseTail(CHAT.markers)
    tail.feed(started)
    assert error_event(CHAT, tail, FAILURE) is None
    tail.feed(b"\n\n")
    assert error_event(CHAT, tail, FAILURE) is not None


def test_inside_a_line_or_a_plain_body_nothing_is_said() -> None:
    tail = NdjsonTail()
    tail.feed(b'{"done":false}\n{"do')
    assert error_event(OLLAMA, tail, FAILURE) is None
    tail.feed(b'ne":false}\n')
    assert error_event(OLLAMA, tail, FAILURE) is not None
    assert error_event(CHAT, Tail(), FAILURE) is None
