"""A client leaves: whatever it waited for, and however it goes, its engine is called off and nobody else's.

Times have wide margins here; the tight figures belong to the bench.
"""

from __future__ import annotations

import re
import socket

import pytest
import trio

from tests.conftest import Tls
from tests.support.gateway import running_gateway
from tests.support.http1 import http1, request_bytes
from tests.support.http2 import http2
from tests.support.routes import CHAT, COMPLETIONS, ROUTES, STREAMING, Route
from tests.support.scripted import ScriptedEngine, deaf_port
from tests.support.scripts import Ending, Stream, Whole, honest, never_answers
from tests.support.visitors import WAYS, visit

TEARDOWN_SECONDS = 2.0  # milliseconds, but the machine may be busy: how fast it is the bench measures

ways = pytest.mark.parametrize("way", WAYS)
every_route = pytest.mark.parametrize("route", ROUTES, ids=str)
every_stream = pytest.mark.parametrize("route", STREAMING, ids=str)


@ways
@every_route
async def test_client_leaves_while_it_waits_for_a_whole_answer(way: str, route: Route) -> None:
    engine = ScriptedEngine(Whole(takes=trio.Event()), slots=1, kind=route.kind)
    async with running_gateway(engine) as gateway:
        async with visit(way, gateway.url, route.path, route.payload(stream=False)) as visitor:
            call = await engine.call()
            left = await visitor.leave()
            assert await call.closed() - left < TEARDOWN_SECONDS
            await visitor.still_served()
        record = await gateway.record(outcome="client_gone")
        assert (record["status"], record["phase"], record["stream"]) == (499, "prefill", False)
        assert record["route"] == route.path
        assert 0 <= record["teardown_ms"] < TEARDOWN_SECONDS * 1000
    assert len(engine.calls) == 1


@ways
@every_stream
async def test_client_leaves_before_the_engine_sent_its_head(way: str, route: Route) -> None:
    engine = ScriptedEngine(never_answers, slots=1, kind=route.kind)
    async with running_gateway(engine) as gateway:
        async with visit(way, gateway.url, route.path, route.payload(stream=True)) as visitor:
            call = await engine.call()
            left = await visitor.leave()
            assert await call.closed() - left < TEARDOWN_SECONDS
            await visitor.still_served()
        record = await gateway.record(outcome="client_gone")
        assert (record["status"], record["phase"], record["ttft_ms"]) == (499, "prefill", None)
    assert len(engine.calls) == 1


@ways
@every_stream
async def test_client_leaves_between_the_head_and_the_first_byte(way: str, route: Route) -> None:
    engine = ScriptedEngine(Stream(prefill=trio.Event()), slots=1, kind=route.kind)
    async with running_gateway(engine) as gateway:
        async with visit(way, gateway.url, route.path, route.payload(stream=True)) as visitor:
            call = await engine.call()
            await engine.until(lambda: call.sent > 0)
            left = await visitor.leave()
            assert await call.closed() - left < TEARDOWN_SECONDS
        await gateway.record(outcome="client_gone", status=499, phase="prefill")
    assert len(engine.calls) == 1


@ways
@every_stream
async def test_client_leaves_between_two_events(way: str, route: Route) -> None:
    engine = ScriptedEngine(Stream(tokens=100, pause_after=3, until=trio.Event()), slots=1, kind=route.kind)
    async with running_gateway(engine) as gateway:
        async with visit(way, gateway.url, route.path, route.payload(stream=True)) as visitor:
            assert (await visitor.head()).status == 200
            await visitor.until(b" tk", 3)
            call = await engine.call()
            left = await visitor.leave()
            assert await call.closed() - left < TEARDOWN_SECONDS
            await visitor.still_served()
        record = await gateway.record(outcome="client_gone")
        assert (record["status"], record["phase"], record["stream"]) == (499, "streaming", True)
        assert record["ttft_ms"] is not None
        assert record["bytes"] > 0
    assert call.tokens == 3


@ways
@every_route
async def test_client_leaves_while_its_body_arrives(way: str, route: Route) -> None:
    engine = ScriptedEngine(never_answers, kind=route.kind)
    async with running_gateway(engine) as gateway:
        payload = route.payload(stream=False)
        async with visit(way, gateway.url, route.path, payload, withhold=10) as visitor:
            await gateway.in_phase("receiving")
            await visitor.leave()
            await gateway.record(outcome="client_gone", status=499, phase="receiving", engine=None)
            await visitor.still_served()
    assert engine.calls == []


