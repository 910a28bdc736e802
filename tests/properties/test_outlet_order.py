"""Bytes that go past the spool and bytes that go through it come out in one order, none lost, none twice."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.events import Tail
from gateway.request import Request
from gateway.response import Response
from gateway.server.lane import Lane
from gateway.spool import Spool
from gateway.writer import write
from tests.fakes import make_request


class Socket:
    """Takes as many bytes at once as `takes` says, turn by turn; who waits gets all taken, turns later."""

    def __init__(self, takes: list[int], turns: int) -> None:
        self.got = bytearray()
        self._takes = takes
        self._turns = turns
        self._busy = False

    def write_now(self, data: bytes) -> int:
        """Take a part."""
        if self._busy:
            return 0
        size = min(self._takes.pop(0) if self._takes else len(data), len(data))
        self.got += data[:size]
        return size

    async def write(self, data: bytes | memoryview) -> None:
        """Take all, in pieces."""
        self._busy = True
        try:
            for at in range(0, len(data), max(1, len(data) // 3)):
                for _ in range(self._turns):
                    await trio.lowlevel.checkpoint()
                self.got += data[at : at + max(1, len(data) // 3)]
        finally:
            self._busy = False


class LaneClient:
    """A client behind a lane, without a server around it."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.finished = False
        self.send_rest, self.send = lane.send_rest, lane.send

    def outlet(self) -> Callable[[bytes], bytes | None]:
        """Return the lane's way for pieces that need no waiting."""
        return self._lane.send_now

    async def settled(self) -> None:
        """Hold nothing."""
        await trio.lowlevel.checkpoint()

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Take the head."""
        await trio.lowlevel.checkpoint()

    async def finish(self) -> None:
        """Take the end."""
        self.finished = True

    def abort(self) -> None:
        """Never called here."""
        raise AssertionError("aborted")


async def _relayed(
    pieces: list[bytes], pauses: list[int], socket: Socket, *, chunked: bool, limit: int
) -> Request:
    request = make_request()
    spool = Spool(limit)
    client = LaneClient(Lane(socket, socket.write, chunked=chunked))

    async def reader() -> None:
        for number, piece in enumerate(pieces):
            spool.push(piece)
            await spool.room()
            for _ in range(pauses[number % len(pauses)] if pauses else 0):
                await trio.lowlevel.checkpoint()
        spool.end()

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader)
            await write(request, client, Response(200, [], spool, Tail()), inf)
    assert client.finished
    assert spool.held == 0
    return request


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.binary(min_size=1, max_size=40), max_size=12),
    pauses=st.lists(st.integers(0, 4), max_size=5),
    takes=st.lists(st.integers(0, 30), max_size=12),
    turns=st.integers(0, 3),
    limit=st.integers(1, 60),
)
def test_raw_bytes_keep_their_order(
    pieces: list[bytes], pauses: list[int], takes: list[int], turns: int, limit: int
) -> None:
    socket = Socket(takes, turns)

    async def run() -> Request:
        return await _relayed(pieces, pauses, socket, chunked=False, limit=limit)

    request = trio.run(run)
    assert bytes(socket.got) == b"".join(pieces)
    assert request.bytes == len(socket.got)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.binary(min_size=1, max_size=40), max_size=12),
    pauses=st.lists(st.integers(0, 4), max_size=5),
    takes=st.lists(st.integers(0, 30), max_size=12),
    turns=st.integers(0, 3),
)
def test_chunks_stay_whole(pieces: list[bytes], pauses: list[int], takes: list[int], turns: int) -> None:
    socket = Socket(takes, turns)

    async def run() -> Request:
        return await _relayed(pieces, pauses, socket, chunked=True, limit=50)

    trio.run(run)
    got, body = bytes(socket.got), b""
    while got:
        size, _, rest = got.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        got = rest[length + 2 :]
    assert body == b"".join(pieces)
