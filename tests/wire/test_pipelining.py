"""Requests sent before the answers to those in front have come: answered one after the other, none lost."""

from __future__ import annotations

import json

import pytest
import trio

from tests.conftest import Tls
from tests.support.gateway import running_gateway
from tests.support.http1 import Truncated, http1, request_bytes
from tests.support.routes import CHAT
from tests.support.scripted import Call, ScriptedEngine
from tests.support.scripts import Ending, Stream, Whole
from tests.wire.around import TRANSPORTS, whole

transports = pytest.mark.parametrize("transport", TRANSPORTS)


def ask(user: str, *, stream: bool = False, headers: dict[str, str] | None = None, size: int = 0) -> bytes:
    body = json.dumps(CHAT.payload(stream=stream, user=user)).encode().ljust(size)
    return request_bytes(CHAT.path, body, headers=headers)


async def echo(call: Call) -> None:
    await Whole(body=json.dumps({"user": call.json["user"]}).encode())(call)


@transports
@pytest.mark.parametrize("segment", [0, 1, 7, 1000])
async def test_three_requests_at_once_are_answered_in_order(segment: int, transport: str, tls: Tls) -> None:
    engine = ScriptedEngine(echo)
    trusted, server = (tls.trusted, {"tls": tls.section}) if transport == "tls" else (None, {})
    data = ask("a") + ask("b") + ask("c")
    async with running_gateway(engine, server=server) as gateway, http1(gateway.url, tls=trusted) as client:
        for at in range(0, len(data), segment or len(data)):
            await client.send(data[at : at + (segment or len(data))])
        for user in "abc":
            assert (await client.answer()).json == {"user": user}
    assert [call.json["user"] for call in engine.calls] == ["a", "b", "c"]


async def test_the_second_starts_when_the_first_is_answered() -> None:
    engine = ScriptedEngine(echo)
    first = trio.Event()
    engine.plan = [Stream(tokens=4, pause_after=2, until=first)]
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await client.send(ask("a", stream=True) + ask("b"))
        await client.head()
        await client.until(b" tk1")
        await gateway.live(1)
        assert len(engine.calls) == 1
        first.set()
        assert await client.rest() == whole(4)
        assert (await client.answer()).json == {"user": "b"}


async def test_requests_of_every_kind_behind_each_other() -> None:
    engine = ScriptedEngine(echo)
    engine.plan = [Stream()]
    chunked = request_bytes(CHAT.path, headers={"Transfer-Encoding": "chunked"})
    body = json.dumps(CHAT.payload(stream=False, user="chunks")).encode()
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await client.send(
            ask("stream", stream=True)
            + b"\r\n"
            + request_bytes("/v1/models", method="GET")
            + b"\r\n\r\n"
            + chunked
            + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            + request_bytes("/no-such", b"[1]")
            + request_bytes(CHAT.path, b"broken")
            + request_bytes("/v1/models", method="HEAD")
            + ask("last", headers={"Connection": "close"})
            + ask("too late")
        )
        assert (await client.answer()).body == whole()
        assert (await client.answer()).json["object"] == "list"
        assert (await client.answer()).json == {"user": "chunks"}
        assert (await client.answer()).status == 404
        assert (await client.answer()).status == 400
        assert (await client.head(bodyless=True)).status == 404
        assert (await client.answer()).json == {"user": "last"}
        assert await client.eof() == b""
    assert [call.json["user"] for call in engine.calls] == ["stream", "chunks", "last"]


async def test_bodies_that_fit_into_what_is_kept_arrive_whole() -> None:
    engine = ScriptedEngine(echo)
    engine.plan = [Stream(tokens=2, pause_after=1, until=(go_on := trio.Event()))]
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await client.send(ask("a", stream=True))
        await client.head()
        await client.send(ask("b", size=30_000) + ask("c", size=30_000))
        await gateway.live(1)
        go_on.set()
        await client.rest()
        assert (await client.answer()).json == {"user": "b"}
        assert (await client.answer()).json == {"user": "c"}
    assert [len(call.body) for call in engine.calls[1:]] == [30_000, 30_000]


@pytest.mark.parametrize("announced", [True, False], ids=["before the head", "after the head"])
async def test_more_than_is_kept_ends_the_connection_after_its_answer(announced: bool) -> None:
    """The answer under way comes whole; what was sent behind it has to be sent again."""
    engine = ScriptedEngine(echo)
    go_on = trio.Event()
    late, early = Stream(tokens=2, prefill=go_on), Stream(tokens=2, pause_after=1, until=go_on)
    engine.plan = [late if announced else early]
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await client.send(ask("a", stream=True))
        await engine.call()
        if not announced:
            await client.head()
        await client.send(ask("b") * 20 + ask("c", size=200_000))
        go_on.set()
        if announced:
            assert (await client.head())["connection"] == "close"
        assert await client.rest() == whole(2)
        assert await client.eof() == b""
    assert [call.json["user"] for call in engine.calls] == ["a"]


async def test_a_request_behind_an_answer_that_broke_off_is_not_answered() -> None:
    engine = ScriptedEngine(echo)
    engine.plan = [Stream(tokens=2, ending=Ending.RST)]
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await client.send(ask("a", stream=True) + ask("b"))
        await client.head()
        with pytest.raises(Truncated) as cut:
            await client.rest()
        assert b'"engine_failed"' in cut.value.got
        assert await client.eof() == b""
    assert len(engine.calls) == 1


@pytest.mark.parametrize("line_ends", [b"\r\n", b"\n", b"\r\n" * 50, b"\r", b"\r\r\n\n"])
async def test_line_ends_behind_a_body_are_passed_over(line_ends: bytes) -> None:
    """Old clients send one; it is no request, and no reason to refuse the next."""
    engine = ScriptedEngine(echo)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        for user in "abc":
            await client.send(ask(user) + line_ends)
            assert (await client.answer()).json == {"user": user}
            await client.send(line_ends)
        await client.send(ask("d") + line_ends + ask("e"))
        assert (await client.answer()).json == {"user": "d"}
        assert (await client.answer()).json == {"user": "e"}


@pytest.mark.parametrize("behind", [b"\r\n", b"nonsense", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_what_stands_behind_the_last_request_is_passed_over(behind: bytes) -> None:
    engine = ScriptedEngine(echo)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        await client.send(ask("a", headers={"Connection": "close"}) + behind)
        assert (await client.answer()).json == {"user": "a"}
        assert await client.eof() == b""


async def test_who_leaves_between_two_requests_has_left_the_second_too() -> None:
    """The end of the connection is read in the moment in which the next request's turn comes."""
    engine = ScriptedEngine(echo, slots=8)
    async with running_gateway(engine) as gateway:

        async def visit() -> None:
            async with http1(gateway.url) as client:
                await client.send(ask("a") + ask("b")[:-10])
                await client.answer()

        for _ in range(20):
            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(visit)
        await gateway.live(0)
        await gateway.recorded(160, outcome="completed")
        assert {record["outcome"] for record in gateway.records} <= {"client_gone", "completed"}
    assert len(engine.calls) == 160
