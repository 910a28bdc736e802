"""A client goes, in every way there is, whatever it has sent behind its request: its engine is called off.

Times have wide margins here; the tight figures belong to the bench.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio

from tests.conftest import Tls
from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import Http1, connect, http1, request_bytes
from tests.support.routes import CHAT
from tests.support.scripted import Script, ScriptedEngine
from tests.support.scripts import Stream, Whole, never_answers
from tests.wire import frames as f
from tests.wire.around import BODY, TRANSPORTS
from tests.wire.raw2 import Raw2, raw2

AT_ONCE_SECONDS = 1.0

PIPELINED = request_bytes(CHAT.path, CHAT.payload(stream=True, user="pipelined"))
BEHIND = {
    "nothing": b"",
    "a line end": b"\r\n",
    "a request": PIPELINED,
    "half a request": PIPELINED[:100],
    "100 KB of requests": PIPELINED * (100_000 // len(PIPELINED)),
    "100 KB of nonsense": b"nonsense" * 12_500,
    "3 MB of requests": PIPELINED * (3_000_000 // len(PIPELINED)),
}
PHASES = ["queue", "prefill", "head", "decode", "whole"]
UPGRADE = {"Connection": "Upgrade", "Upgrade": "h2c"}


def script(phase: str) -> Script:
    never = trio.Event()
    scripts: dict[str, Script] = {
        "queue": never_answers,
        "prefill": never_answers,
        "head": Stream(prefill=never),
        "decode": Stream(tokens=100, pause_after=3, until=never),
        "whole": Whole(takes=never),
    }
    return scripts[phase]


async def leave(client: Http1, way: str) -> None:
    await {"fin": client.close, "rst": client.reset, "half-close": client.half_close}[way]()


@asynccontextmanager
async def busy(phase: str, tls: Tls | None) -> AsyncIterator[tuple[Gateway, ScriptedEngine, Any]]:
    """A gateway whose only slot is somebody else's, if it is to be waited for."""
    engine = ScriptedEngine(script(phase), slots=1)
    trusted, server = (tls.trusted, {"tls": tls.section}) if tls else (None, {})
    async with running_gateway(engine, server=server) as gateway, AsyncExitStack() as stack:
        if phase == "queue":
            first = await stack.enter_async_context(http1(gateway.url, tls=trusted))
            await first.post(CHAT.path, CHAT.payload(stream=True, user="first"))
            await engine.call()
        yield gateway, engine, trusted


async def called_off(gateway: Gateway, engine: ScriptedEngine, phase: str) -> None:
    """Until whoever left is gone from the engine, or from the queue."""
    with trio.fail_after(AT_ONCE_SECONDS):
        if phase != "queue":
            await engine.calls[-1].closed()
        record = await gateway.record(outcome="client_gone")
    assert record["status"] == 499
    assert len(engine.calls) == 1


async def until_phase(gateway: Gateway, engine: ScriptedEngine, phase: str) -> None:
    if phase == "queue":
        await gateway.queued(1)
        return
    call = await engine.call()
    if phase in ("head", "decode"):
        await engine.until(lambda: call.sent > 0)
    if phase == "decode":
        await gateway.in_phase("streaming")


@pytest.mark.parametrize("way", ["fin", "rst", "half-close"])
@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("phase", PHASES)
async def test_client_leaves_over_tcp(phase: str, behind: str, way: str) -> None:
    await leaves_over_http1(phase, behind, way, None)


@pytest.mark.parametrize("way", ["fin", "rst"])
@pytest.mark.parametrize("behind", ["nothing", "a line end", "a request", "100 KB of requests"])
@pytest.mark.parametrize("phase", PHASES)
async def test_client_leaves_over_tls(phase: str, behind: str, way: str, tls: Tls) -> None:
    await leaves_over_http1(phase, behind, way, tls)