@ways
async def test_client_leaves_while_the_engine_is_being_connected(way: str) -> None:
    with deaf_port() as port:
        words = {
            "name": "deaf",
            "kind": "openai",
            "url": f"http://127.0.0.1:{port}",
            "slots": 1,
            "models": ["model"],
        }
        async with (
            running_gateway(words, stream={"connect_seconds": 30}) as gateway,
            visit(way, gateway.url, CHAT.path, CHAT.payload(stream=True)) as visitor,
        ):
            await gateway.in_phase("connecting")
            left = await visitor.leave()
            await gateway.record(outcome="client_gone", status=499, phase="connecting")
            assert trio.current_time() - left < TEARDOWN_SECONDS


@ways
@every_stream
async def test_client_leaves_before_the_closing_events(way: str, route: Route) -> None:
    """All tokens are there, what comes after them (usage, marker) is not."""
    engine = ScriptedEngine(Stream(tokens=3, pause_after=3, until=trio.Event()), slots=1, kind=route.kind)
    async with running_gateway(engine) as gateway:
        async with visit(way, gateway.url, route.path, route.payload(stream=True)) as visitor:
            await visitor.head()
            await visitor.until(b" tk", 3)
            left = await visitor.leave()
            assert await engine.calls[0].closed() - left < TEARDOWN_SECONDS
        await gateway.record(outcome="client_gone", status=499, phase="streaming")


@ways
@every_stream
async def test_client_leaves_after_the_terminal_marker(way: str, route: Route) -> None:
    """The answer is complete; the engine that holds its socket is let go all the same."""
    engine = ScriptedEngine(Stream(tokens=3, ending=Ending.HELD), slots=1, kind=route.kind)
    async with (
        running_gateway(engine) as gateway,
        visit(way, gateway.url, route.path, route.payload(stream=True)) as visitor,
    ):
        await visitor.head()
        assert route.parts is not None
        await visitor.until(route.parts.closing[-1])
        await visitor.leave()
        await gateway.record(outcome="completed", status=200)
        await engine.calls[0].closed()


@ways
async def test_client_leaves_the_queue_and_is_never_dispatched(way: str) -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(Stream(tokens=4, pause_after=2, until=go_on), slots=1)
    async with running_gateway(engine) as gateway, http1(gateway.url) as first:
        await first.post(CHAT.path, CHAT.payload(stream=True))
        await first.head()
        async with visit(way, gateway.url, CHAT.path, CHAT.payload(stream=True, user="second")) as second:
            await gateway.queued(1)
            left = await second.leave()
            await gateway.record(outcome="client_gone", status=499, phase="queued")
            assert trio.current_time() - left < TEARDOWN_SECONDS
            assert (await gateway.metrics())["gateway_queue_depth"] == 0
        async with http1(gateway.url) as third:
            await third.post(CHAT.path, CHAT.payload(stream=True, user="third"))
            await gateway.queued(1)
            go_on.set()
            await first.rest()
            await third.head()
            await third.rest()
    assert [call.json.get("user") for call in engine.calls] == [None, "third"]


@ways
async def test_the_slot_of_one_who_left_goes_to_the_next_after_the_engine_was_called_off(way: str) -> None:
    engine = ScriptedEngine(Stream(), slots=1)
    engine.plan = [Stream(tokens=100, pause_after=3, until=trio.Event())]
    async with (
        running_gateway(engine) as gateway,
        visit(way, gateway.url, CHAT.path, CHAT.payload(stream=True)) as visitor,
    ):
        await visitor.head()
        await visitor.until(b" tk", 3)
        async with http1(gateway.url) as second:
            await second.post(CHAT.path, CHAT.payload(stream=True))
            await gateway.queued(1)
            await visitor.leave()
            assert (await second.answer()).status == 200
    one, two = engine.calls
    assert one.closed_at is not None
    assert one.closed_at <= two.arrived
    assert engine.peak == 1


async def test_one_stream_of_many_leaves_and_the_others_get_every_byte() -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(Stream(tokens=20, pause_after=5, until=go_on), slots=8)
    async with running_gateway(engine) as gateway, http2(gateway.url) as connection:
        streams = [await connection.post(CHAT.path, CHAT.payload(stream=True, user=str(i))) for i in range(6)]
        for stream in streams:
            await stream.until(b" tk", 5)
        await streams[2].reset()
        leaver = next(call for call in engine.calls if call.json["user"] == "2")
        await leaver.closed()
        assert engine.running == 5
        go_on.set()
        assert CHAT.parts is not None
        for stream in streams[:2] + streams[3:]:
            assert await stream.rest() == CHAT.parts.all(20)
        await gateway.recorded(5, outcome="completed")
        await gateway.record(outcome="client_gone")


