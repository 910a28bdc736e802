"""The short way of a body: what is sent, however much the socket takes at once, and what is kept of it."""

from __future__ import annotations

import pytest

from gateway.server.lane import LARGE_BYTES, Lane

SIZES = [1, 5, LARGE_BYTES, LARGE_BYTES + 1]


class Socket:
    """Takes so much at once, and notes what is written, and of what memory."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self.got = bytearray()
        self.waited_with: list[object] = []

    def write_now(self, data: bytes) -> int:
        self.got += data[: self.at_once]
        return min(self.at_once, len(data))

    async def write(self, data: bytes | memoryview) -> None:
        self.got += data
        self.waited_with.append(data.obj if isinstance(data, memoryview) else data)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("at_once", [0, 1, 2, 3, 4, 5, 6, 7, 8, 1000, LARGE_BYTES * 2])
async def test_all_of_a_piece_is_sent_and_no_copy_of_it_waits(chunked: bool, size: int, at_once: int) -> None:
    client = Socket(at_once)
    data = b"x" * size
    framed = b"%x\r\n%b\r\n" % (size, data) if chunked else data
    await Lane(client, client.write, chunked=chunked).send(data)
    assert client.got == framed
    for kept in client.waited_with:
        assert kept is data or len(bytes(kept)) < 10  # type: ignore[call-overload]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("at_once", [0, 1, 4, 5, 1000])
async def test_what_couldnt_be_sent_at_once_is_returned(chunked: bool, at_once: int) -> None:
    client = Socket(at_once)
    lane = Lane(client, client.write, chunked=chunked)
    rest = lane.send_now(b"piece")
    framed = b"5\r\npiece\r\n" if chunked else b"piece"
    assert rest == (framed[at_once:] if at_once else None)
    if rest:
        await lane.send_rest(rest)
        assert client.got == framed
