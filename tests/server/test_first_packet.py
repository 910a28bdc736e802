"""A response's head is written together with the first of its body (as ASGI has it)."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.server.outgoing import ClientStream
from tests.server.apps import begin, say, serving, stream_of
from tests.support.http1 import http1, request_bytes

pytestmark = pytest.mark.usefixtures("short_way")

GET = request_bytes("/", method="GET")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the server writes at a time."""
    pieces: list[bytes] = []
    send_now = ClientStream.send_now

    def recording(self: ClientStream, data: Any) -> int:
        sent = send_now(self, data)
        pieces.append(bytes(data[:sent]))
        return sent

    monkeypatch.setattr(ClientStream, "send_now", recording)
    return pieces


async def counted(scope: Any, receive: Any, send: Any) -> None:
    await begin(send, length=10)
    await say(send, b"first")
    await say(send, b"other", more=False)


async def chunked(scope: Any, receive: Any, send: Any) -> None:
    await begin(send)
    await say(send, b"first")
    await say(send, b"other", more=False)


async def at_once(scope: Any, receive: Any, send: Any) -> None:
    await begin(send)
    assert stream_of(scope).send_now(b"first") == b""
    await say(send, b"", more=False)


async def bodiless(scope: Any, receive: Any, send: Any) -> None:
    await begin(send, status=204)
    await say(send, b"", more=False)


@pytest.mark.parametrize(
    ("app", "first"),
    [(counted, b"first"), (chunked, b"5\r\nfirst\r\n"), (at_once, b"5\r\nfirst\r\n"), (bodiless, b"")],
    ids=["counted", "chunked", "at once", "without a body"],
)
async def test_the_head_goes_with_the_first_piece(app: Any, first: bytes, written: list[bytes]) -> None:
    async with serving(app) as (_, url), http1(url) as client:
        await client.send(GET)
        answer = await client.answer()
    head, _, rest = written[0].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 20")
    assert rest == first
    assert answer.body in (b"", b"first", b"firstother")


async def test_a_head_of_which_a_part_was_written_is_finished_before_the_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send_now = ClientStream.send_now
    monkeypatch.setattr(ClientStream, "send_now", lambda self, data: send_now(self, data[:7]))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await begin(send)
        assert stream_of(scope).send_now(b"first") is None
        assert stream_of(scope).send_now(b"first") is None
        await stream_of(scope).lane.send(b"first")
        await say(send, b"", more=False)

    async with serving(app) as (_, url), http1(url) as client:
        await client.send(GET)
        answer = await client.answer()
    assert (answer.status, answer.body) == (200, b"first")