async def test_many_leave_at_once_and_each_is_called_off_at_once() -> None:
    engine = ScriptedEngine(Stream(tokens=1000, gap=0.05), slots=50)
    async with running_gateway(engine) as gateway:
        left: dict[str, float] = {}

        async def come_and_go(name: str) -> None:
            async with visit("fin", gateway.url, CHAT.path, CHAT.payload(stream=True, user=name)) as visitor:
                await visitor.head()
                await visitor.until(b" tk", 3)
                left[name] = await visitor.leave()

        async with trio.open_nursery() as nursery:
            for i in range(50):
                nursery.start_soon(come_and_go, str(i))
        for call in engine.calls:
            assert await call.closed() - left[call.json["user"]] < TEARDOWN_SECONDS
        await gateway.recorded(50, outcome="client_gone", status=499)


async def test_departure_is_seen_with_everything_switched_on(tls: Tls) -> None:
    """TLS, credentials, added headers, heartbeats and a body limit change nothing for one who leaves."""
    engine = ScriptedEngine(never_answers, slots=2)
    async with running_gateway(
        engine,
        server={"tls": tls.section, "max_body_bytes": 10_000},
        stream={"heartbeat_seconds": 0.05},
        engine={"api_key": "secret", "headers": {"X-Cluster": "a"}},
    ) as gateway:
        async with http1(gateway.url, tls=tls.trusted) as client:
            await client.post(COMPLETIONS.path, COMPLETIONS.payload(stream=True))
            call = await engine.call()
            left = trio.current_time()
            await client.close()
            assert await call.closed() - left < TEARDOWN_SECONDS
        async with http2(gateway.url, tls=tls.trusted) as connection:
            stream = await connection.post(CHAT.path, CHAT.payload(stream=False))
            call = await engine.call(1)
            left = trio.current_time()
            await stream.reset()
            assert await call.closed() - left < TEARDOWN_SECONDS
        await gateway.recorded(2, outcome="client_gone", status=499)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("model", ["model", "no-such"])
async def test_who_goes_as_soon_as_it_has_everything_did_not_leave_early(model: str, stream: bool) -> None:
    """In a thread of its own, so that the close really comes while the gateway is still in its write."""
    rounds = 100
    request = request_bytes(CHAT.path, {**CHAT.payload(stream=stream), "model": model})
    last = rb"\[DONE\]\n\n" if stream and model == "model" else rb"}\Z"
    everything = re.compile(rb"\r\n\r\n.*" + last, re.DOTALL)
    engine = ScriptedEngine(honest, slots=1)

    def come_and_go(port: int) -> None:
        for _ in range(rounds):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                client.sendall(request)
                got = b""
                while not everything.search(got):
                    piece = client.recv(65536)
                    assert piece, f"cut off after {got!r}"
                    got += piece

    async with running_gateway(engine) as gateway:
        await trio.to_thread.run_sync(come_and_go, int(gateway.url.rpartition(":")[2]))
        await gateway.recorded(rounds)
        outcome = "completed" if model == "model" else "rejected"
        assert len(gateway.matching(outcome=outcome)) == rounds


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_client_leaves_in_its_body_before_anybody_looked_at_it(how: str) -> None:
    """Head, half of the body and the end of the connection are all there at once."""
    engine = ScriptedEngine(honest, slots=1)
    async with running_gateway(engine) as gateway:
        for _ in range(20):
            async with http1(gateway.url) as client:
                request = request_bytes(CHAT.path, CHAT.payload(stream=True))
                assert isinstance(client.stream, trio.SocketStream)
                raw: socket.socket = client.stream.socket._sock  # type: ignore[attr-defined]
                raw.send(request[:-20])  # without a turn in between
                await (client.close() if how == "close" else client.reset())
        await gateway.live(0)
        async with http1(gateway.url) as client:
            assert (await client.ask(CHAT.path, CHAT.payload(stream=False))).status == 200
        await gateway.recorded(1, outcome="completed")
        assert {record["outcome"] for record in gateway.records} <= {"client_gone", "completed"}
    assert len(engine.calls) == 1
