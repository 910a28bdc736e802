"""One epoll for many sleeping readers."""

from __future__ import annotations

import socket
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.arrivals import Arrivals

MUCH = 200


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    with ExitStack() as stack:
        made = []
        for _ in range(MUCH):
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            stack.enter_context(theirs)
            ours.setblocking(False)
            made.append((ours, theirs))
        yield made


@asynccontextmanager
async def running() -> AsyncIterator[tuple[Arrivals, trio.Nursery]]:
    arrivals = Arrivals()
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(arrivals.run)
            yield arrivals, nursery
            nursery.cancel_scope.cancel()


def reading(sock: socket.socket, into: list[bytes], until: bytes = b".") -> Callable[[], bool]:
    def step() -> bool:
        into.append(sock.recv(100))
        return into[-1] != until

    return step


async def test_each_arrival_is_served_until_the_step_declines(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    (ours, theirs), got = pairs[0], list[bytes]()
    async with running() as (arrivals, nursery):
        done = trio.Event()

        async def sleep() -> None:
            await arrivals.until(ours.fileno(), reading(ours, got))
            done.set()

        nursery.start_soon(sleep)
        for word in (b"a", b"b"):
            theirs.send(word)
            await wait_all_tasks_blocked()
        assert (got, done.is_set()) == ([b"a", b"b"], False)
        theirs.send(b".")
        await done.wait()
        theirs.send(b"more")
        await wait_all_tasks_blocked()
        assert got == [b"a", b"b", b"."], "nobody sleeps on it any more"
        nursery.start_soon(sleep)
        await wait_all_tasks_blocked()
        assert got[-1] == b"more"


async def test_what_a_step_raises_is_raised_in_its_task_alone(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    (bad, to_bad), (good, to_good) = pairs[:2]
    got: list[bytes] = []

    def breaks() -> bool:
        raise ValueError("broken")

    async with running() as (arrivals, nursery):
        raised = trio.Event()

        async def sleep_badly() -> None:
            with pytest.raises(ValueError, match="broken"):
                await arrivals.until(bad.fileno(), breaks)
            raised.set()

        nursery.start_soon(sleep_badly)
        nursery.start_soon(arrivals.until, good.fileno(), reading(good, got))
        await wait_all_tasks_blocked()
        to_bad.send(b"x")
        to_good.send(b"x")
        await raised.wait()
        await wait_all_tasks_blocked()
        assert got == [b"x"]


async def test_what_comes_while_others_are_served_need_not_wait_for_another_turn(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    (first, to_first), (second, to_second) = pairs[:2]
    order: list[str] = []
    async with running() as (arrivals, nursery):
        turn = trio.Event()

        async def others() -> None:
            await turn.wait()
            order.append("others")

        def sends() -> bool:
            order.append(first.recv(100).decode())
            turn.set()
            to_second.send(b"second")
            return True

        def answers() -> bool:
            order.append(second.recv(100).decode())
            return True

        nursery.start_soon(others)
        nursery.start_soon(arrivals.until, first.fileno(), sends)
        nursery.start_soon(arrivals.until, second.fileno(), answers)
        await wait_all_tasks_blocked()
        to_first.send(b"first")
        await wait_all_tasks_blocked()
        assert order == ["first", "second", "others"]


async def test_a_cancelled_sleeper_is_served_no_more(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    (ours, theirs), got = pairs[0], list[bytes]()
    async with running() as (arrivals, nursery):
        with trio.CancelScope() as scope:
            nursery.start_soon(wait_all_tasks_blocked)
            async with trio.open_nursery() as inner:
                inner.start_soon(arrivals.until, ours.fileno(), reading(ours, got))
                await wait_all_tasks_blocked()
                scope.cancel()
        theirs.send(b"late")
        await wait_all_tasks_blocked()
        assert got == []
        # The number of the socket can be used again.
        nursery.start_soon(arrivals.until, ours.fileno(), reading(ours, got))
        await wait_all_tasks_blocked()
        assert got == [b"late"]


async def test_a_socket_closed_under_its_sleeper_harms_nobody(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    (closed, _), (good, to_good) = pairs[:2]
    got: list[bytes] = []
    async with running() as (arrivals, nursery):
        nursery.start_soon(arrivals.until, good.fileno(), reading(good, got))
        async with trio.open_nursery() as inner:
            inner.start_soon(arrivals.until, closed.fileno(), lambda: True)
            await wait_all_tasks_blocked()
            closed.close()
            inner.cancel_scope.cancel()
        to_good.send(b"x")
        await wait_all_tasks_blocked()
        assert got == [b"x"]


async def test_whoever_is_cancelled_in_the_same_turn_is_not_served(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    scopes, served = [trio.CancelScope(), trio.CancelScope()], list[int]()
    async with running() as (arrivals, nursery):

        async def sleep(number: int) -> None:
            def step() -> bool:
                served.append(number)
                scopes[1 - number].cancel()
                pairs[number][0].recv(1)
                return True

            with scopes[number]:
                await arrivals.until(pairs[number][0].fileno(), step)

        for number in (0, 1):
            nursery.start_soon(sleep, number)
        await wait_all_tasks_blocked()
        for number in (0, 1):
            pairs[number][1].send(b"x")
        await wait_all_tasks_blocked()
        assert len(served) == 1


async def test_all_that_are_ready_are_served_and_others_get_their_turns_in_between(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    served: list[int] = []
    async with running() as (arrivals, nursery):

        def step(number: int) -> Callable[[], bool]:
            def one() -> bool:
                pairs[number][0].recv(1)
                served.append(number)
                return True

            return one

        for number in range(MUCH):
            nursery.start_soon(arrivals.until, pairs[number][0].fileno(), step(number))
        await wait_all_tasks_blocked()
        for number in range(MUCH):
            pairs[number][1].send(b"x")
        so_far = []
        while len(served) < MUCH:
            await trio.lowlevel.checkpoint()
            so_far.append(len(served))
        assert sorted(served) == list(range(MUCH))
        # Whose turn comes first in a round is Trio's dice: of the rounds in between one may go unseen.
        assert any(0 < count < MUCH for count in so_far)


async def test_of_a_step_that_has_declined_nothing_is_kept(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    ours, theirs = pairs[0]
    async with running() as (arrivals, nursery):
        done = trio.Event()

        async def sleep() -> weakref.ref[Callable[[], bool]]:
            step = reading(ours, [])
            await arrivals.until(ours.fileno(), step)
            return weakref.ref(step)

        async def look() -> None:
            assert (await sleep())() is None
            done.set()

        nursery.start_soon(look)
        await wait_all_tasks_blocked()
        theirs.send(b".")
        await done.wait()


async def test_an_error_keeps_nothing_of_another_s_step(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    (bad, to_bad), (good, to_good) = pairs[:2]
    errors: list[Exception] = []
    got: list[bytes] = []

    def breaks() -> bool:
        raise ValueError("broken")

    async with running() as (arrivals, nursery):

        async def sleep_badly() -> None:
            try:
                await arrivals.until(bad.fileno(), breaks)
            except ValueError as error:
                errors.append(error)

        step = reading(good, got)
        kept = weakref.ref(step)
        nursery.start_soon(sleep_badly)
        await wait_all_tasks_blocked()
        nursery.start_soon(arrivals.until, good.fileno(), step)
        await wait_all_tasks_blocked()
        del step
        to_bad.send(b"x")
        to_good.send(b".")
        await wait_all_tasks_blocked()
        assert (len(errors), got) == (1, [b"."])
        assert kept() is None
