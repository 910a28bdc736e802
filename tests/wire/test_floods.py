"""Clients that send much of what only costs: cut off, with one line in the log; the others' tokens come.

And clients that are only busy, who must not be taken for those.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import trio

from tests.conftest import Tls
from tests.support.gateway import running_gateway
from tests.support.http1 import GONE, http1, request_bytes
from tests.support.http2 import http2
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Stream
from tests.wire import frames as f
from tests.wire.around import BODY, TRANSPORTS, Scene, scene
from tests.wire.raw2 import Raw2, raw2

FLOOD = "connection ended by FloodError"
LATEST_SECONDS = 3.0
"""A bystander's longest wait for a token. The figure is much lower on a machine that does nothing else."""

MODELS = f.head(b"/v1/models", b"GET")
OPEN = f.headers(1, f.head(), end=False)
CLOSED = f.headers(1, f.head(b"/no-such"), end=True)


def rapid_resets() -> Iterator[bytes]:
    for number in range(1, 40_000, 2):
        yield f.headers(number, f.head(), end=False) + f.reset(number)


def rapid_whole_requests() -> Iterator[bytes]:
    for number in range(1, 40_000, 2):
        yield f.post(number, BODY) + f.reset(number)


def malformed_heads() -> Iterator[bytes]:
    for number in range(1, 40_000, 2):
        yield f.headers(number, [*MODELS, (b"A", b"b")])


def made_to_reset() -> Iterator[bytes]:
    """The server resets them, because of what the client does to their windows."""
    for number in range(1, 40_000, 2):
        yield f.headers(number, f.head(), end=False) + f.window(number, 0x7FFFFFFF)


def same(opening: bytes, frame: bytes, count: int = 40_000) -> Iterator[bytes]:
    yield opening
    for _ in range(count):
        yield frame


FLOODS: dict[str, Callable[[], Iterator[bytes]]] = {
    "rapid resets": rapid_resets,
    "rapid resets of whole requests": rapid_whole_requests,
    "malformed heads": malformed_heads,
    "streams the server has to reset": made_to_reset,
    "pings": lambda: same(b"", f.ping()),
    "settings": lambda: same(b"", f.settings((4, 65535))),
    "empty settings": lambda: same(b"", f.settings()),
    "acknowledgements": lambda: same(b"", f.frame(f.SETTINGS, f.ACK)),
    "answers to pings nobody sent": lambda: same(b"", f.frame(f.PING, f.ACK, 0, b"12345678")),
    "priorities": lambda: same(b"", f.frame(f.PRIORITY, 0, 3, b"\x00\x00\x00\x01\x10")),
    "frames nobody knows": lambda: same(b"", f.frame(0xFA, 0, 0)),
    "empty data": lambda: same(OPEN, f.data(1)),
    "data of a byte": lambda: same(OPEN, f.data(1, b"x"), 60_000),
    "empty data of a closed stream": lambda: same(CLOSED + f.reset(1), f.data(1)),
    "data of a byte for a closed stream": lambda: same(CLOSED + f.reset(1), f.data(1, b"x"), 60_000),
    "windows": lambda: same(b"", f.window(0, 1), 60_000),
    "windows of a stream": lambda: same(OPEN, f.window(1, 1), 60_000),
    "windows of a closed stream": lambda: same(CLOSED + f.reset(1), f.window(1, 1), 60_000),
    "resets of a closed stream": lambda: same(CLOSED, f.reset(1)),
}


async def pour(connection: Raw2, flood: Iterator[bytes]) -> None:
    batch = bytearray()
    for piece in flood:
        batch += piece
        if len(batch) > 16_384:
            await connection.send(bytes(batch))
            batch.clear()
            if connection.gone:
                return
    await connection.send(bytes(batch))