@pytest.mark.parametrize("behind", ["a request", "3 MB of requests"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_client_leaves_that_would_have_upgraded(phase: str, behind: str) -> None:
    await leaves_over_http1(phase, behind, "fin", None, UPGRADE)


async def leaves_over_http1(
    phase: str, behind: str, way: str, tls: Tls | None, more: dict[str, str] | None = None
) -> None:
    async with (
        busy(phase, tls) as (gateway, engine, trusted),
        http1(gateway.url, tls=trusted) as client,
    ):
        payload = CHAT.payload(stream=phase != "whole")
        await client.send(request_bytes(CHAT.path, payload, headers=more) + BEHIND[behind])
        await until_phase(gateway, engine, phase)
        await leave(client, way)
        await called_off(gateway, engine, phase)
        if way == "half-close":  # its socket is closed with its request, and not some time later
            with trio.fail_after(AT_ONCE_SECONDS):
                await client.eof()


async def reset_stream(connection: Raw2) -> None:
    await connection.send(f.reset(1))


async def say_goodbye(connection: Raw2) -> None:
    await connection.send(f.goaway())


async def fin(connection: Raw2) -> None:
    await trio.aclose_forcefully(connection.stream)


async def rst(connection: Raw2) -> None:
    await Http1(connection.stream).reset()


WAYS = {"RST_STREAM": reset_stream, "GOAWAY": say_goodbye, "fin": fin, "rst": rst}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", PHASES)
async def test_client_leaves_over_http2(phase: str, way: str, transport: str, tls: Tls) -> None:
    async with (
        busy(phase, tls if transport == "tls" else None) as (gateway, engine, trusted),
        raw2(gateway.url, tls=trusted) as connection,
    ):
        body = BODY.replace(b"true", b"false") if phase == "whole" else BODY
        await connection.send(f.post(1, body))
        await until_phase(gateway, engine, phase)
        await WAYS[way](connection)
        await called_off(gateway, engine, phase)
        if way == "RST_STREAM":
            await connection.send(f.headers(3, f.head(b"/v1/models", b"GET")))
            await connection.over(3)
            assert connection.status(3) == 200


@pytest.mark.parametrize("way", ["fin", "rst", "half-close"])
@pytest.mark.parametrize("framing", ["length", "chunks", "expectation"])
async def test_client_leaves_in_the_middle_of_its_body(framing: str, way: str) -> None:
    engine = ScriptedEngine(never_answers)
    head = {
        "length": {"Content-Length": "100000"},
        "chunks": {"Transfer-Encoding": "chunked"},
        "expectation": {"Content-Length": "100000", "Expect": "100-continue"},
    }[framing]
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await client.send(request_bytes(CHAT.path, headers=head))
        await client.send(b"c350\r\n" + b"x" * 50_000 + b"\r\n" if framing == "chunks" else b"x" * 50_000)
        await gateway.in_phase("receiving")
        await leave(client, way)
        with trio.fail_after(AT_ONCE_SECONDS):
            await gateway.record(outcome="client_gone", status=499, phase="receiving")


UPLOAD = 600_000


@asynccontextmanager
async def full_of_bodies(engine: ScriptedEngine) -> AsyncIterator[Gateway]:
    """A gateway that has no room for another large body."""
    server = {"bodies_bytes": 1 << 20, "max_body_bytes": 1 << 20}
    async with running_gateway(engine, server=server) as gateway, http1(gateway.url) as holder:
        await holder.send(request_bytes(CHAT.path, headers={"Content-Length": str(UPLOAD)}) + b"x" * 1000)
        await gateway.in_phase("receiving")
        yield gateway


@pytest.mark.parametrize("way", ["fin", "rst", "half-close"])
@pytest.mark.parametrize("sent", [0, 1000, 100_000])
async def test_client_leaves_while_its_body_waits_for_room(sent: int, way: str) -> None:
    engine = ScriptedEngine(never_answers)
    async with full_of_bodies(engine) as gateway, http1(gateway.url) as client:
        await client.send(request_bytes(CHAT.path, headers={"Content-Length": str(UPLOAD)}))
        await client.send(b"x" * sent)
        await gateway.in_phase("receiving", 2)
        await leave(client, way)
        with trio.fail_after(AT_ONCE_SECONDS):
            await gateway.record(outcome="client_gone", status=499, phase="receiving")


async def test_a_departure_that_no_room_is_left_to_see_is_seen_when_there_is() -> None:
    """A FIN behind more bytes than the kernel takes in for us; no slot is held meanwhile."""
    engine = ScriptedEngine(never_answers)
    server = {"bodies_bytes": 1 << 20, "max_body_bytes": 1 << 20}
    head = request_bytes(CHAT.path, headers={"Content-Length": str(UPLOAD)})
    async with running_gateway(engine, server=server) as gateway, http1(gateway.url) as client:
        holder = Http1(await connect(gateway.url))
        await holder.send(head + b"x" * 1000)
        await gateway.in_phase("receiving")
        await client.send(head + b"x" * 200_000)
        await gateway.in_phase("receiving", 2)
        await client.close()
        await holder.close()
        with trio.fail_after(AT_ONCE_SECONDS):
            await gateway.recorded(2, outcome="client_gone", phase="receiving")


@pytest.mark.parametrize("way", WAYS)
async def test_http2_client_leaves_while_its_body_waits_for_room(way: str) -> None:
    engine = ScriptedEngine(never_answers)
    async with full_of_bodies(engine) as gateway, raw2(gateway.url) as connection:
        fields = f.head(more=[(b"content-length", str(UPLOAD).encode())])
        await connection.send(f.headers(1, fields, end=False), f.data(1, b"x" * 16_000) * 4)
        await gateway.in_phase("receiving", 2)
        await WAYS[way](connection)
        with trio.fail_after(AT_ONCE_SECONDS):
            await gateway.record(outcome="client_gone", status=499, phase="receiving")


async def test_bodies_nobody_took_are_given_back_to_their_connection_s_window() -> None:
    """Thirty uploads that were given up would leave nothing of the megabyte they share."""
    engine = ScriptedEngine(Whole())
    async with full_of_bodies(engine) as gateway, raw2(gateway.url) as connection:
        fields = f.head(more=[(b"content-length", str(UPLOAD).encode())])
        for number in range(1, 61, 2):
            await connection.send(f.headers(number, fields, end=False), f.data(number, b"x" * 16_000) * 4)
            await connection.answered()
            await connection.send(f.reset(number))
        await connection.send(f.post(61, BODY.replace(b"true", b"false")))
        await connection.over(61)
        assert connection.status(61) == 200
        assert connection.windows[0] >= (1 << 20) - 65_535 + 60_000 * 20


async def test_the_place_of_one_who_left_goes_to_the_next_waiting_body() -> None:
    engine = ScriptedEngine(Whole())
    server = {"bodies_bytes": 1 << 20, "max_body_bytes": 1 << 20}
    head = request_bytes(CHAT.path, headers={"Content-Length": str(UPLOAD)})
    body = BODY.replace(b"true", b"false").ljust(UPLOAD)
    async with running_gateway(engine, server=server) as gateway:
        first, second = Http1(await connect(gateway.url)), Http1(await connect(gateway.url))
        await first.send(head + body[:1000])
        await gateway.in_phase("receiving")
        await second.send(head)
        await gateway.in_phase("receiving", 2)
        await first.reset()
        await second.send(body)
        assert (await second.answer()).status == 200
        await second.close()
