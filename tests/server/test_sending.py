"""The sending side of an HTTP/2 connection: what the windows let out, in frames of a decent size."""

from __future__ import annotations

from collections.abc import Callable

import h2.exceptions
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.server.abuse import Allowance
from gateway.server.frames import Frames
from gateway.server.sending import MOST_CONTROL_BYTES, MOST_UNWRITTEN_BYTES, Sending
from tests.wire import frames as f

WIDE = f.settings((4, 0x7FFFFFFF), (5, 0xFFFFFF)) + f.window(0, 0x7FFF0000 - 65535)


class Wire:
    """A socket that takes bytes when the test lets it."""

    def __init__(self, opening: bytes = b"") -> None:
        self.frames = Frames(most_streams=100, most_head_bytes=65_536)
        self.frames.initiate_connection()
        self.receive(f.PREFACE + f.settings() + opening)
        for number in (1, 3):
            self.receive(f.headers(number, f.head(b"/", b"GET")))
            self.frames.send_headers(number, [(b":status", b"200")])
        self.frames.data_to_send()
        self.written = bytearray()
        self.open = trio.Event()
        self.open.set()
        self.too_much = 0
        self.sending = Sending(self.frames, Allowance(), self.write, self.cut_off)

    def receive(self, data: bytes) -> None:
        self.frames.receive_data(data)

    async def write(self, data: bytes) -> None:
        await self.open.wait()
        self.written += data

    def cut_off(self) -> None:
        self.too_much += 1

    def data_frames(self, stream: int = 1) -> list[int]:
        """The sizes of the DATA frames that were written for a stream."""
        sizes, at = [], 0
        while at < len(self.written):
            size = int.from_bytes(self.written[at : at + 3], "big")
            if self.written[at + 3] == f.DATA and self.written[at + 8] == stream:
                sizes.append(size)
            at += 9 + size
        return sizes


async def test_frames_stay_small_whatever_the_client_allows() -> None:
    """Its windows and its frames may be 16 MB; others of its streams want their turn all the same."""
    wire = Wire(WIDE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.sending.run)
        await wire.sending.body(1, b"x" * 4_000_000, lambda: True)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert sum(wire.data_frames()) == 4_000_000
    assert max(wire.data_frames()) <= MOST_UNWRITTEN_BYTES
    assert wire.too_much == 0


async def test_little_gathers_for_a_socket_that_takes_nothing() -> None:
    wire = Wire(WIDE)
    wire.open = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.sending.run)
        for number in (1, 3):
            nursery.start_soon(wire.sending.body, number, b"x" * 1_000_000, lambda: True)
        await wait_all_tasks_blocked()
        assert len(wire.sending.take()) <= 3 * MOST_UNWRITTEN_BYTES
        assert wire.sending.blocked == {}  # it isn't their windows
        nursery.cancel_scope.cancel()


async def test_a_closed_window_is_noted_with_its_time_until_it_opens(autojump_clock: MockClock) -> None:
    wire = Wire(f.settings((4, 10)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.sending.run)
        nursery.start_soon(wire.sending.body, 1, b"x" * 25, lambda: True)
        await wait_all_tasks_blocked()
        assert wire.sending.blocked == {1: 0}
        await trio.sleep(7)
        wire.receive(f.window(1, 5))
        wire.sending.go_on(1)
        await wait_all_tasks_blocked()
        assert wire.sending.blocked == {1: 7}
        wire.receive(f.window(1, 100))
        wire.sending.go_on(1)
        await wait_all_tasks_blocked()
        assert wire.sending.blocked == {}
        assert wire.data_frames() == [10, 5, 10]
        nursery.cancel_scope.cancel()


async def test_a_cancelled_body_leaves_no_note() -> None:
    wire = Wire(f.settings((4, 0)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.sending.body, 1, b"x", lambda: True)
        await wait_all_tasks_blocked()
        assert list(wire.sending.blocked) == [1]
        nursery.cancel_scope.cancel()
    assert wire.sending.blocked == {}


async def waits(wire: Wire, wake: Callable[[], None]) -> bool:
    """Whether a body of stream 1 still waits for its window after something has happened."""
    done = trio.Event()
    wanted = [True]

    async def send() -> None:
        await wire.sending.body(1, b"x", lambda: wanted[0])
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await wait_all_tasks_blocked()
        wanted[0] = False  # so it ends as soon as it looks again
        wake()
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return not done.is_set()


async def test_who_is_woken_by_what() -> None:
    wire = Wire(f.settings((4, 0)))
    assert not await waits(wire, lambda: wire.sending.go_on(1))
    assert await waits(wire, lambda: wire.sending.go_on(3))
    assert await waits(wire, wire.sending.go_on)  # its own window is closed
    wire.receive(f.window(1, 10))
    wire.frames.send_data(1, b"x" * 10)

    def open_and_go_on() -> None:
        wire.receive(f.window(1, 1))
        wire.sending.go_on()

    assert not await waits(wire, open_and_go_on)


async def test_the_end_wakes_everybody() -> None:
    wire = Wire(f.settings((4, 0)))
    assert not await waits(wire, wire.sending.end)


async def test_a_stream_that_was_reset_is_told_so() -> None:
    wire = Wire(f.settings((4, 0)))
    with pytest.RaisesGroup(h2.exceptions.StreamClosedError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wire.sending.body, 1, b"x", lambda: True)
            await wait_all_tasks_blocked()
            wire.receive(f.reset(1))
            wire.receive(f.headers(5, f.head(b"/", b"GET")))  # h2 forgets closed streams at the next
            wire.sending.go_on()


async def test_answers_that_nobody_reads_are_too_much_one_day() -> None:
    wire = Wire()
    wire.open = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.sending.run)
        for _ in range(MOST_CONTROL_BYTES // 17 + 5000):
            wire.receive(f.ping())
            wire.sending.wake()
            if wire.too_much:
                break
        nursery.cancel_scope.cancel()
    assert wire.too_much == 1


async def test_a_piece_goes_at_once_only_if_all_of_it_can() -> None:
    wire = Wire(f.settings((4, 100)))
    assert wire.sending.body_now(1, b"x" * 60)
    assert not wire.sending.body_now(1, b"x" * 60)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.sending.body, 1, b"x" * 60, lambda: True)
        await wait_all_tasks_blocked()
        wire.receive(f.window(1, 1000))
        assert not wire.sending.body_now(1, b"behind"), "it would overtake what waits"
        wire.sending.go_on(1)
        await wait_all_tasks_blocked()
        assert wire.sending.body_now(1, b"behind")
        nursery.cancel_scope.cancel()
