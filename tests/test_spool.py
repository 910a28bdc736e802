"""The spool: order, bound, and an end that comes out after every byte."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock, Sequencer, wait_all_tasks_blocked

from gateway.errors import Code, EngineError, GatewayError
from gateway.spool import PIECE_BYTES, SLOW_SECONDS, SMALL_PIECE_BYTES, Spool

FAILURE = EngineError(Code.ENGINE_FAILED, "broke off")


async def test_bytes_come_out_in_order_and_all_that_is_there_at_once() -> None:
    spool = Spool(100)
    for piece in (b"one ", b"two ", b"three"):
        spool.push(piece)
    assert spool.held == 13
    assert await spool.get() == b"one two three"
    assert spool.empty
    assert spool.held == 13  # The writer may be stuck in writing them.
    spool.push(b"four")
    assert await spool.get() == b"four"
    assert spool.held == 4


async def test_a_single_piece_is_handed_on_without_a_copy() -> None:
    spool = Spool(100)
    piece = b"x" * 50
    spool.push(piece)
    assert await spool.get() is piece


@pytest.mark.parametrize("failure", [None, FAILURE])
async def test_the_end_comes_after_the_bytes_before_it_and_stays(failure: GatewayError | None) -> None:
    spool = Spool(100)
    spool.push(b"last words")
    spool.end(failure)
    assert await spool.get() == b"last words"
    for _ in range(3):
        assert await spool.get() == b""
    assert spool.ended
    assert spool.failure is failure


async def test_the_first_word_on_how_it_ended_counts() -> None:
    spool = Spool(1)
    spool.end()
    spool.end(FAILURE)
    assert spool.failure is None
    spool = Spool(1)
    spool.end(FAILURE)
    spool.end(GatewayError(Code.CANCELLED, "later"))
    spool.end()
    assert spool.failure is FAILURE


async def test_whoever_waits_for_bytes_gets_them_when_they_come(autojump_clock: MockClock) -> None:
    spool = Spool(100)

    async def get_all() -> None:
        with trio.fail_after(100):
            for seconds, expected in enumerate((b"first", b"second", b""), 1):
                assert await spool.get() == expected
                assert trio.current_time() - start == seconds

    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(get_all)
        await trio.sleep(1)
        spool.push(b"first")
        await trio.sleep(1)
        spool.push(b"second")
        await trio.sleep(1)
        spool.end()


async def test_a_full_spool_makes_its_putter_wait_until_it_is_emptied(autojump_clock: MockClock) -> None:
    spool = Spool(10)
    spool.push(b"123456789")
    await spool.room()
    spool.push(b"a piece is taken whole")
    seq = Sequencer()

    async def put() -> None:
        async with seq(0):
            pass
        with trio.fail_after(100):
            await spool.room()
        assert spool.held == 0
        async with seq(2):
            spool.push(b"next")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(put)
        await wait_all_tasks_blocked()
        async with seq(1):
            assert spool.held == 31
            assert await spool.get() == b"123456789a piece is taken whole"
            await wait_all_tasks_blocked()
            assert spool.full  # It is still being written.
        assert await spool.get() == b"next"


@pytest.mark.parametrize("slow", [False, True])
async def test_pieces_for_a_slow_client_are_small_until_it_has_caught_up(
    slow: bool, autojump_clock: MockClock
) -> None:
    spool = Spool(4 * PIECE_BYTES)
    part = b"x" * (SMALL_PIECE_BYTES // 4)
    assert spool.piece_bytes == PIECE_BYTES
    while not spool.full:
        spool.push(part)
    assert len(await spool.get()) == PIECE_BYTES
    async with trio.open_nursery() as nursery:
        nursery.start_soon(spool.room)
        await wait_all_tasks_blocked()
        await trio.sleep(2 * SLOW_SECONDS if slow else SLOW_SECONDS / 2)
        expected = SMALL_PIECE_BYTES if slow else PIECE_BYTES
        for _ in range(3):
            assert len(await spool.get()) == expected
            assert spool.piece_bytes == expected
    while not spool.empty:
        assert len(await spool.get()) == expected
    with trio.move_on_after(1):
        await spool.get()
    assert spool.piece_bytes == PIECE_BYTES


async def test_the_limit_itself_is_full_and_a_byte_less_is_not() -> None:
    spool = Spool(4)
    full = []
    for piece in (b"123", b"4", b"5"):
        full.append(spool.full)
        spool.push(piece)
    assert full == [False, False, True]
    assert await spool.get() == b"12345"
    spool.push(b"1234")
    with trio.move_on_after(0) as scope:
        await spool.room()
    assert scope.cancelled_caught


async def test_a_getter_that_gives_up_loses_nothing(autojump_clock: MockClock) -> None:
    spool = Spool(10)
    with trio.move_on_after(1) as scope:
        await spool.get()
    assert scope.cancelled_caught
    spool.push(b"kept")
    assert await spool.get() == b"kept"


async def test_bytes_that_come_in_the_tick_of_a_cancellation_are_delivered_once() -> None:
    for cancel_first in (True, False):
        spool = Spool(10)
        scope = trio.CancelScope()
        got: list[bytes] = []

        async def get(spool: Spool, scope: trio.CancelScope, got: list[bytes]) -> None:
            with scope:
                got.append(await spool.get())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(get, spool, scope, got)
            await wait_all_tasks_blocked()
            if cancel_first:
                scope.cancel()
            spool.push(b"once")
            scope.cancel()
        spool.end()
        got.append(await spool.get())
        assert b"".join(got) == b"once"


async def test_a_putter_that_gives_up_leaves_the_spool_as_it_was(autojump_clock: MockClock) -> None:
    spool = Spool(4)
    spool.push(b"1234")
    with trio.move_on_after(1):
        await spool.room()
    assert await spool.get() == b"1234"
    async with waiting_writer(spool):
        await spool.room()
        spool.end()


class Outlet:
    """Sends a piece at once, as much of it as it is told to; None is that it can't."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.sent: list[bytes] = []

    def __call__(self, data: bytes) -> bytes | None:
        if self.most is None:
            return None
        self.sent.append(data[: self.most])
        return data[self.most :]


