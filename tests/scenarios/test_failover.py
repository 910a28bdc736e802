"""Several engines behind one name, on a bad day: what their clients notice, which should be nothing."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import Answer, Truncated, http1
from tests.support.routes import CHAT, DONE
from tests.support.scripted import Call, Script, ScriptedEngine
from tests.support.scripts import End, Ending, Raw, Sse, Status, Stream, Whole, honest, never_answers

RETRY_2 = Status(429, headers=[("Content-Type", "application/json"), ("Retry-After", "2")])
ERROR_FIRST = Sse([b'data: {"error":{"message":"out of memory","code":500}}\n\n', DONE])
VLLM_ERROR = Sse([b'data: {"object":"error","message":"no","code":429}\n\n', DONE])
NAMED_ERROR = Sse([b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n'])
RESET_AFTER_HEAD = Raw(
    [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n", End.RST]
)


async def ask(gateway: Gateway, stream: bool = True, **more: Any) -> Answer:
    async with http1(gateway.url) as client:
        return await client.ask(CHAT.path, CHAT.payload(stream=stream, **more))


def pair(bad: Script, *, slots: int = 4) -> tuple[ScriptedEngine, ScriptedEngine]:
    """Of engines with nothing to do the first is tried first."""
    return ScriptedEngine(bad, name="bad", slots=slots), ScriptedEngine(honest, name="good", slots=slots)


@pytest.mark.parametrize(
    "script",
    [
        Status(503),
        Status(502),
        Status(504),
        Status(429),
        RETRY_2,
        RESET_AFTER_HEAD,
        Raw([End.FIN]),
        Raw([End.RST]),
        ERROR_FIRST,
        VLLM_ERROR,
        NAMED_ERROR,
    ],
)
async def test_what_one_engine_fails_at_another_does(script: Script) -> None:
    bad, good = pair(script)
    async with running_gateway(bad, good) as gateway:
        answer = await ask(gateway)
        assert (answer.status, answer.body) == (200, CHAT.parts.all(5) if CHAT.parts else b"")
        record = await gateway.record(outcome="completed", engine="good", attempts=2)
        assert record["status"] == 200
        assert (len(bad.calls), len(good.calls)) == (1, 1)
        assert (await gateway.metrics())["gateway_retries_total"] == 1


@pytest.mark.parametrize("script", [Status(503), RESET_AFTER_HEAD, Raw([End.FIN]), ERROR_FIRST])
async def test_an_engine_that_always_fails_gets_trials_only(script: Script) -> None:
    bad, good = pair(script)
    async with running_gateway(bad, good, health={"backoff_seconds": 0.05}, retry={"floor": 100}) as gateway:
        since = trio.current_time()
        for _ in range(100):
            assert (await ask(gateway)).status == 200
        seconds = trio.current_time() - since
        trials = 0
        while 0.05 * (2**trials - 1) < seconds:
            trials += 1
        assert 3 <= len(bad.calls) <= 3 + trials


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 500, 501])
async def test_what_every_engine_would_refuse_goes_to_one(status: int) -> None:
    bad, good = pair(Status(status))
    async with running_gateway(bad, good) as gateway:
        assert (await ask(gateway)).status == status
        assert len(good.calls) == 0


async def test_a_dead_engine_is_passed_over_and_its_absence_noticed_once() -> None:
    bad, good = pair(honest)
    async with running_gateway(bad, good) as gateway:
        await bad.stop()
        for _ in range(5):
            assert (await ask(gateway)).status == 200
        await gateway.recorded(5)
        assert [record["attempts"] for record in gateway.records[:5]] == [2, 1, 1, 1, 1]
        engines = (await gateway.admin("/admin/engines")).json["engines"]
        assert (engines["bad"]["state"], engines["good"]["state"]) == ("ejected", "healthy")
        metrics = await gateway.metrics()
        assert metrics['gateway_engine_up{engine="bad"}'] == 0
        assert metrics['gateway_engine_ejections_total{engine="bad"}'] == 1


async def test_one_that_hangs_is_given_up_after_first_byte_seconds() -> None:
    bad, good = pair(never_answers)
    async with running_gateway(bad, good, stream={"first_byte_seconds": 0.2}) as gateway:
        answer = await ask(gateway)
        assert answer.status == 200
        assert len(good.calls) == 1


async def test_nothing_is_tried_again_after_the_first_byte() -> None:
    came = trio.Event()
    bad, good = pair(Stream(tokens=2, pause_after=2, until=came, ending=Ending.RST))
    async with running_gateway(bad, good) as gateway:
        async with http1(gateway.url) as client:
            await client.post(CHAT.path, CHAT.payload(stream=True))
            head = await client.head()
            assert head.status == 200
            await client.until(b"tk1")
            came.set()
            with pytest.raises(Truncated) as cut:
                await client.rest()
            assert b'"engine_failed"' in cut.value.got
        await gateway.record(outcome="engine_failed", engine="bad", attempts=1)
        assert len(good.calls) == 0


@pytest.mark.parametrize("together", [True, False])
async def test_an_error_behind_some_output_passes_and_counts(together: bool) -> None:
    """Case C32, after output."""
    assert CHAT.parts is not None
    output, error = CHAT.parts.token(0), b'data: {"error":{"message":"out of memory"}}\n\n'
    bad, good = pair(Sse([output, error + DONE] if together else [output, error, DONE]))
    async with running_gateway(bad, good, health={"failures": 2, "backoff_seconds": 60}) as gateway:
        bodies = [(await ask(gateway)).body for _ in range(10)]
    # A client may have its next request here before what is behind the end of the last one is looked at.
    assert bodies.count(output + error + DONE) == len(bad.calls) in (2, 3)


async def test_nobody_is_asked_for_a_client_that_has_left() -> None:
    """Case C36."""
    goes_on = trio.Event()
    bad, good = pair(Status(503, takes=goes_on))
    async with running_gateway(bad, good) as gateway:
        async with http1(gateway.url) as client:
            await client.post(CHAT.path, CHAT.payload(stream=True))
            call = await bad.call(0)
        await call.closed()
        goes_on.set()
        await gateway.record(outcome="client_gone", attempts=1)
        assert len(good.calls) == 0


async def test_of_several_failures_the_most_useful_is_told() -> None:
    """The engine's own answer says more than that there was nobody at the other."""
    said = b'{"error":{"message":"try in 2 s"}}'
    headers = [("Content-Type", "application/json"), ("Retry-After", "2"), ("X-Engine", "a")]
    bad, dead = ScriptedEngine(Status(429, said, headers), name="a"), ScriptedEngine(honest, name="b")
    async with running_gateway(bad, dead) as gateway:
        await dead.stop()
        answer = await ask(gateway)
        assert (answer.status, answer.body) == (429, said)
        assert (answer.head["retry-after"], answer.head["x-engine"]) == ("2", "a")
        await gateway.record(outcome="completed", status=429, attempts=2)


