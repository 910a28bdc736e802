"""Writing to a client's socket: in small pieces until it has shown to be quick."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import trio
from trio.testing import MockClock

from gateway.server import outgoing
from gateway.server.outgoing import ClientStream, grain


class Recording:
    """Stands for a socket: ``room`` bytes go in before it is full."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.pieces: list[tuple[int, int]] = []

    def send(self, data: memoryview, flags: int = 0) -> int:
        if not self.room:
            raise BlockingIOError
        taken = min(len(data), self.room)
        self.room -= taken
        self.pieces.append((taken, flags))
        return taken


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def stream_on(sock: socket.socket, *, stall_seconds: float = 30.0) -> ClientStream:
    sock.setblocking(False)
    return ClientStream(trio.socket.from_stdlib_socket(sock), stall_seconds=stall_seconds)


def recorded(stream: ClientStream, room: int = 1 << 40) -> Recording:
    stream._raw = recording = Recording(room)  # type: ignore[assignment]
    return recording


def test_the_pieces_follow_the_stall_clock() -> None:
    assert grain(0.0) == 0
    assert grain(5.0) == 180
    assert grain(30.0) == 1686


async def test_whoever_is_new_is_sent_small_pieces(pair: tuple[socket.socket, socket.socket]) -> None:
    stream = stream_on(pair[0])
    socket_ = recorded(stream)
    assert stream.send_now(b"x" * 3000) == 3000
    assert socket_.pieces == [(1686, socket.MSG_EOR), (1314, socket.MSG_EOR)]


@pytest.mark.parametrize(
    ("seconds", "pieces"),
    [(0.0, [(2000, 0)]), (0.9, [(2000, 0)]), (1.1, [(1686, socket.MSG_EOR), (314, socket.MSG_EOR)])],
)
async def test_whoever_has_taken_much_is_quick_for_a_moment(
    pair: tuple[socket.socket, socket.socket],
    seconds: float,
    pieces: list[tuple[int, int]],
    autojump_clock: MockClock,
) -> None:
    stream = stream_on(pair[0])
    socket_ = recorded(stream)
    stream.send_now(b"x" * 2 * outgoing.QUICK_BYTES)
    assert [flags for _, flags in socket_.pieces[-2:]] == [socket.MSG_EOR, 0]
    await trio.sleep(seconds)
    del socket_.pieces[:]
    assert stream.send_now(b"x" * 2000) == 2000
    assert socket_.pieces == pieces


async def test_whoever_takes_little_at_a_time_never_is(
    pair: tuple[socket.socket, socket.socket], autojump_clock: MockClock
) -> None:
    stream = stream_on(pair[0])
    socket_ = recorded(stream)
    for _ in range(100):
        stream.send_now(b"x" * 6000)
        await trio.sleep(0.1)
    assert {flags for _, flags in socket_.pieces} == {socket.MSG_EOR}


async def test_without_a_stall_clock_pieces_are_large(pair: tuple[socket.socket, socket.socket]) -> None:
    stream = stream_on(pair[0], stall_seconds=0.0)
    socket_ = recorded(stream)
    assert stream.send_now(b"x" * 3000) == 3000
    assert socket_.pieces == [(3000, 0)]


async def test_a_unix_socket_needs_no_small_pieces() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = stream_on(ours)
        socket_ = recorded(stream)
        assert stream.send_now(b"x" * 3000) == 3000
        assert socket_.pieces == [(3000, 0)]


async def test_a_full_socket_takes_nothing_now(pair: tuple[socket.socket, socket.socket]) -> None:
    stream = stream_on(pair[0])
    recorded(stream, room=1300)
    assert stream.send_now(b"x" * 3000) == 1300
    assert stream.send_now(b"x" * 3000) == 0


@pytest.mark.parametrize("stall_seconds", [0.0, 5.0, 30.0])
async def test_everything_arrives(pair: tuple[socket.socket, socket.socket], stall_seconds: float) -> None:
    stream, theirs = stream_on(pair[0], stall_seconds=stall_seconds), pair[1]
    theirs.setblocking(False)
    reader = trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
    data = bytes(range(256)) * 8192
    got = bytearray()
    async with trio.open_nursery() as nursery:

        async def write() -> None:
            await stream.send_all(data)
            await stream.send_eof()

        nursery.start_soon(write)
        async for piece in reader:
            got += piece
    assert got == data


async def test_others_get_their_turn_during_a_long_write(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_on(pair[0])
    socket_ = recorded(stream)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(others)
        await stream.send_all(b"x" * 4_000_000)
        nursery.cancel_scope.cancel()
    assert sum(size for size, _ in socket_.pieces) == 4_000_000
    assert turns >= 4_000_000 // (512 * 1024)


@pytest.mark.parametrize("room", [100, 1 << 40])
async def test_only_a_write_that_isn_t_whole_is_cut_short(
    pair: tuple[socket.socket, socket.socket], room: int
) -> None:
    """Whatever cancels it while the last byte goes comes too late."""
    stream = stream_on(pair[0])
    whole = False
    with trio.CancelScope() as scope:

        class Cancelling(Recording):
            def send(self, data: memoryview, flags: int = 0) -> int:
                scope.cancel()
                return super().send(data, flags)

        stream._raw = Cancelling(room)  # type: ignore[assignment]
        await stream.send_all(b"x" * 1000)
        whole = True
    assert whole is (room > 1000)


async def test_a_broken_or_closed_connection_is_told(pair: tuple[socket.socket, socket.socket]) -> None:
    stream = stream_on(pair[0])
    pair[1].close()
    with pytest.raises(trio.BrokenResourceError):
        await stream.send_all(b"x" * 10_000_000)
    await stream.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await stream.send_all(b"x")


@pytest.mark.parametrize("sent_before", [True, False])
async def test_who_waits_for_a_closed_connection_is_told_so(
    sent_before: bool, pair: tuple[socket.socket, socket.socket]
) -> None:
    stream = stream_on(pair[0])
    if sent_before:
        pair[1].send(b"x")
        assert await stream.receive_some() == b"x"
    await stream.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await stream.receive_some()
    with pytest.raises(trio.ClosedResourceError):
        await stream.wait_send_all_might_not_block()


async def test_a_write_that_waits_ends_when_its_socket_is_closed(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    stream = stream_on(pair[0])
    async with trio.open_nursery() as nursery:

        async def write() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await stream.send_all(b"x" * 50_000_000)

        nursery.start_soon(write)
        await trio.testing.wait_all_tasks_blocked()
        await stream.aclose()
