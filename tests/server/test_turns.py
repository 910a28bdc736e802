"""A request reaches its engine, and its answer the client, in few turns of the loop.

Under load each turn is shared with all other streams, so turns are what the first byte waits for.
"""

from __future__ import annotations

import trio

from gateway.server.locks import QuickLock
from tests.support.gateway import running_gateway
from tests.support.http1 import http1
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Stream

MOST_TURNS = 12
"""Of gateway, engine and client together, which are one process here; each body, lock, connect
and read that needs no waiting but has a turn of its own adds one or two to the nine."""


class Turns(trio.abc.Instrument):
    """Counts the turns of the loop."""

    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


async def test_first_byte_takes_few_turns() -> None:
    async with running_gateway(ScriptedEngine(Stream(tokens=2), slots=4)) as gateway:
        counts = []
        for _ in range(5):
            turns = Turns()
            async with http1(gateway.url) as client:
                trio.lowlevel.add_instrument(turns)
                await client.post(CHAT.path, CHAT.payload(stream=True))
                await client.head()
                trio.lowlevel.remove_instrument(turns)
            counts.append(turns.count)
        assert min(counts) <= MOST_TURNS


async def test_free_lock_takes_no_turn() -> None:
    lock = QuickLock()
    with trio.testing.assert_no_checkpoints():
        async with lock:
            assert lock.held
    assert not lock.held


async def test_lock_goes_to_who_came_first() -> None:
    lock, order = QuickLock(), list[int]()

    async def take(number: int) -> None:
        async with lock:
            order.append(number)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery, lock:
        for number in range(3):
            nursery.start_soon(take, number)
            await trio.testing.wait_all_tasks_blocked()
    assert order == [0, 1, 2]


async def test_lock_that_is_given_back_while_somebody_waits_is_not_free_in_between() -> None:
    lock, inside, most = QuickLock(), 0, 0

    async def take() -> None:
        nonlocal inside, most
        async with lock:
            inside += 1
            most = max(most, inside)
            await trio.lowlevel.checkpoint()
            inside -= 1

    async with trio.open_nursery() as nursery:
        async with lock:
            nursery.start_soon(take)
            await trio.testing.wait_all_tasks_blocked()
        assert lock.held, "it is handed over"
        await take()
    assert most == 1
    assert not lock.held


async def test_who_gives_up_waiting_leaves_the_lock_to_the_next() -> None:
    lock = QuickLock()

    async def take(scope: trio.CancelScope) -> None:
        with scope:
            async with lock:
                pass

    async with trio.open_nursery() as nursery:
        impatient = trio.CancelScope()
        async with lock:
            nursery.start_soon(take, impatient)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(take, trio.CancelScope())
            await trio.testing.wait_all_tasks_blocked()
            impatient.cancel()
    assert impatient.cancelled_caught
    assert not lock.held