@asynccontextmanager
async def waiting_writer(spool: Spool) -> AsyncIterator[list[bytes]]:
    """Somebody waits in `get`; what he got there, when he got something."""
    got: list[bytes] = []

    async def get() -> None:
        got.append(await spool.get())

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(get)
            await wait_all_tasks_blocked()
            yield got
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()


async def test_a_piece_passes_by_a_writer_that_waits_and_leaves_him_asleep() -> None:
    spool = Spool(10)
    spool.outlet = outlet = Outlet(100)
    async with waiting_writer(spool) as got:
        for piece in (b"one", b"a piece over the limit", b"three"):
            spool.push(piece)
            assert not spool.held
    assert outlet.sent == [b"one", b"a piece over the limit", b"three"]
    assert got == []


async def test_what_the_outlet_leaves_goes_before_everything_else() -> None:
    spool = Spool(10)
    spool.outlet = outlet = Outlet(2)
    async with waiting_writer(spool) as got:
        spool.push(b"12345")
        assert spool.held == 3
        spool.push(b"678")
        assert spool.held == 6
        spool.end()
    assert outlet.sent == [b"12"]
    assert got == [b""]
    assert spool.take_rest() == b"345"
    assert spool.held == 6
    assert [await spool.get(), await spool.get()] == [b"678", b""]
    assert spool.held == 0


async def test_what_the_outlet_cant_send_is_held_for_the_writer() -> None:
    spool = Spool(10)
    spool.outlet = Outlet(None)
    async with waiting_writer(spool) as got:
        spool.push(b"123")
    assert got == [b"123"]


async def test_nothing_takes_the_outlet_while_the_writer_is_busy_or_bytes_are_held() -> None:
    spool = Spool(10)
    spool.outlet = outlet = Outlet(100)
    spool.push(b"1")
    spool.push(b"2")
    assert await spool.get() == b"12"
    spool.push(b"3")
    assert await spool.get() == b"3"
    with trio.move_on_after(0):
        await spool.get()
    spool.push(b"4")
    assert await spool.get() == b"4"
    assert outlet.sent == []


async def test_a_rest_makes_the_putter_wait_until_it_is_taken() -> None:
    spool = Spool(4)
    spool.outlet = Outlet(1)
    async with waiting_writer(spool):
        spool.push(b"12345")
    assert spool.full

    async def put() -> None:
        await spool.room()
        spool.push(b"next")

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(put)
            await wait_all_tasks_blocked()
            assert spool.take_rest() == b"2345"
            await wait_all_tasks_blocked()
            assert spool.full  # It is still being written.
            spool.outlet = None
            assert await spool.get() == b"next"


def test_it_shows_what_it_holds() -> None:
    spool = Spool(10)
    spool.push(b"abc")
    assert repr(spool) == "<Spool 3/10 bytes, open>"
    spool.end()
    assert repr(spool) == "<Spool 3/10 bytes, ended>"
    spool = Spool(10)
    spool.end(FAILURE)
    assert repr(spool) == "<Spool 0/10 bytes, failed: engine_failed>"
