"""Accepting goes on whatever keeps it from accepting, and the log says so once a minute."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest
import structlog
import trio
from trio.testing import MockClock

from gateway.server import connection, peer
from gateway.server import plane as plane_module
from tests.server.apps import begin, say, serving, well
from tests.support.http1 import connect, http1
from tests.wire.around import quiet_log


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EPROTO, errno.EPERM, errno.ECONNABORTED]
)
async def test_accepting_goes_on_after_an_error(
    number: int, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [OSError(number, "not now")] * 50
    accept = socket.socket.accept

    def failing(self: socket.socket) -> Any:
        if errors:
            raise errors.pop()
        return accept(self)

    with quiet_log("can't accept"):
        async with serving(well) as (_, url):
            monkeypatch.setattr(socket.socket, "accept", failing)
            async with http1(url) as client:
                assert (await client.ask("/")).status == 200
    assert errors == []


async def test_one_connection_that_can_t_be_looked_after_is_closed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with quiet_log("connection ended by RuntimeError"):
        async with serving(well) as (plane, url), http1(url) as first:
            assert (await first.ask("/")).status == 200
            (one,) = plane._connections
            look_after, looked = connection.Connection.look_after, trio.Event()

            def fail(self: connection.Connection, now: float) -> None:
                if self is one:
                    raise RuntimeError("looked wrong")
                look_after(self, now)
                if one._socket.fileno() < 0:
                    looked.set()

            monkeypatch.setattr(connection.Connection, "look_after", fail)
            async with http1(url) as second:
                assert (await second.ask("/")).status == 200
                assert await first.eof() == b""
                await looked.wait()
                assert (await second.ask("/")).status == 200


async def test_a_client_is_asked_about_often_only_while_it_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def look(_: socket.socket) -> peer.Peer:
        asked.append(now)
        return peer.Peer(acknowledged=1000, unacknowledged=0, vanished=False)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await begin(send)
        await say(send, b"first")
        ready.set()
        await trio.Event().wait()

    ready = trio.Event()
    monkeypatch.setattr(plane_module, "_LOOK_SECONDS", 1e6)
    monkeypatch.setattr(peer, "look", look)
    async with serving(app, stall_seconds=5.0) as (plane, url), http1(url) as client:
        await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await ready.wait()
        (one,) = plane._connections
        start = trio.current_time()
        for now in [start + tick / 2 for tick in range(17)]:
            one.look_after(now)
        assert asked == [start, start + 4, start + 8]
        asked.clear()
        async with one.send_lock:  # As a write that is stuck has it.
            stuck = [start + 8.5 + tick / 2 for tick in range(9)]
            for now in stuck:
                one.look_after(now)
            assert (asked, one._socket.fileno() >= 0) == (stuck, True)
            now = start + 13
            one.look_after(now)
            assert one._socket.fileno() < 0, "it has taken nothing for five seconds"


async def test_faults_are_one_line_a_kind_and_minute_with_what_was_kept_back(
    autojump_clock: MockClock,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise {"/a": ZeroDivisionError, "/b": KeyError}[scope["path"]]("x" * 1000)

    async def fail(path: str, times: int) -> None:
        for _ in range(times):
            async with http1(url) as client:
                await client.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                await client.eof()

    with structlog.testing.capture_logs() as lines:
        async with serving(app) as (_, url):
            await fail("/a", 10)
            await fail("/b", 1)
            await trio.sleep(61)
            await fail("/a", 10)
    told = [(line["event"], line["not_logged_before"]) for line in lines]
    zero, key = "connection ended by ZeroDivisionError", "connection ended by KeyError"
    assert told == [(zero, 0), (key, 0), (zero, 9)]
    assert all(len(line["detail"]) <= 200 for line in lines)
    assert {line["plane"] for line in lines} == {"test"}


async def test_hundreds_that_come_at_once_are_all_accepted() -> None:
    async with serving(well, most_connections=1000) as (_, url), trio.open_nursery() as nursery:

        async def come() -> None:
            stream = await connect(url)
            await stream.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await stream.receive_some(100)
            await trio.aclose_forcefully(stream)

        for _ in range(400):
            nursery.start_soon(come)
