"""Hang-ups are seen whatever else is in the socket, told once, and told to the right one."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.server.hangups import Hangups


@asynccontextmanager
async def running() -> AsyncIterator[Hangups]:
    hangups = Hangups()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hangups.run)
        yield hangups
        nursery.cancel_scope.cancel()


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def fin(theirs: socket.socket) -> None:
    theirs.close()


def half_close(theirs: socket.socket) -> None:
    theirs.shutdown(socket.SHUT_WR)


def rst(theirs: socket.socket) -> None:
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()


@pytest.mark.parametrize("leave", [fin, half_close, rst])
@pytest.mark.parametrize("unread", [b"", b"x" * 10_000])
async def test_a_hang_up_is_seen_behind_unread_bytes(leave: object, unread: bytes) -> None:
    told: list[str] = []
    async with running() as hangups:
        with connected() as (ours, theirs), hangups.watching(ours.fileno(), lambda: told.append("gone")):
            theirs.sendall(unread)
            await wait_all_tasks_blocked(0.02)
            assert told == []
            assert callable(leave)
            leave(theirs)
            await wait_all_tasks_blocked(0.02)
            assert told == ["gone"]
            await wait_all_tasks_blocked(0.02)
            assert told == ["gone"]


async def test_a_number_that_is_given_out_again_is_somebody_else_s() -> None:
    told: list[str] = []

    def gone() -> None:
        told.append("first")

    async with running() as hangups:
        with connected() as (first, first_client), connected() as (second, second_client):
            number = first.fileno()
            with hangups.watching(number, gone):
                hangups.forget(number, gone)
                os.dup2(second.fileno(), number)  # closes the first
                with hangups.watching(number, lambda: told.append("second")):
                    hangups.forget(number, gone)  # late: it isn't its own any more
                    first_client.close()
                    second_client.close()
                    await wait_all_tasks_blocked(0.02)
                    assert told == ["second"]


async def test_after_the_block_nothing_is_told() -> None:
    told: list[str] = []
    async with running() as hangups:
        with connected() as (ours, theirs):
            with hangups.watching(ours.fileno(), lambda: told.append("gone")):
                pass
            theirs.close()
            await wait_all_tasks_blocked(0.02)
    assert told == []


async def test_hundreds_at_once_are_all_told() -> None:
    told: list[int] = []
    async with running() as hangups:
        pairs = []
        with socket.create_server(("127.0.0.1", 0), backlog=300) as listener:
            for _ in range(300):
                theirs = socket.create_connection(listener.getsockname())
                pairs.append((listener.accept()[0], theirs))
        watches = [
            hangups.watching(ours.fileno(), partial(told.append, number))
            for number, (ours, _) in enumerate(pairs)
        ]
        for watch in watches:
            watch.__enter__()
        for _, theirs in pairs:
            theirs.close()
        await wait_all_tasks_blocked(0.05)
        for watch in watches:
            watch.__exit__(None, None, None)
        for ours, _ in pairs:
            ours.close()
    assert sorted(told) == list(range(300))


async def test_what_can_t_be_watched_is_forgotten() -> None:
    hangups = Hangups()
    with connected() as (ours, _):
        ours.close()
        with pytest.raises(ValueError, match="negative"), hangups.watching(ours.fileno(), lambda: None):
            pytest.fail("it is closed")
    assert hangups._callbacks == {}
    hangups._epoll.close()
