"""Keys, who goes first, what is refused and what that costs: as clients see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import trio

from gateway.tenants import digest_of
from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import Answer, http1, request_bytes
from tests.support.http2 import http2
from tests.support.routes import CHAT, MESSAGES
from tests.support.scripted import Script, ScriptedEngine
from tests.support.scripts import End, Raw, Status, Stream, Whole, honest, never_answers

ALICE, BOB = "sk-alice-1", "sk-bob-1"


def tenant(name: str, *keys: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "keys": [digest_of(key) for key in keys], **more}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(gateway: Gateway, key: str | None, **more: Any) -> Answer:
    headers = more.pop("headers", None) or (bearer(key) if key else {})
    async with http1(gateway.url) as client:
        return await client.ask(CHAT.path, CHAT.payload(stream=False, **more), headers=headers)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer sk-alice-1"}, 200),
        ({"authorization": "bearer sk-alice-1"}, 200),
        ({"x-api-key": "sk-alice-1"}, 200),
        ({"x-api-key": "sk-alice-2"}, 200),
        ({}, 401),
        ({"Authorization": "sk-alice-1"}, 401),
        ({"Authorization": "Basic sk-alice-1"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Bearer sk-alice-1 x"}, 401),
        ({"x-api-key": "sk-alice"}, 401),
        ({"x-api-key": "sk-alice-1\u00e9"}, 401),
        ({"x-api-key": "SK-ALICE-1"}, 401),
        ({"x-api-key": digest_of(ALICE)}, 401),
        ({"Authorization": "Bearer sk-alice-1", "x-api-key": "sk-alice-1"}, 401),
        ({"Authorization": "Bearer sk-alice-1", "x-api-key": "sk-bob-1"}, 401),
    ],
)
async def test_keys(headers: Mapping[str, str], status: int) -> None:
    engine = ScriptedEngine(honest)
    tenants = [tenant("alice", ALICE, "sk-alice-2"), tenant("bob", BOB)]
    async with running_gateway(engine, tenants=tenants) as gateway, http1(gateway.url) as client:
        await client.send(
            request_bytes(CHAT.path, CHAT.payload(stream=False), method="POST", headers=headers)
        )
        answer = await client.answer()
        assert answer.status == status
        if status == 401:
            assert answer.json["error"]["code"] == "invalid_api_key"
            assert answer.head["www-authenticate"] == "Bearer"
            assert not engine.calls
            record = await gateway.record(code="invalid_api_key")
            assert (record["outcome"], record["tenant"]) == ("rejected", None)
        else:
            (call,) = engine.calls
            assert (call.header("authorization"), call.header("x-api-key")) == (None, None)
            assert (await gateway.record())["tenant"] == "alice"


async def test_two_of_one_header_and_keys_elsewhere() -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine, tenants=[tenant("alice", ALICE)]) as gateway:
        async with http1(gateway.url) as client:
            twice = request_bytes(CHAT.path, CHAT.payload(stream=False), method="POST", headers=bearer(ALICE))
            await client.send(twice.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer sk-alice-1\r\n\r\n", 1))
            assert (await client.answer()).status == 401
        async with http1(gateway.url) as client:
            answer = await client.ask(f"{CHAT.path}?api_key={ALICE}", CHAT.payload(stream=False))
            assert answer.status == 401
        async with http1(gateway.url) as client:
            answer = await client.ask(MESSAGES.path, MESSAGES.payload(stream=False))
            assert answer.json["error"]["type"] == "authentication_error"
        async with http2(gateway.url) as connection:
            stream = await connection.request(
                "POST", CHAT.path, {"content-type": "application/json", "x-api-key": ALICE + "\n"}, end=True
            )
            assert (await stream.head()).status in (400, 401)
    assert not engine.calls


async def test_a_key_is_in_no_record_metric_or_error(capfd: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine, tenants=[tenant("alice", ALICE)]) as gateway:
        texts = [(await ask(gateway, key)).body.decode() for key in (ALICE, "sk-wrong-secret")]
        texts.append((await gateway.admin("/metrics")).body.decode())
        texts.append((await gateway.admin("/admin/requests")).body.decode())
        texts += [str(record) for record in gateway.records]
    texts += capfd.readouterr()
    assert not any(secret in text for text in texts for secret in (ALICE, "sk-wrong-secret"))
    assert all("sk-" not in str(call.headers) for call in engine.calls)


async def test_models_of_a_tenant() -> None:
    engine = ScriptedEngine(honest, models=("model", "other"))
    tenants = [tenant("alice", ALICE, models=["other"]), tenant("bob", BOB)]
    async with running_gateway(engine, tenants=tenants) as gateway:
        refused = await ask(gateway, ALICE)
        assert (refused.status, refused.json["error"]["code"]) == (403, "model_not_allowed")
        assert (await ask(gateway, ALICE, model="other")).status == 200
        assert (await ask(gateway, BOB)).status == 200
        async with http1(gateway.url) as client:
            listed = await client.ask("/v1/models", headers=bearer(ALICE))
            assert [model["id"] for model in listed.json["data"]] == ["other"]
            assert (await client.ask("/v1/models/model", headers=bearer(ALICE))).status == 404
            assert (await client.ask("/v1/models")).status == 401
            assert (await client.ask("/nowhere")).status == 401


async def test_a_flood_holds_up_nobody_else() -> None:
    """Two slots, jobs of 100 ms: who comes after the flood waits for about one of them."""
    engine = ScriptedEngine(Whole(takes=0.1), slots=2)
    tenants = [tenant("alice", ALICE), tenant("bob", BOB)]
    answers: list[Answer] = []
    async with running_gateway(engine, tenants=tenants, admission={"queue": 20}) as gateway:

        async def flood() -> None:
            answers.append(await ask(gateway, ALICE))

        async with trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(flood)
            await gateway.queued(20)
            for _ in range(3):
                await engine.call(len(engine.calls))
            since = trio.current_time()
            assert (await ask(gateway, BOB)).status == 200
            assert trio.current_time() - since < 0.1 + 0.1 + 0.3, "one job before it, its own, and margin"
        assert {answer.status for answer in answers} == {200, 429}
        refused = [answer for answer in answers if answer.status == 429]
        assert all(answer.json["error"]["code"] == "queue_full" for answer in refused)
        assert not gateway.matching(tenant="bob", status=429)


async def test_weights_share_the_slots() -> None:
    may_begin = trio.Event()
    engine = ScriptedEngine(Whole(takes=0.01), slots=2)
    engine.plan = [Whole(takes=may_begin), Whole(takes=may_begin)]
    carol = tenant("carol", "sk-carol")  # holds the slots until everybody waits
    tenants = [tenant("alice", ALICE, weight=3), tenant("bob", BOB), carol]
    async with running_gateway(engine, tenants=tenants) as gateway:
        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(ask, gateway, "sk-carol")
                await engine.call(number)
            for _ in range(100):
                nursery.start_soon(ask, gateway, ALICE)
                nursery.start_soon(ask, gateway, BOB)
            await gateway.queued(200)
            may_begin.set()
            await gateway.recorded(110, outcome="completed")
            first = [record for record in gateway.records[:110] if record["tenant"] != "carol"]
        ours = sum(record["tenant"] == "alice" for record in first)
        assert ours / len(first) == pytest.approx(0.75, abs=0.1)


async def test_a_tenant_s_slots_and_queue_are_bounded() -> None:
    may_end = trio.Event()
    engine = ScriptedEngine(Whole(takes=may_end), slots=4)
    tenants = [tenant("alice", ALICE, slots=1, queue=1), tenant("bob", BOB)]
    async with running_gateway(engine, tenants=tenants) as gateway, trio.open_nursery() as nursery:
        nursery.start_soon(ask, gateway, ALICE)
        await engine.call(0)
        nursery.start_soon(ask, gateway, ALICE)
        await gateway.queued(1)
        refused = await ask(gateway, ALICE)
        assert (refused.status, refused.json["error"]["code"]) == (429, "queue_full")
        nursery.start_soon(ask, gateway, BOB)
        await engine.call(1)
        queue = (await gateway.admin("/admin/queue")).json
        assert queue["tenants"]["alice"].items() >= {"waiting": 1, "held": 1}.items()
        assert queue["classes"] == {"low": 0, "normal": 1, "high": 0}
        metrics = await gateway.metrics()
        assert metrics['gateway_tenant_slots{tenant="alice"}'] == 1
        assert metrics['gateway_tenant_waiting{priority="normal",tenant="alice"}'] == 1
        may_end.set()


async def test_priority_goes_first() -> None:
    may_end = trio.Event()
    engine = ScriptedEngine(honest, slots=1)
    engine.plan = [Whole(takes=may_end)]
    tenants = [tenant("alice", ALICE, priority="low"), tenant("bob", BOB, priority="high")]
    async with running_gateway(engine, tenants=tenants) as gateway, trio.open_nursery() as nursery:
        nursery.start_soon(ask, gateway, ALICE)
        await engine.call(0)
        for number, key in enumerate((ALICE, ALICE, BOB)):
            nursery.start_soon(ask, gateway, key)
            await gateway.queued(number + 1)
        may_end.set()
        await gateway.recorded(4, outcome="completed")
        assert [record["tenant"] for record in gateway.records] == ["alice", "bob", "alice", "alice"]
        assert {record["priority"] for record in gateway.records} == {"low", "high"}


async def test_requests_a_minute() -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine, tenants=[tenant("alice", ALICE, requests_per_minute=3)]) as gateway:
        for left in (2, 1, 0):
            answer = await ask(gateway, ALICE)
            assert answer.status == 200
            assert answer.head["x-ratelimit-limit-requests"] == "3"
            assert answer.head["x-ratelimit-remaining-requests"] == str(left)
        refused = await ask(gateway, ALICE)
        assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limited")
        assert 15 <= int(refused.head["retry-after"]) <= 20
        assert refused.head["x-ratelimit-remaining-requests"] == "0"
        assert refused.head["x-ratelimit-reset-requests"].endswith("s")


async def test_what_is_refused_costs_nothing() -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(
        engine, tenants=[tenant("alice", ALICE, requests_per_minute=5)], admission={"queue": 0}
    ) as gateway:
        assert (await ask(gateway, ALICE, model="unknown")).status == 404
        assert (await ask(gateway, ALICE, n="two")).status == 400
        assert (await ask(gateway, ALICE, n=100)).status == 400
        engine.plan = [Whole(takes=trio.Event()) for _ in range(4)]
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(ask, gateway, ALICE)
                await engine.call(number)
            assert [(await ask(gateway, ALICE)).json["error"]["code"] for _ in range(5)] == ["queue_full"] * 5
            nursery.cancel_scope.cancel()
        await gateway.live(0)
        assert (await ask(gateway, ALICE)).status == 200, "four were charged, and this is the fifth"
        assert (await ask(gateway, ALICE)).status == 429


async def test_tokens_a_minute_are_corrected_at_the_end() -> None:
    engine = ScriptedEngine(Stream(tokens=3))
    async with running_gateway(engine, tenants=[tenant("alice", ALICE, tokens_per_minute=3000)]) as gateway:
        async with http1(gateway.url) as client:
            for _ in range(5):  # each is charged a thousand and more, and uses a fraction of that
                payload = CHAT.payload(stream=True, max_tokens=2000)
                answer = await client.ask(CHAT.path, payload, headers=bearer(ALICE))
                assert answer.status == 200
        refused = await ask(gateway, ALICE, max_tokens=2990)
        assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limited")
        assert "tokens per minute" in refused.json["error"]["message"]


async def test_aborted_streams_and_then_an_ordinary_one() -> None:
    """Five hundred that leave at a limit of one slot: the next one is served."""
    engine = ScriptedEngine(Stream(tokens=1000, gap=0.01), slots=1)
    async with running_gateway(engine, tenants=[tenant("alice", ALICE, slots=1)], seconds=60) as gateway:

        async def leaves() -> None:
            with trio.move_on_after(0.05):
                async with http1(gateway.url) as client:
                    await client.post(CHAT.path, CHAT.payload(stream=True), headers=bearer(ALICE))
                    await client.head()
                    await client.eof()

        for _ in range(10):
            async with trio.open_nursery() as nursery:
                for _ in range(50):
                    nursery.start_soon(leaves)
        await gateway.live(0)
        engine.script = honest
        assert (await ask(gateway, ALICE)).status == 200


async def test_no_fault_of_an_engine_or_a_client_keeps_a_tenant_s_slot() -> None:
    """A key whose tenant may hold one slot, and everything that can go wrong, ten times each."""
    engine = ScriptedEngine(honest, slots=2)
    faults: list[tuple[Script | None, dict[str, Any], int]] = [
        (Status(502), {}, 502),
        (Status(504), {}, 504),
        (Status(429), {}, 429),
        (never_answers, {}, 504),
        (Raw([End.RST]), {}, 502),
        (Raw([b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nab", End.RST]), {}, 200),
        (Raw([b"nonsense\r\n\r\n", End.FIN]), {}, 502),
        (Whole(body=b"{broken"), {}, 200),
        (None, {"model": "unknown"}, 404),
        (None, {"n": "two"}, 400),
    ]
    tenants = [tenant("alice", ALICE, slots=1)]
    clocks = {"first_byte_seconds": 0.05, "idle_seconds": 0.05}
    async with running_gateway(engine, tenants=tenants, stream=clocks) as gateway:
        for script, fields, status in faults:
            engine.plan = [script] * 20 if script is not None else []  # some are tried twice
            for _ in range(10):
                async with http1(gateway.url) as client:
                    await client.post(CHAT.path, CHAT.payload(stream=False, **fields), headers=bearer(ALICE))
                    assert (await client.head()).status == status
            engine.plan = []
            assert (await ask(gateway, ALICE)).status == 200
            await gateway.idle()


# Deadlines and room.


@pytest.mark.parametrize(
    "name", ["X-Request-Timeout-Seconds", "X-Stainless-Read-Timeout", "X-Stainless-Timeout"]
)
async def test_what_cannot_start_in_time_is_refused_at_once(name: str) -> None:
    engine = ScriptedEngine(honest, slots=1)
    engine.plan = [Whole(takes=0.8), Whole(takes=trio.Event())]
    async with running_gateway(engine) as gateway:
        assert (await ask(gateway, None)).status == 200
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, gateway, None)
            await engine.call(1)
            since = trio.current_time()
            refused = await ask(gateway, None, headers={name: "0.5"})
            assert trio.current_time() - since < 0.4
            assert (refused.status, refused.json["error"]["code"]) == (503, "queue_timeout")
            assert int(refused.head["retry-after"]) >= 1
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("value", ["600", "nonsense", "-1", "0", "1e999", ""])
async def test_other_timeouts_wait_as_ever(value: str) -> None:
    engine = ScriptedEngine(Whole(takes=0.1), slots=1)
    async with running_gateway(engine) as gateway, trio.open_nursery() as nursery:
        nursery.start_soon(ask, gateway, None)
        await engine.call(0)
        answer = await ask(
            gateway, None, headers={"X-Request-Timeout-Seconds": value} if value else {"X": "y"}
        )
        assert answer.status == 200


async def test_a_request_waits_for_room_in_the_cache() -> None:
    may_end = trio.Event()
    engine = ScriptedEngine(honest, slots=4)
    engine.plan = [Whole(takes=may_end)]
    async with running_gateway(engine, engine={"kv_tokens": 1000}) as gateway:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: ask(gateway, None, max_tokens=700))
            await engine.call(0)
            nursery.start_soon(lambda: ask(gateway, None, max_tokens=600))
            await gateway.queued(1)
            nursery.start_soon(lambda: ask(gateway, None, max_tokens=10))
            await gateway.queued(2)  # It would fit, and doesn't pass the large one.
            assert len(engine.calls) == 1
            may_end.set()
        await gateway.recorded(3, status=200)
        refused = await ask(gateway, None, max_tokens=2000)
        assert (refused.status, refused.json["error"]["param"]) == (400, "max_tokens")


async def test_what_a_dead_engine_refuses_costs_nothing() -> None:
    engine = ScriptedEngine(honest)
    tenants = [tenant("alice", ALICE, requests_per_minute=3, tokens_per_minute=100_000)]
    async with running_gateway(engine, tenants=tenants) as gateway:
        await engine.stop()
        for _ in range(5):
            refused = await ask(gateway, ALICE)
            assert (refused.status, refused.json["error"]["code"]) == (503, "no_engine")
            assert refused.head["x-ratelimit-remaining-requests"] == "3"
            assert refused.head["x-ratelimit-remaining-tokens"] == "100000"


async def test_a_number_beyond_all_reason_is_answered() -> None:
    engine = ScriptedEngine(honest)
    tenants = [tenant("alice", ALICE, requests_per_minute=30, tokens_per_minute=1000)]
    async with running_gateway(engine, tenants=tenants) as gateway:
        assert (await ask(gateway, ALICE, max_tokens=10**30)).status == 200
        assert (await ask(gateway, ALICE, max_tokens=10)).status == 200
