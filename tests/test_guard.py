"""Who may use the control plane: names of this machine, tokens, logins, and pages of other origins."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.guard import SESSION_SECONDS, Ask, Guard, names_this_machine

TOKEN = "0123456789abcdef"


def guard(token: str = "", **more: Any) -> Guard:
    return Guard(lambda: token, **more)


def status(
    guard: Guard, method: str = "GET", path: str = "/admin/ledger", now: float = 0.0, **ask: str
) -> int:
    refusal = guard.refuse(Ask(method=method, path=path, **ask), now)
    return refusal.status if refusal else 200


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("localhost", True),
        ("localhost:9090", True),
        ("LOCALHOST:1", True),
        ("gateway.localhost:9090", True),
        ("127.0.0.1:9090", True),
        ("127.8.9.1", True),
        ("[::1]:9090", True),
        ("", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("evil.example:9090", False),
        ("127.0.0.1.nip.io", False),
        ("10.0.0.1:9090", False),
        ("0.0.0.0:9090", False),
        ("[::]:9090", False),
        ("[::1", False),
        ("user@evil.example", False),
        ("localhost@evil.example", False),
        ("2130706433", False),
    ],
)
def test_names_of_this_machine(host: str, here: bool) -> None:
    assert names_this_machine(host) is here
    assert status(guard(), host=host) == (200 if here else 403)
    assert status(guard(by_name=False), host=host) == 200, "no browser comes over a unix socket"


@given(host=st.text(max_size=60))
def test_no_host_is_too_strange_to_be_judged(host: str) -> None:
    assert names_this_machine(host) in (True, False)


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_supervisors_need_neither_name_nor_token(path: str) -> None:
    assert status(guard(), path=path, host="10.1.2.3:9090") == 200
    assert status(guard(TOKEN), path=path, host="10.1.2.3:9090") == 200


@pytest.mark.parametrize(
    ("authorization", "expected"),
    [
        (f"Bearer {TOKEN}", 200),
        (f"bearer   {TOKEN}", 200),
        (TOKEN, 401),
        (f"Basic {TOKEN}", 401),
        ("Bearer", 401),
        (f"Bearer {TOKEN}x", 401),
        ("Bearer \u00e9", 401),
        ("", 401),
    ],
)
def test_a_token(authorization: str, expected: int) -> None:
    for path in ("/", "/metrics", "/admin/ledger", "/nowhere"):
        assert status(guard(TOKEN), path=path, host="gw.example", authorization=authorization) == expected


def test_a_login_is_as_good_as_the_token_until_it_is_over() -> None:
    current = TOKEN
    door = Guard(lambda: current)
    assert door.login("0123456789abcdeF", 5.0) is None
    cookie = door.login(TOKEN, 5.0)
    assert cookie is not None
    assert TOKEN not in cookie
    assert status(door, cookie=cookie, now=5.0 + SESSION_SECONDS - 1) == 200
    assert status(door, cookie=cookie, now=5.0 + SESSION_SECONDS + 1) == 401
    until, _, signature = cookie.partition(".")
    later = f"{int(until) + 9}.{signature}"
    for forged in (later, until, f"{until}.", f".{signature}", "\u0661.x", f"1e9.{signature}"):
        assert status(door, cookie=forged) == 401, forged
    assert status(guard(TOKEN), cookie=cookie) == 401, "another process has another key"
    current = TOKEN + "new"
    assert status(door, cookie=cookie) == 401, "another token ends the logins"


def test_without_a_token_nobody_can_log_in() -> None:
    assert guard().login("", 0.0) is None


@pytest.mark.parametrize("token", ["", TOKEN])
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 200),
        ({"origin": "http://localhost:9090"}, 200),
        ({"origin": "https://LOCALHOST:9090"}, 200),
        ({"origin": "http://localhost:9090", "fetch_site": "same-origin"}, 200),
        ({"origin": "http://localhost:8080"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"fetch_site": "cross-site"}, 403),
        ({"fetch_site": "same-site"}, 403),
        ({"origin": "http://localhost:9090", "fetch_site": "cross-site"}, 403),
    ],
)
def test_what_changes_something_comes_from_our_own_page(token: str, headers: Any, expected: int) -> None:
    door = guard(token)
    for method in ("POST", "DELETE", "PUT", "made-up"):
        authorization = f"Bearer {TOKEN}" if token else ""
        asked = Ask(method=method, path="/x", host="localhost:9090", authorization=authorization, **headers)
        refusal = door.refuse(asked, 0.0)
        assert (refusal.status if refusal else 200) == expected
    site = headers.get("fetch_site", "")
    looks = 403 if site in ("cross-site", "same-site") else 200
    assert status(guard(), "GET", host="localhost:9090", **headers) == looks, "streams would be taken up"
    assert status(guard(), "GET", host="localhost:9090", fetch_mode="navigate", **headers) == 200, "a link"
