"""Applications that behave badly, and clients that leave well-behaved ones: what the server makes of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.server import Plane, peer
from gateway.server import http1 as server_http1
from gateway.server import http2 as server_http2
from tests.server.apps import App, all_gone, answer, begin, say, serving, stream_of, well, whole_body
from tests.support.http1 import Http1, Truncated, http1, request_bytes
from tests.wire import frames as f
from tests.wire.around import quiet_log
from tests.wire.raw2 import Raw2, raw2

GET = request_bytes("/", method="GET")
ASK = f.headers(1, f.head(b"/", b"GET"))
FAULT = "connection ended by ZeroDivisionError"


@asynccontextmanager
async def both(app: App, **more: Any) -> AsyncIterator[tuple[Plane, Http1, Raw2]]:
    async with serving(app, **more) as (plane, url), http1(url) as client, raw2(url) as connection:
        yield plane, client, connection


async def fails_at_once(scope: Any, receive: Any, send: Any) -> None:
    raise ZeroDivisionError


async def fails_midway(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/well":
        await answer(send)
        return
    await begin(send)
    await say(send, b"half")
    raise ZeroDivisionError


async def returns_at_once(scope: Any, receive: Any, send: Any) -> None:
    pass


async def returns_midway(scope: Any, receive: Any, send: Any) -> None:
    await begin(send)
    await say(send, b"half")


@pytest.mark.parametrize("app", [fails_at_once, returns_at_once])
async def test_application_that_says_nothing(app: App) -> None:
    with quiet_log(FAULT):
        async with both(app) as (_, client, connection):
            await client.send(GET)
            assert await client.eof() == b""
            await connection.send(ASK)
            await connection.over(1)
            assert connection.resets == {1: f.INTERNAL_ERROR}
            await connection.answered()
            assert not connection.gone


@pytest.mark.parametrize("app", [fails_midway, returns_midway])
async def test_application_that_breaks_off(app: App) -> None:
    """What it has said arrives, and the end shows that it isn't all."""
    with quiet_log(FAULT):
        async with both(app) as (_, client, connection):
            await client.send(GET)
            await client.head()
            with pytest.raises(Truncated) as cut:
                await client.rest()
            assert cut.value.got == b"half"
            await connection.send(ASK)
            await connection.over(1)
            assert connection.body(1) == b"half"
            assert connection.resets == {1: f.INTERNAL_ERROR}


async def test_one_stream_s_application_fails_and_the_others_go_on() -> None:
    with quiet_log(FAULT):
        async with both(fails_midway) as (_, _, connection):
            for number in range(1, 21, 2):
                await connection.send(
                    f.headers(number, f.head(b"/" if number % 4 == 1 else b"/well", b"GET"))
                )
            for number in range(1, 21, 2):
                await connection.over(number)
            assert set(connection.resets) == set(range(1, 21, 4))
            assert connection.body(3) == b"well"


async def test_an_application_that_fails_while_it_is_cancelled_ends_its_own_request() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/well":
            await answer(send)
            return
        async with trio.open_nursery() as nursery:

            async def fail_late() -> None:
                try:
                    await trio.Event().wait()
                finally:
                    raise ZeroDivisionError

            nursery.start_soon(fail_late)
            stream_of(scope).left = nursery.cancel_scope.cancel
            await trio.Event().wait()

    with quiet_log(FAULT):
        async with both(app) as (_, _, connection):
            await connection.send(ASK, f.headers(3, f.head(b"/", b"GET")))
            await wait_all_tasks_blocked()
            await connection.send(f.reset(1), f.headers(5, f.head(b"/well", b"GET")))
            await connection.over(5)
            assert connection.status(5) == 200
            assert not connection.gone


async def test_more_body_than_announced_ends_the_connection() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await begin(send, length=4)
        await say(send, b"too much", more=False)

    async with both(app) as (_, client, _):
        await client.send(GET)
        assert b"too much" not in await client.eof()


@pytest.mark.parametrize(
    "field",
    [(b"X-A", b"1\r\nSet-Cookie: b=1"), (b"X-A: 1\r\nSet-Cookie", b"b=1"), (b"X-A", b"1\x00"), (b"", b"1")],
    ids=["line in a value", "line in a name", "NUL", "no name"],
)
async def test_a_field_that_would_be_read_as_others_is_not_sent(field: tuple[bytes, bytes]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [field]})
        await say(send, b"body", more=False)

    with quiet_log("connection ended by LocalProtocolError"):
        async with both(app) as (_, client, _):
            await client.send(GET)
            answer = await client.eof()
    assert b"Cookie" not in answer
    assert b"body" not in answer


async def test_fields_of_an_answer_that_frame_it_are_the_last_word() -> None:
    """However they are written: h11 frames by them, once."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        fields = [(b"X-First", b"1"), (b"CONTENT-Length", b"4"), (b"connection", b"close"), (b"x-last", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        await say(send, b"body", more=False)

    async with both(app) as (_, client, _):
        await client.send(GET)
        head, _, body = (await client.eof()).partition(b"\r\n\r\n")
    lines = [line.lower() for line in head.split(b"\r\n")[1:]]
    assert sorted(lines) == [b"connection: close", b"content-length: 4", b"x-first: 1", b"x-last: 2"]
    assert body == b"body"


async def test_a_body_that_no_application_takes_stops_arriving() -> None:
    """And the client's departure is seen all the same."""
    left = trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        stream_of(scope).left = left.set
        await left.wait()

    async with serving(app) as (_, url), http1(url) as client:
        await client.send(request_bytes("/", headers={"Content-Length": "1000000000"}))
        sent = 0
        with trio.move_on_after(1):
            while True:
                await client.send(b"x" * 65_536)
                sent += 65_536
        assert sent < 20_000_000  # what the kernels hold
        await client.reset()
        await left.wait()


