"""Answers that break off at their engine: what there is of them arrives, then the reason, then a bad end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Tls
from tests.support.gateway import running_gateway
from tests.support.http1 import Truncated, http1
from tests.support.http2 import http2
from tests.support.routes import CHAT, DONE
from tests.support.scripted import Call, Script, ScriptedEngine
from tests.support.scripts import Ending, Stream, honest
from tests.wire import frames as f
from tests.wire.around import BODY, TRANSPORTS
from tests.wire.raw2 import raw2

LONG = 3000
REASON = b'"engine_failed"'


async def breaks_off_plainly(call: Call) -> None:
    await call.head(200, [("Content-Type", "application/json")], framing="length", length=1000)
    await call.write(b"half")
    await call.rst()


BROKEN: dict[str, tuple[Script, bytes]] = {
    "by a reset": (Stream(tokens=LONG, ending=Ending.RST), REASON),
    "by a FIN": (Stream(tokens=LONG, ending=Ending.FIN), REASON),
    "without its last event": (Stream(tokens=LONG, ending=Ending.NO_MARKER), REASON),
    "in plain": (breaks_off_plainly, b"half"),
}


@pytest.fixture(params=BROKEN)
def engine(request: pytest.FixtureRequest) -> tuple[ScriptedEngine, bytes]:
    """An engine, and the last that is heard of it."""
    script, last = BROKEN[request.param]
    return ScriptedEngine(script), last


def secured(transport: str, tls: Tls) -> tuple[dict[str, Any], Any]:
    return ({"tls": tls.section}, tls.trusted) if transport == "tls" else ({}, None)


def check(body: bytes, last: bytes) -> None:
    assert last in body
    assert body.count(b" tk") in (0, LONG)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_over_http1_there_is_no_last_chunk(
    engine: tuple[ScriptedEngine, bytes], transport: str, tls: Tls
) -> None:
    server, trusted = secured(transport, tls)
    async with (
        running_gateway(engine[0], server=server) as gateway,
        http1(gateway.url, tls=trusted) as client,
    ):
        await client.post(CHAT.path, CHAT.payload(stream=True))
        assert (await client.head()).status == 200
        with pytest.raises(Truncated) as cut:
            await client.rest()
        check(cut.value.got, engine[1])
        await gateway.record(outcome="engine_failed")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_over_http2_the_stream_is_reset_and_the_connection_goes_on(
    engine: tuple[ScriptedEngine, bytes], transport: str, tls: Tls
) -> None:
    server, trusted = secured(transport, tls)
    async with (
        running_gateway(engine[0], server=server) as gateway,
        raw2(gateway.url, tls=trusted) as connection,
    ):
        for number in (1, 3):
            await connection.send(f.post(number, BODY))
            await connection.over(number)
            assert connection.resets[number] == f.INTERNAL_ERROR
            check(connection.body(number), engine[1])
        await connection.answered()
        assert not connection.gone
        await gateway.recorded(2, outcome="engine_failed")


async def test_over_http2_a_slow_reader_gets_it_all_before_the_reset() -> None:
    """Its window lets out a little at a time; the reset doesn't overtake what waits for it."""
    engine = ScriptedEngine(Stream(tokens=500, ending=Ending.RST))
    opening = f.PREFACE + f.settings((4, 0))
    async with (
        running_gateway(engine) as gateway,
        raw2(gateway.url, opening=opening, credit=False) as connection,
    ):
        await connection.send(f.post(1, BODY), f.window(0, 1 << 20))
        await connection.until(lambda: 1 in connection.heads)
        while not {1} & connection.resets.keys():
            assert not connection.gone
            await connection.send(f.window(1, 3000))
            await connection.answered()
        assert connection.body(1).count(b" tk") == 500
        assert REASON in connection.body(1)


def heads_of(fields: int) -> Script:
    large = Stream(headers=[(f"x-{number}", "") for number in range(fields)])

    async def script(call: Call) -> None:
        await (honest if call.json.get("user") == "bystander" else large)(call)

    return script


@pytest.mark.parametrize(("fields", "status"), [(500, 200), (1500, 502)])
async def test_over_http2_a_head_no_client_takes_harms_no_other_stream(fields: int, status: int) -> None:
    """To HTTP/2 a field is 32 bytes more than its letters; clients end a connection for more than 64 KiB."""
    async with (
        running_gateway(ScriptedEngine(heads_of(fields), slots=2)) as gateway,
        http2(gateway.url) as connection,
    ):
        bystander = await connection.post(CHAT.path, CHAT.payload(stream=True, user="bystander"))
        stream = await connection.post(CHAT.path, CHAT.payload(stream=True))
        assert (await stream.head()).status == status
        await stream.rest()
        assert (await bystander.rest()).endswith(DONE)
        await gateway.record(outcome="completed" if status == 200 else "engine_failed", status=status)
