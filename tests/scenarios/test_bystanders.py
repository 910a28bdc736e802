"""What one connection does to itself stays there: the process, and everybody else's streams, go on."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio

from tests.support.gateway import Gateway, running_gateway
from tests.support.hostile import HOSTILE, PREFACE, SETTINGS, frame
from tests.support.http1 import Http1, connect, http1
from tests.support.http2 import http2
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Stream


@asynccontextmanager
async def bystander(gateway: Gateway, engine: ScriptedEngine, go_on: trio.Event) -> AsyncIterator[None]:
    """One stream over each protocol that is under way before, and whole afterwards."""
    assert CHAT.parts is not None
    async with http1(gateway.url) as client, http2(gateway.url) as connection:
        await client.post(CHAT.path, CHAT.payload(stream=True))
        stream = await connection.post(CHAT.path, CHAT.payload(stream=True))
        await client.head()
        await client.until(b" tk1")
        await stream.until(b" tk1")
        yield
        go_on.set()
        assert await client.rest() == CHAT.parts.all(5)
        assert await stream.rest() == CHAT.parts.all(5)
        assert (await client.ask("/v1/models")).status == 200
        assert (await connection.ask("/v1/models")).status == 200


@pytest.mark.parametrize("ending", ["waits", "closes", "resets"])
@pytest.mark.parametrize("fault", HOSTILE)
async def test_garbage_of_one_connection_touches_nobody_else(fault: str, ending: str) -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(Stream(pause_after=2, until=go_on), slots=4)
    async with running_gateway(engine) as gateway, bystander(gateway, engine, go_on):
        for _ in range(3):
            client = Http1(await connect(gateway.url))
            with suppress(trio.BrokenResourceError):  # it may be cut off meanwhile
                await client.send(HOSTILE[fault])
            if ending == "waits":
                with trio.move_on_after(0.05):
                    await client.eof()
            await (client.reset() if ending == "resets" else client.close())
        assert (await gateway.admin("/healthz")).status == 200


async def test_late_data_for_an_answered_stream_touches_nobody_else() -> None:
    """A body that is still arriving though its answer is out already."""
    go_on = trio.Event()
    engine = ScriptedEngine(Stream(pause_after=2, until=go_on), slots=4)
    server = {"max_body_bytes": 1000}
    async with (
        running_gateway(engine, server=server) as gateway,
        bystander(gateway, engine, go_on),
        http2(gateway.url) as connection,
    ):
        stream = await connection.request("POST", CHAT.path, {"content-length": "9000"}, end=False)
        await stream.send_data(b"x" * 2000)
        assert (await stream.head()).status == 413
        late = frame(0, 0, stream.number, b"x" * 100)
        await connection.stream.send_all(late * 3)
        assert (await gateway.admin("/healthz")).status == 200


async def test_a_thousand_random_connections_do_not_end_the_process() -> None:
    dice = random.Random(11)
    go_on = trio.Event()
    engine = ScriptedEngine(Stream(pause_after=2, until=go_on), slots=4)
    samples = list(HOSTILE.values())

    async def stranger() -> None:
        for _ in range(20):
            sample = bytearray(dice.choice(samples))
            for _ in range(dice.randrange(3)):
                sample[dice.randrange(len(sample))] = dice.randrange(256)
            client = Http1(await connect(gateway.url))
            with trio.move_on_after(0.01):
                with suppress(trio.BrokenResourceError):
                    await client.send(bytes(sample[: dice.randrange(len(sample)) + 1]))
                    await client.eof()
            await (client.reset() if dice.random() < 0.5 else client.close())

    async with (
        running_gateway(engine) as gateway,
        bystander(gateway, engine, go_on),
        trio.open_nursery() as nursery,
    ):
        for _ in range(50):
            nursery.start_soon(stranger)


async def test_a_frame_announced_too_long_is_refused_before_it_has_come() -> None:
    """Who may announce 16 MiB frames may also have them held, on every connection."""
    async with running_gateway(ScriptedEngine(Stream())) as gateway, http1(gateway.url) as client:
        await client.send(PREFACE + SETTINGS + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + b"x" * 100)
        with trio.fail_after(2):
            await client.eof()