async def watch(here: Scene, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
    """Each bystander gets a token again and again, none of them late."""
    with trio.CancelScope() as scope:
        task_status.started(scope)
        while True:
            with trio.fail_after(LATEST_SECONDS), trio.CancelScope(shield=True):
                await here.still_there()
            await trio.sleep(0.005)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_is_cut_off(flood: str, transport: str, tls: Tls) -> None:
    async with (
        scene(tls if transport == "tls" else None, allowed=(FLOOD,)) as here,
        raw2(here.url, tls=here.trusted) as connection,
        trio.open_nursery() as nursery,
    ):
        watching = await nursery.start(watch, here)
        await pour(connection, FLOODS[flood]())
        await connection.until(lambda: connection.gone)
        assert connection.goaway in (f.ENHANCE_YOUR_CALM, None)  # a reset may overtake it
        watching.cancel()
    assert here.strangers() == []


@pytest.mark.parametrize("flood", ["pings", "settings", "data of a byte for a closed stream"])
async def test_a_flood_whose_answers_nobody_reads_is_cut_off(flood: str) -> None:
    async with scene(allowed=(FLOOD,)) as here, raw2(here.url) as connection:
        await connection.answered()
        await connection.stop_reading()
        frames = b"".join(FLOODS[flood]())
        with suppress(*GONE):
            for _ in range(4):
                await connection.stream.send_all(frames)
            await trio.sleep(1.5)  # it lingers for as long as more comes
            await connection.stream.send_all(f.ping())
        with pytest.raises(GONE):
            await connection.stream.send_all(f.ping())
        await here.still_there()


async def test_many_floods_are_one_line_in_the_log() -> None:
    async with scene(allowed=(FLOOD,)) as here:
        for _ in range(5):
            async with raw2(here.url) as connection:
                await pour(connection, FLOODS["pings"]())
                await connection.until(lambda: connection.gone)
        await here.still_there()


async def test_twenty_thousand_resets_at_an_honest_pace_are_no_flood() -> None:
    """A client may change its mind about all its streams, again and again."""
    async with scene() as here, raw2(here.url) as connection:
        number = 1
        for _ in range(5):
            for _ in range(200):
                await connection.send(f.headers(number, f.head(), end=False), f.reset(number))
                number += 2
            await connection.answered()
        assert not connection.gone


async def test_a_busy_client_is_no_flood() -> None:
    """Its requests come with a priority and an empty end, each piece it gets is thanked for twice."""
    engine = ScriptedEngine(Stream(tokens=30), slots=32)
    async with running_gateway(engine) as gateway, raw2(gateway.url) as connection:
        numbers = range(1, 2 * 600, 2)
        for number in numbers:
            await connection.send(
                f.frame(f.PRIORITY, 0, number, b"\x00\x00\x00\x00\x10"),
                f.headers(number, f.head(), end=False),
                f.data(number, BODY),
                f.data(number, end=True),
            )
            if number % 32 == 31:
                await connection.until(lambda: number in connection.ended or connection.gone)  # noqa: B023
        for number in numbers:
            await connection.over(number)
            assert connection.status(number) == 200
        assert not connection.gone


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_body_in_chunks_of_a_byte_keeps_nobody_waiting(transport: str, tls: Tls) -> None:
    head = request_bytes(CHAT.path, headers={"Transfer-Encoding": "chunked"})
    async with (
        scene(tls if transport == "tls" else None) as here,
        http1(here.url, tls=here.trusted) as client,
        trio.open_nursery() as nursery,
    ):
        watching = await nursery.start(watch, here)
        await client.send(head)
        for _ in range(10):
            await client.send(b"1\r\n \r\n" * 10_000)
        await client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert (await client.answer()).status == 200
        watching.cancel()


async def test_a_body_in_frames_of_200_bytes_keeps_nobody_waiting() -> None:
    async with (
        scene() as here,
        raw2(here.url) as connection,
        trio.open_nursery() as nursery,
    ):
        watching = await nursery.start(watch, here)
        await connection.send(OPEN)
        for sent in range(32_000, 640_000, 32_000):
            await connection.send(f.data(1, b" " * 200) * 160)
            await connection.until(lambda: sent - connection.windows.get(1, 0) < 33_000)  # noqa: B023
        await connection.send(f.data(1, BODY, end=True))
        await connection.over(1)
        assert connection.status(1) == 200
        watching.cancel()


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "more", [{}, {"Connection": "Upgrade", "Upgrade": "h2c"}], ids=["plain", "with an upgrade"]
)
async def test_bytes_without_end_behind_a_request_are_not_kept(more: dict[str, str]) -> None:
    engine = ScriptedEngine(Stream(prefill=trio.Event()), slots=1)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await client.post(CHAT.path, CHAT.payload(stream=True), headers=more)
        call = await engine.call()
        before = resident_bytes()
        piece = b"GET / HTTP/1.1\r\n" * 4096
        with trio.move_on_after(5):
            for _ in range(1000):
                await client.send(piece)
        assert resident_bytes() - before < 16 << 20
        assert call.closed_at is None
        await client.close()
        await call.closed()


async def test_streams_that_wait_for_their_windows_are_not_woken_by_each_other_s() -> None:
    """256 answers stand still; a thousand windows for one of them cost a thousand steps, not 256,000."""
    async with scene() as here, raw2(here.url, opening=f.PREFACE + f.settings((4, 0))) as connection:
        numbers = range(1, 2 * 200, 2)
        await connection.send(*[f.headers(number, f.head(b"/no-such", b"GET")) for number in numbers])
        await connection.until(lambda: len(connection.heads) == len(numbers))
        counter = Steps()
        trio.lowlevel.add_instrument(counter)
        try:
            for _ in range(50):
                await connection.send(f.window(1, 1), f.window(0, 1))
                await connection.answered()
        finally:
            trio.lowlevel.remove_instrument(counter)
        assert counter.steps < 50 * 100
        await here.still_there()


class Steps(trio.abc.Instrument):
    """Counts what the loop does."""

    def __init__(self) -> None:
        self.steps = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += 1


async def test_requests_that_each_come_with_a_priority_are_no_flood() -> None:
    """And with an empty piece of a body; what is answered well pays for both."""
    async with scene() as here, raw2(here.url) as connection:
        priority = f.frame(f.PRIORITY, 0, 1, b"\x00\x00\x00\x00\x10")
        for number in range(1, 3001, 2):
            head = f.headers(number, MODELS, end=False)
            await connection.send(priority, head, f.data(number), f.data(number, end=True))
            if number % 200 == 199:
                await connection.over(number)
        await connection.over(2999)
        assert not connection.gone


async def test_http2_client_that_cancels_everything_keeps_its_connection() -> None:
    engine = ScriptedEngine(Stream(tokens=100, pause_after=1, until=trio.Event()), slots=256)
    async with running_gateway(engine) as gateway, http2(gateway.url) as connection:
        for _ in range(3):
            streams = [await connection.post(CHAT.path, CHAT.payload(stream=True)) for _ in range(100)]
            for stream in streams:
                await stream.until(b" tk0")
            for stream in streams:
                await stream.reset()
        await gateway.recorded(300, outcome="client_gone")
        assert (await connection.ask("/v1/models")).status == 200
