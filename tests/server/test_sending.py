"""The sending side of an HTTP/2 connection: what the windows let out, in frames of a decent size."""

from __future__ import annotations

from collections.abc import Callable

import h2.exceptions
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.server.abuse import Allowance
from gateway.server.frames import Frames
from gateway.server.sending import A_SHARE_BYTES, MOST_CONTROL_BYTES, MOST_UNWRITTEN_BYTES, Buffer, Sending
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

    async def write(self, data: Buffer) -> None:
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
        assert MOST_UNWRITTEN_BYTES <= wire.sending.unwritten <= 2 * MOST_UNWRITTEN_BYTES
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
    assert wire.sending.body_now(1, b"x" * 60, streams=2)
    assert not wire.sending.body_now(1, b"x" * 60, streams=2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.sending.body, 1, b"x" * 60, lambda: True)
        await wait_all_tasks_blocked()
        wire.receive(f.window(1, 1000))
        assert not wire.sending.body_now(1, b"behind", streams=2), "it would overtake what waits"
        wire.sending.go_on(1)
        await wait_all_tasks_blocked()
        nursery.start_soon(wire.sending.run)
        assert wire.sending.body_now(1, b"behind", streams=2)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert wire.data_frames() == [60, 40, 20, 6]
    assert wire.written.endswith(b"behind")


async def test_what_goes_at_once_is_bounded_by_what_waits_for_the_socket() -> None:
    wire = Wire(WIDE)
    sent = 0
    while wire.sending.body_now(1, b"x" * 1000, streams=4):
        sent += 1000
    assert 4 * A_SHARE_BYTES - 1000 <= sent <= 4 * A_SHARE_BYTES + 1000
    wire = Wire(WIDE)
    sent = 0
    while wire.sending.body_now(1, b"x" * 1000, streams=10_000):
        sent += 1000
    assert MOST_UNWRITTEN_BYTES - 1000 <= sent <= MOST_UNWRITTEN_BYTES + 1000


async def test_a_stream_has_settled_when_the_socket_has_taken_its_bytes() -> None:
    """Until then it is its stream's account that holds the bytes."""
    wire = Wire(WIDE)
    wire.open = trio.Event()
    sent, done = trio.Event(), trio.Event()

    async def send() -> None:
        await wire.sending.body(1, b"x" * 100, lambda: True)
        sent.set()
        await wire.sending.settled(1, lambda: True)
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.sending.run)
        nursery.start_soon(send)
        await wait_all_tasks_blocked()
        assert sent.is_set()
        assert not done.is_set()
        wire.open.set()
        await done.wait()
        assert wire.data_frames() == [100]
        nursery.cancel_scope.cancel()


async def test_a_reset_ends_the_wait_for_the_socket() -> None:
    wire = Wire(WIDE)
    wanted = [True]
    async with trio.open_nursery() as nursery:
        await wire.sending.body(1, b"x" * 100, lambda: True)
        nursery.start_soon(wire.sending.settled, 1, lambda: wanted[0])
        await wait_all_tasks_blocked()
        wanted[0] = False
        wire.sending.go_on(1)


async def test_large_data_isn_t_copied_while_it_waits() -> None:
    wire = Wire(WIDE)
    pieces: list[object] = []

    async def write(data: object) -> None:
        pieces.append(data)

    sending = Sending(wire.frames, Allowance(), write, wire.cut_off)
    data = bytes(10_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sending.run)
        await sending.body(1, data, lambda: True)
        await sending.settled(1, lambda: True)
        nursery.cancel_scope.cancel()
    views = [piece for piece in pieces if isinstance(piece, memoryview)]
    assert views[0].obj is data


@given(sizes=st.lists(st.integers(1, 3000), max_size=20))
def test_the_frames_are_those_that_h2_would_make(sizes: list[int]) -> None:
    ours, theirs = Wire(), Wire()
    for number, size in enumerate(sizes):
        stream, data = (1, 3)[number % 2], bytes(size)
        theirs.frames.send_data(stream, data)
        assert ours.frames.data_head(stream, size) + data == theirs.frames.data_to_send()
        for each in (1, 3):
            window = theirs.frames.local_flow_control_window(each)
            assert ours.frames.local_flow_control_window(each) == window


def test_a_frame_for_a_closed_stream_is_refused() -> None:
    wire = Wire()
    wire.receive(f.reset(1))
    with pytest.raises(h2.exceptions.ProtocolError):
        wire.frames.data_head(1, 10)
    wire.frames.data_head(3, 10)