async def test_to_have_too_much_to_do_is_no_failure() -> None:
    busy, good = pair(Status(429, headers=[("Retry-After", "0")]))
    async with running_gateway(busy, good, retry={"floor": 100}) as gateway:
        for _ in range(20):
            assert (await ask(gateway)).status == 200
        engines = (await gateway.admin("/admin/engines")).json["engines"]
        assert (engines["bad"]["state"], engines["bad"]["ejections"]) == ("healthy", 0)
        assert len(busy.calls) > 5


@pytest.mark.parametrize("script", [Status(503), ERROR_FIRST, RESET_AFTER_HEAD])
async def test_each_failure_counts_once(script: Script) -> None:
    bad, good = pair(script)
    async with running_gateway(bad, good, health={"failures": 4, "backoff_seconds": 60}) as gateway:
        for _ in range(20):
            assert (await ask(gateway)).status == 200
        assert len(bad.calls) == 4


async def test_one_that_asks_for_a_pause_gets_it() -> None:
    bad, good = pair(honest)
    bad.plan = [RETRY_2]
    async with running_gateway(bad, good) as gateway:
        since = trio.current_time()
        for _ in range(6):
            assert (await ask(gateway)).status == 200
        assert len(bad.calls) == 1
        while len(bad.calls) == 1:
            assert (await ask(gateway)).status == 200
            await trio.sleep(0.05)
        assert 2.0 <= trio.current_time() - since < 4.0


async def test_a_single_engine_that_asks_for_a_pause_has_the_others_wait() -> None:
    only = ScriptedEngine(honest)
    only.plan = [Status(503, headers=[("Retry-After", "1")])]
    async with running_gateway(only) as gateway:
        assert (await ask(gateway)).status == 503
        since = trio.current_time()
        assert (await ask(gateway)).status == 200
        assert trio.current_time() - since > 0.9


async def test_never_all_are_ejected() -> None:
    only = ScriptedEngine(Status(503))
    async with running_gateway(only) as gateway:
        for _ in range(8):
            assert (await ask(gateway)).status == 503
        assert (await gateway.admin("/admin/engines")).json["engines"]["engine"]["state"] != "healthy"
        only.script = honest
        assert (await ask(gateway)).status == 200
        assert (await gateway.admin("/admin/engines")).json["engines"]["engine"]["state"] == "healthy"


async def leave_in_prefill(gateway: Gateway, engine: ScriptedEngine, index: int) -> None:
    async with http1(gateway.url) as client:
        await client.post(CHAT.path, CHAT.payload(stream=True))
        await engine.call(index)


