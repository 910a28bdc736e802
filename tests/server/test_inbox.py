"""Messages for an application: the body in one piece, then its end, then the client's departure."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import trio
from hypercorn.protocol.events import Body, EndBody, StreamClosed
from trio.testing import wait_all_tasks_blocked

from gateway.server.stream import DISCONNECT, HttpStream, Inbox

END = {"type": "http.request", "body": b"", "more_body": False}


def body(data: bytes) -> dict[str, object]:
    return {"type": "http.request", "body": data, "more_body": True}


async def test_pieces_that_came_one_by_one_are_taken_as_one() -> None:
    taken: list[int] = []
    inbox = Inbox(taken.append)
    for _ in range(10_000):
        inbox.add(b"x")
    assert inbox.held == 10_000
    assert await inbox.get() == body(b"x" * 10_000)
    assert (inbox.held, taken) == (0, [10_000])


async def test_the_order_is_body_end_departure() -> None:
    inbox = Inbox(lambda _: None)
    inbox.add(b"a")
    inbox.put(END)
    inbox.put(DISCONNECT)
    assert [await inbox.get() for _ in range(3)] == [body(b"a"), END, DISCONNECT]


async def test_who_waits_is_woken_by_each_kind_of_message() -> None:
    inbox = Inbox(lambda _: None)
    got = []

    async def receive() -> None:
        while True:
            got.append(await inbox.get())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await wait_all_tasks_blocked()
        inbox.add(b"a")
        await wait_all_tasks_blocked()
        inbox.add(b"b")
        inbox.add(b"c")
        await wait_all_tasks_blocked()
        inbox.put(DISCONNECT)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert got == [body(b"a"), body(b"bc"), DISCONNECT]


async def test_what_is_dropped_was_not_taken() -> None:
    taken: list[int] = []
    inbox = Inbox(taken.append)
    inbox.add(b"abc")
    inbox.put(END)
    assert inbox.drop() == 3
    assert (inbox.held, taken) == (0, [])
    assert inbox.drop() == 0
    assert await inbox.get() == END


async def test_a_taken_piece_stays_as_it_was() -> None:
    inbox = Inbox(lambda _: None)
    inbox.add(b"abc")
    message = await inbox.get()
    inbox.add(b"def")
    assert message["body"] == b"abc"


@pytest.mark.parametrize("dropped", [False, True])
async def test_of_a_body_whose_client_has_left_nothing_is_had_at_once(dropped: bool) -> None:
    """Half of it, or only its end, would pass for the whole; the leaving is for who waits for it."""
    protocol = SimpleNamespace(
        **dict.fromkeys(("app", "config", "context", "task_group", "client", "server"))
    )
    protocol.ssl, protocol.stream_send = False, None
    stream = HttpStream(protocol, 1, abort=lambda: None, body_taken=lambda _: None)
    await stream.handle(Body(stream_id=1, data=b"half"))
    if dropped:
        await stream.handle(EndBody(stream_id=1))
        stream.inbox.drop()
    await stream.handle(StreamClosed(stream_id=1))
    assert stream.receive_now() is None
    messages = [await stream.inbox.get() for _ in range(2)]
    assert messages[-1] is DISCONNECT