async def test_a_body_that_no_application_takes_holds_up_no_other_stream() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/well":
            await well(scope, receive, send)
        else:
            await trio.Event().wait()

    async with both(app) as (_, _, connection):
        await connection.send(f.headers(1, f.head(b"/"), end=False))
        for _ in range(600):
            await connection.send(f.data(1, b"x" * 100))
        await connection.send(f.headers(3, f.head(b"/well"), end=False), f.data(3, b"{}", end=True))
        await connection.over(3)
        assert connection.body(3) == b"well"
        assert not connection.gone


async def test_a_disconnect_is_told_to_an_application_that_waits_for_it() -> None:
    told = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert await whole_body(receive) == b""
        told.append(await receive())

    async with serving(app) as (plane, url):
        async with http1(url) as client:
            await client.send(GET)
        async with raw2(url) as connection:
            await connection.send(ASK)
            await connection.answered()
            await connection.send(f.reset(1))
            await connection.answered()
        await all_gone(plane)
    assert told == [{"type": "http.disconnect"}] * 2


async def test_who_goes_with_the_whole_answer_has_not_left_early() -> None:
    left = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        stream_of(scope).left = lambda: left.append(scope["path"])
        await whole_body(receive)
        await answer(send)
        await trio.sleep(0.2)

    async with serving(app) as (plane, url):
        for _ in range(20):
            async with http1(url) as client:
                await client.send(GET)
                assert (await client.answer()).body == b"well"
        await all_gone(plane)
    assert left == []


async def test_no_idle_clock_holds_the_connection_of_one_who_left(
    autojump_clock: MockClock,
) -> None:
    """It has left; its application ends a moment later as if nothing were."""
    proceed = trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await whole_body(receive)
        await proceed.wait()
        await answer(send)

    async with serving(app) as (plane, url):
        for leave in (Http1.close, Http1.half_close, Http1.reset):
            client = Http1(await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2])))
            await client.send(GET)
            await wait_all_tasks_blocked()
            await leave(client)
            await wait_all_tasks_blocked()
            assert plane.connections == 1
            proceed.set()
            await all_gone(plane)
            proceed = trio.Event()
            await client.close()


async def test_a_plane_closes_its_idle_connections_at_its_end(autojump_clock: MockClock) -> None:
    async with (
        serving(well) as (plane, url),
        http1(url) as client,
        http1(url) as new,
        raw2(url) as connection,
    ):
        assert (await client.ask("/")).body == b"well"
        await connection.send(ASK)
        await connection.over(1)
        since = trio.current_time()
        await plane.close()
        assert trio.current_time() - since <= 1
        assert await client.eof() == b""
        assert await new.eof() == b""
        await connection.until(lambda: connection.gone)
        assert connection.goaway == f.NO_ERROR


async def test_a_fault_of_ours_ends_its_connection_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """However a connection's handler fails, it ends there; the log has one line for all of them."""

    async def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with quiet_log(FAULT):
        async with serving(well) as (_, url), http1(url) as client, raw2(url) as connection:
            assert (await client.ask("/")).body == b"well"
            await connection.answered()
            monkeypatch.setattr(server_http1.Http1, "handle", fail)
            monkeypatch.setattr(server_http2.Http2, "handle", fail)
            for _ in range(3):
                async with http1(url) as victim:
                    await victim.send(GET)
                    assert await victim.eof() == b""
            await connection.send(ASK)
            await connection.until(lambda: connection.gone)
            monkeypatch.undo()
            assert (await client.ask("/")).body == b"well"


async def test_an_answer_in_many_small_pieces_may_be_thanked_for_piece_by_piece() -> None:
    """Some clients give two windows back for each; that is no flood."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await begin(send)
        for _ in range(15_000):
            await say(send, b"x")
            await trio.lowlevel.checkpoint()
        await say(send, b"", more=False)

    async with serving(app) as (_, url), raw2(url) as connection:
        await connection.send(ASK)
        await connection.over(1)
        assert len(connection.body(1)) == 15_000
        await connection.answered()
        assert not connection.gone


async def test_a_crowd_of_small_frames_is_taken_in_turns() -> None:
    """Other connections get theirs in between."""
    counter = Turns()
    async with serving(well) as (_, url), raw2(url) as connection:
        await connection.answered()
        trio.lowlevel.add_instrument(counter)
        try:
            await connection.send(f.window(0, 1) * 4600)
            await connection.answered()
        finally:
            trio.lowlevel.remove_instrument(counter)
        assert not connection.gone
    assert counter.turns >= 12


class Turns(trio.abc.Instrument):
    """Counts the turns of connections."""

    turns = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.turns += "_connected" in task.name


async def test_a_client_isn_t_stalled_at_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing acknowledged so far, and a write under way: that has to last before it says anything."""
    stalled = trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with trio.CancelScope() as scope_of_app:
            stream_of(scope).stalled, stream_of(scope).left = stalled.set, scope_of_app.cancel
            await begin(send)
            while True:
                await say(send, b"x" * 65_536)

    monkeypatch.setattr(peer, "look", lambda _: peer.Peer(0, 1000, False))
    async with serving(app, stall_seconds=30) as (_, url), http1(url) as client:
        await client.send(GET)
        await trio.sleep(1.2)
        assert not stalled.is_set()
