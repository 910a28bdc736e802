"""Large requests, pictures mostly: they arrive byte for byte, and stay within their bound together."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import pytest
import trio

import gateway.app
from gateway.bodies import BodyBudget
from tests.conftest import Tls
from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import http1, request_bytes
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Whole
from tests.wire import frames as f
from tests.wire.around import TRANSPORTS
from tests.wire.raw2 import raw2

MIB = 1 << 20
CHUNK = 30_000
WAYS = ["length", "chunks", "http2"]
ways = pytest.mark.parametrize("way", WAYS)


def picture(size: int) -> bytes:
    """A request of exactly so many bytes."""
    head = json.dumps(CHAT.payload(stream=False))[:-1].encode() + b', "picture": "'
    noise = base64.b64encode(random.Random(size).randbytes(30_000))
    rest = size - len(head) - 2
    return head + (noise * (rest // len(noise) + 1))[:rest] + b'"}'


async def post(way: str, gateway: Gateway, body: bytes, tls: Any = None) -> int:
    """Send a body; returns the answer's status."""
    if way == "http2":
        async with raw2(gateway.url, tls=tls) as connection:
            fields = f.head(more=[(b"content-length", str(len(body)).encode())])
            await connection.send(f.headers(1, fields, end=False))
            await connection.upload(1, body)
            await connection.over(1)
            return connection.status(1)
    async with http1(gateway.url, tls=tls) as client:
        if way == "length":
            await client.send(request_bytes(CHAT.path, body))
        else:
            await client.send(request_bytes(CHAT.path, headers={"Transfer-Encoding": "chunked"}))
            for at in range(0, len(body), CHUNK):
                piece = body[at : at + CHUNK]
                await client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            await client.send(b"0\r\n\r\n")
        return (await client.answer()).status


@ways
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mib", [1, 8, 20])
async def test_large_bodies_arrive_byte_for_byte(mib: int, transport: str, way: str, tls: Tls) -> None:
    engine, body = ScriptedEngine(Whole()), picture(mib * MIB)
    secure = transport == "tls"
    server = {"tls": tls.section} if secure else {}
    async with running_gateway(engine, server=server, seconds=60) as gateway:
        assert await post(way, gateway, body, tls.trusted if secure else None) == 200
    assert engine.calls[0].body == body


@ways
@pytest.mark.parametrize("limit", [32_768, 500_000, 3 * MIB])
async def test_the_limit_is_where_it_is_said_to_be(limit: int, way: str) -> None:
    engine = ScriptedEngine(Whole())
    async with running_gateway(engine, server={"max_body_bytes": limit}) as gateway:
        assert await post(way, gateway, picture(limit)) == 200
        assert await post(way, gateway, picture(limit + 1)) == 413
        await gateway.record(outcome="rejected", status=413, code="body_too_large", engine=None)
    assert [len(call.body) for call in engine.calls] == [limit]


class Recorder(BodyBudget):
    """Notes the most it ever held."""

    all: list[Recorder] = []  # noqa: RUF012
    peak = 0

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.all.append(self)

    async def take(self, size: int, *, whole: int) -> None:
        await super().take(size, whole=whole)
        self.peak = max(self.peak, self.held)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    monkeypatch.setattr(gateway.app, "BodyBudget", Recorder)
    Recorder.all.clear()
    return Recorder.all


async def test_many_at_once_stay_within_their_bound(recorder: list[Recorder]) -> None:
    """Sixty uploads of a megabyte, where six have room; and each arrives."""
    engine, body = ScriptedEngine(Whole(), slots=100), picture(MIB)
    server = {"bodies_bytes": 8 * MIB, "max_body_bytes": 2 * MIB}
    statuses = []
    async with running_gateway(engine, server=server, seconds=60) as running:

        async def upload(way: str) -> None:
            statuses.append(await post(way, running, body))

        async with trio.open_nursery() as nursery:
            for number in range(60):
                nursery.start_soon(upload, WAYS[number % 3])
    assert statuses == [200] * 60
    assert 3 * MIB <= recorder[0].peak <= 8 * MIB
    assert recorder[0].held == 0
    assert all(call.body == body for call in engine.calls)


@ways
async def test_small_requests_pass_while_large_uploads_wait(way: str, recorder: list[Recorder]) -> None:
    engine, body = ScriptedEngine(Whole()), picture(MIB)
    server = {"bodies_bytes": 2 * MIB, "max_body_bytes": 2 * MIB}
    async with running_gateway(engine, server=server) as running, http1(running.url) as holder:
        await holder.send(request_bytes(CHAT.path, body)[:-1])
        await running.in_phase("receiving")
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                assert await post(way, running, body) == 200

            for _ in range(3):
                nursery.start_soon(wait)
            await running.in_phase("receiving", 4)
            for size in (300, 1000, 100_000, 250_000):
                assert await post(way, running, picture(size)) == 200
            assert len(engine.calls) == 4
            await holder.send(body[-1:])
            assert (await holder.answer()).status == 200
    assert len(engine.calls) == 8
    assert recorder[0].peak <= 2 * MIB


async def test_a_body_that_waits_for_room_may_run_out_of_time() -> None:
    engine = ScriptedEngine(Whole())
    server = {"bodies_bytes": 2 * MIB, "max_body_bytes": 2 * MIB, "body_seconds": 1}
    async with running_gateway(engine, server=server) as running, http1(running.url) as holder:
        await holder.send(request_bytes(CHAT.path, picture(MIB))[:-1])
        await running.in_phase("receiving")
        async with http1(running.url) as client:
            await client.send(request_bytes(CHAT.path, headers={"Content-Length": str(MIB)}))
            # 503 if its own time was over in the turn in which the holder's was: there had been no room yet.
            assert (await client.answer()).status in (408, 503)
        assert (await holder.answer()).status == 408
    assert engine.calls == []
