"""Header fields in both directions: what passes, what stops here, what is made anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.headers import (
    HOP_BY_HOP,
    Caller,
    EnginePolicy,
    Fields,
    caller_id,
    find,
    named_by_connection,
    to_client,
    to_engine,
)
from gateway.words import RawHeaders

CALLER = Caller("203.0.113.9", "https")
POLICY = EnginePolicy(host=b"gpu0:8000")
KEYED = EnginePolicy(host=b"gpu0:8000", api_key="sk-engine")

HOP_BY_HOP_NAMES = [
    b"Connection",
    b"Keep-Alive",
    b"Proxy-Authenticate",
    b"Proxy-Authorization",
    b"Proxy-Connection",
    b"TE",
    b"Trailer",
    b"Transfer-Encoding",
    b"Upgrade",
    b"HTTP2-Settings",
]
CREDENTIALS = [b"Authorization", b"X-Api-Key", b"api-key", b"Cookie"]


def up(headers: Fields, policy: EnginePolicy = POLICY, caller: Caller = CALLER) -> RawHeaders:
    return to_engine(headers, policy, caller, request_id="id-1", length=12)


def down(headers: Fields, *, event_stream: bool = False) -> RawHeaders:
    return to_client(headers, request_id="id-1", event_stream=event_stream)


def values(headers: Fields, name: bytes) -> list[bytes]:
    return [value for key, value in headers if key.lower() == name.lower()]


# ----------------------------------------------------------------------------------------- both ways


def test_the_hop_by_hop_fields_are_these() -> None:
    assert {name.lower() for name in HOP_BY_HOP_NAMES} == HOP_BY_HOP


@pytest.mark.parametrize("name", HOP_BY_HOP_NAMES)
@pytest.mark.parametrize("spelt", [bytes.lower, bytes.upper, bytes.title], ids=["lower", "upper", "title"])
def test_hop_by_hop_fields_stop_here(name: bytes, spelt: Callable[[bytes], bytes]) -> None:
    field = (spelt(name), b"x-something")
    assert not values(up([field]), name)
    assert not values(down([field]), name)
    assert not values(down([field], event_stream=True), name)


def test_fields_that_connection_names_stop_here() -> None:
    headers = [
        (b"X-Keep", b"1"),
        (b"X-Private", b"2"),
        (b"Connection", b"close, X-PRIVATE ,"),
        (b"connection", b"\tx-other\t"),
        (b"X-Other", b"3"),
    ]
    assert named_by_connection(headers) == {b"close", b"x-private", b"", b"x-other"}
    for passed in (up(headers), down(headers)):
        assert values(passed, b"x-keep") == [b"1"]
        assert not values(passed, b"x-private")
        assert not values(passed, b"x-other")
    assert named_by_connection([(b"X", b"close")]) == frozenset()


def test_a_client_cant_name_away_what_the_gateway_says_itself() -> None:
    named = b"host, x-request-id, accept-encoding, content-length, x-forwarded-for, authorization"
    headers = up([(b"Connection", named), (b"X-Forwarded-For", b"192.0.2.1")], KEYED)
    assert values(headers, b"host") == [b"gpu0:8000"]
    assert values(headers, b"x-request-id") == [b"id-1"]
    assert values(headers, b"accept-encoding") == [b"identity"]
    assert values(headers, b"content-length") == [b"12"]
    assert values(headers, b"x-forwarded-for") == [b"192.0.2.1, 203.0.113.9"]
    assert values(headers, b"authorization") == [b"Bearer sk-engine"]


def test_repeated_fields_keep_their_order_and_spelling() -> None:
    sent = [(b"X-Tag", b"1"), (b"Accept", b"*/*"), (b"x-tag", b"2"), (b"X-TAG", b""), (b"X-Tag", b"1")]
    for passed in (up(sent), down(sent), down(sent, event_stream=True)):
        assert [field for field in passed if field[0].lower() in (b"x-tag", b"accept")] == sent


def test_find_gives_the_first_of_a_name_in_any_case() -> None:
    headers = [(b"A", b"0"), (b"X-Tag", b"1"), (b"x-tag", b"2")]
    assert find(headers, b"x-tag") == b"1"
    assert find(headers, b"x-none") is None


# ---------------------------------------------------------------------------------------- to engines


def test_the_engine_gets_exactly_this() -> None:
    sent = [
        (b"Host", b"api.example.org"),
        (b"Content-Type", b"application/json"),
        (b"Content-Length", b"99"),
        (b"Accept-Encoding", b"gzip, br"),
        (b"Expect", b"100-continue"),
        (b"User-Agent", b"client/1"),
        (b"X-Request-Id", b"theirs"),
    ]
    assert up(sent) == [
        (b"Host", b"gpu0:8000"),
        (b"Content-Type", b"application/json"),
        (b"User-Agent", b"client/1"),
        (b"Accept-Encoding", b"identity"),
        (b"X-Request-Id", b"id-1"),
        (b"X-Forwarded-For", b"203.0.113.9"),
        (b"X-Forwarded-Proto", b"https"),
        (b"X-Forwarded-Host", b"api.example.org"),
        (b"Content-Length", b"12"),
    ]


@pytest.mark.parametrize("name", CREDENTIALS)
def test_credentials_go_up_only_where_the_engine_has_no_key(name: bytes) -> None:
    field = (name, b"theirs")
    assert field in up([field])
    assert b"theirs" not in [value for _, value in up([field], KEYED)]
    assert values(up([field], KEYED), b"authorization") == [b"Bearer sk-engine"]


def test_fixed_fields_replace_the_clients_in_any_case() -> None:
    policy = EnginePolicy(host=b"h", fixed=((b"X-Team", b"a"), (b"Authorization", b"Basic b")))
    headers = up([(b"x-team", b"z"), (b"AUTHORIZATION", b"Bearer z"), (b"X-Tea", b"y")], policy)
    assert values(headers, b"x-team") == [b"a"]
    assert values(headers, b"authorization") == [b"Basic b"]
    assert values(headers, b"x-tea") == [b"y"]


def test_what_an_engine_must_never_get_is_withheld() -> None:
    policy = EnginePolicy(host=b"h", withheld=frozenset({b"x-conversation-id"}))
    sent = [(b"X-Conversation-Id", b"abc"), (b"X-Conversation", b"kept")]
    assert values(up(sent, policy), b"x-conversation-id") == []
    assert values(up(sent, policy), b"x-conversation") == [b"kept"]
    assert values(up(sent, POLICY), b"x-conversation-id") == [b"abc"]


def test_the_client_is_appended_to_those_it_came_through() -> None:
    sent = [
        (b"X-Forwarded-For", b"192.0.2.1"),
        (b"x-forwarded-for", b"192.0.2.2, 192.0.2.3"),
        (b"X-Forwarded-Proto", b"http"),
        (b"X-Forwarded-Host", b"outer.example.org"),
        (b"Host", b"inner.example.org"),
    ]
    headers = up(sent)
    assert values(headers, b"x-forwarded-for") == [b"192.0.2.1, 192.0.2.2, 192.0.2.3, 203.0.113.9"]
    assert values(headers, b"x-forwarded-proto") == [b"http"]
    assert values(headers, b"x-forwarded-host") == [b"outer.example.org"]


def test_a_client_on_a_unix_socket_has_no_address_to_append() -> None:
    unix = Caller("", "http")
    assert not values(up([], caller=unix), b"x-forwarded-for")
    assert values(up([(b"X-Forwarded-For", b"192.0.2.1")], caller=unix), b"x-forwarded-for") == [b"192.0.2.1"]
    assert not values(up([], caller=unix), b"x-forwarded-host")
    assert values(up([], caller=unix), b"x-forwarded-proto") == [b"http"]


# ---------------------------------------------------------------------------------------- to clients


def test_a_whole_answer_passes_as_it_is_but_for_the_id() -> None:
    answer = [
        (b"Date", b"Thu, 01 Jan 1970 00:00:00 GMT"),
        (b"Content-Type", b"application/json"),
        (b"Content-Length", b"5"),
        (b"Retry-After", b"7"),
        (b"Cache-Control", b"max-age=3"),
        (b"Set-Cookie", b"a=1"),
        (b"Set-Cookie", b"b=2"),
    ]
    sent = [*answer, (b"X-Request-Id", b"the engine's"), (b"Transfer-Encoding", b"chunked")]
    assert down(sent) == [*answer, (b"X-Request-Id", b"id-1")]


def test_an_event_stream_is_marked_so_that_nothing_stores_or_gathers_it() -> None:
    sent = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"public"),
        (b"x-accel-buffering", b"yes"),
        (b"content-length", b"9"),
        (b"X-Connection", b"kept"),
    ]
    assert down(sent, event_stream=True) == [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"X-Connection", b"kept"),
        (b"Cache-Control", b"no-cache"),
        (b"X-Accel-Buffering", b"no"),
        (b"X-Request-Id", b"id-1"),
    ]


# ------------------------------------------------------------------------------------ the caller's id


@pytest.mark.parametrize("value", [b"a", b"!~", b"0193-7f:/req#1", b"x" * 128])
def test_a_fit_callers_id_is_kept(value: bytes) -> None:
    assert caller_id([(b"X-REQUEST-ID", value)]) == value.decode()


@pytest.mark.parametrize(
    "value",
    [b"", b" ", b"a b", b"a\t", b"a\n", b"\x00", b"\x7f", b"caf\xc3\xa9", b"\xff", b"x" * 129],
)
def test_an_unfit_callers_id_counts_as_none(value: bytes) -> None:
    assert caller_id([(b"X-Request-Id", value)]) is None


def test_without_a_callers_id_there_is_none_and_of_two_the_first_counts() -> None:
    assert caller_id([]) is None
    assert caller_id([(b"X-Request-Id", b"one"), (b"X-Request-Id", b"two")]) == "one"
    assert caller_id([(b"X-Request-Id", b"\xff"), (b"X-Request-Id", b"two")]) is None


def test_the_callers_id_names_nothing_upstream() -> None:
    headers = up([(b"x-request-id", b"theirs"), (b"X-Request-ID", b"theirs too")])
    assert values(headers, b"x-request-id") == [b"id-1"]


def test_a_response_without_a_body_loses_a_length_that_is_not_its_own() -> None:
    headers = [(b"Content-Length", b"50"), (b"ETag", b'"x"')]
    down = to_client(headers, request_id="id", event_stream=False, bodiless=True)
    assert down == [(b"ETag", b'"x"'), (b"X-Request-Id", b"id")]