@pytest.mark.parametrize("timeout", [None, "0.2"])
async def test_a_thousand_leavers_eject_nobody(timeout: str | None) -> None:
    """Case C45: of clients that go, and of clients that give up after a time of their own."""
    engine = ScriptedEngine(never_answers, slots=50)
    headers = {"X-Stainless-Timeout": timeout} if timeout else {}

    async def visitor() -> None:
        for _ in range(20):
            async with http1(gateway.url) as client:
                calls = len(engine.calls)
                await client.post(CHAT.path, CHAT.payload(stream=True), headers)
                await engine.until(lambda before=calls: len(engine.calls) > before)  # type: ignore[misc]
                if timeout:
                    await trio.sleep(float(timeout))

    async with running_gateway(engine, health={"failures": 1}, seconds=60) as gateway:
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(visitor)
        await gateway.recorded(1000)
        assert {record["outcome"] for record in gateway.records} == {"client_gone"}
        engines = (await gateway.admin("/admin/engines")).json["engines"]
        assert (engines["engine"]["state"], engines["engine"]["ejections"]) == ("healthy", 0)


async def test_load_is_even_after_a_storm_of_leavers() -> None:
    """Case C20."""
    one, two = pair(never_answers, slots=20)
    async with running_gateway(one, two) as gateway:
        await gateway.admin("/admin/engines/good/drain", "POST")
        for index in range(40):
            await leave_in_prefill(gateway, one, index)
        await gateway.recorded(40, outcome="client_gone")
        await gateway.admin("/admin/engines/good/resume", "POST")
        one.script = honest
        for _ in range(100):
            assert (await ask(gateway)).status == 200
        assert (len(one.calls) - 40, len(two.calls)) == (50, 50)


class Hanging:
    """A health page that doesn't answer."""

    async def __call__(self, call: Call) -> None:
        await call.closed()


async def test_a_busy_engine_whose_health_page_hangs_stays() -> None:
    """Case C51: what it streams proves that it lives; a silent one is ejected."""
    busy = ScriptedEngine(Stream(tokens=1000, gap=0.02), name="busy", kind="vllm")
    other = ScriptedEngine(honest, name="other", kind="vllm")
    health = {"probe_seconds": 0.1, "probe_timeout_seconds": 0.1, "failures": 2}
    async with running_gateway(busy, other, health=health) as gateway:
        async with http1(gateway.url) as client:
            await client.post(CHAT.path, CHAT.payload(stream=True))
            await (await busy.call(0)).made(3)
            busy.pages["/health"] = Hanging()
            probed = len(busy.probes)
            await busy.until(lambda: len(busy.probes) >= probed + 6)
            engines = (await gateway.admin("/admin/engines")).json["engines"]
            assert engines["busy"]["state"] == "healthy"
        await gateway.engine("busy", lambda engine: engine["state"] == "ejected")
        busy.pages.clear()
        await gateway.engine("busy", lambda engine: engine["state"] == "probation")


async def test_an_operator_keeps_an_engine_free_and_uses_it_again() -> None:
    may_end = trio.Event()
    one, two = (
        ScriptedEngine(Whole(takes=may_end), name="one", slots=1),
        ScriptedEngine(honest, name="two", slots=1),
    )
    async with running_gateway(one, two) as gateway, trio.open_nursery() as nursery:
        nursery.start_soon(ask, gateway, False)
        await one.call(0)
        drained = await gateway.admin("/admin/engines/one/drain", "POST")
        assert drained.json["engines"]["one"]["drained"]
        for _ in range(3):
            assert (await ask(gateway)).status == 200
        assert len(two.calls) == 3
        both = await gateway.admin("/admin/engines/two/drain", "POST")
        assert both.status == 200
        refused = await ask(gateway)
        assert (refused.status, refused.json["error"]["code"]) == (503, "no_engine")
        assert (await gateway.admin("/admin/engines/three/drain", "POST")).status == 404
        await gateway.admin("/admin/engines/two/resume", "POST")
        assert (await ask(gateway)).status == 200
        may_end.set()


async def test_when_all_fail_the_budget_holds() -> None:
    engines = [ScriptedEngine(Status(503), name=name, slots=100) for name in ("a", "b", "c")]
    statuses: list[int] = []
    async with running_gateway(*engines, retry={"budget": 0.2, "floor": 10}) as gateway:

        async def one() -> None:
            statuses.append((await ask(gateway)).status)

        async with trio.open_nursery() as nursery:
            for _ in range(500):
                nursery.start_soon(one)
        assert statuses == [503] * 500
        calls = sum(len(engine.calls) for engine in engines)
        retries = (await gateway.metrics())["gateway_retries_total"]
        assert calls == 500 + retries
        assert 100 <= retries <= 500 * 0.2
