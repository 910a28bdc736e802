"""A new configuration for a running gateway: what changes, and what nobody notices."""

from __future__ import annotations

import random
import shutil
import ssl
from pathlib import Path
from typing import Any

import pytest
import trio

from gateway import check, config
from gateway.tenants import digest_of
from tests.conftest import Tls
from tests.support.gateway import Gateway, entry, running_gateway, toml_of
from tests.support.http1 import Answer, http1
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Stream, Whole, honest


async def ask(gateway: Gateway, stream: bool = False, key: str | None = None, **more: Any) -> Answer:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with http1(gateway.url) as client:
        return await client.ask(CHAT.path, CHAT.payload(stream=stream, **more), headers=headers)


async def state_of(gateway: Gateway, name: str) -> dict[str, Any]:
    state: dict[str, Any] = (await gateway.admin("/admin/engines")).json["engines"][name]
    return state


async def test_a_bad_file_changes_nothing_and_says_why() -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine) as gateway:
        gateway.engines[0]["slotz"] = 3
        answer = await gateway.reload()
        assert answer.status == 422
        assert answer.json["faults"][0].startswith('test.toml: engine[0] "engine".slotz: unknown key')
        metrics = await gateway.metrics()
        assert metrics["gateway_config_reload_failed"] == 1
        assert metrics['gateway_config_reloads_total{result="failed"}'] == 1
        assert (await ask(gateway)).status == 200
        del gateway.engines[0]["slotz"]
        assert (await gateway.reload()).json == {"changes": [], "down": [], "file": ""}
        assert (await gateway.metrics())["gateway_config_reload_failed"] == 0


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("server", "listen", ["127.0.0.1:1"]),
        ("server", "admin", "127.0.0.1:1"),
        ("stream", "stall_seconds", 7),
        ("usage", "keep_days", 7),
    ],
)
async def test_what_needs_a_restart_is_refused_as_a_whole(section: str, key: str, value: Any) -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine) as gateway:
        gateway.sections[section][key] = value
        gateway.engines[0]["slots"] = 3
        answer = await gateway.reload()
        assert answer.status == 422
        assert answer.json["faults"] == [
            f"{section}.{key}: a reload can't change this; restart the gateway to change it"
        ]
        assert (await gateway.ledger())["engines"]["engine"]["slots"] == 4


async def test_what_it_would_do_is_said_and_not_done() -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine) as gateway:
        gateway.engines[0]["slots"] = 3
        gateway.engines[0]["api_key"] = "sk-secret"
        gateway.sections["stream"]["idle_seconds"] = 7
        answer = await gateway.admin("/admin/reload?dry_run=1", "POST")
        assert answer.json["changes"] == [
            "stream.idle_seconds: 120.0 -> 7.0",
            'engine "engine".slots: 4 -> 3',
            'engine "engine".api_key: changed (********)',
        ]
        assert b"sk-secret" not in answer.body
        assert "down" not in answer.json, "it has asked no engine"
        assert (await gateway.ledger())["engines"]["engine"]["slots"] == 4
        await gateway.admin("/admin/reload?dry_run=0", "POST")
        assert (await gateway.ledger())["engines"]["engine"]["slots"] == 3


async def test_the_command_asks_the_running_gateway_what_it_would_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine) as gateway:

        async def said() -> tuple[int, list[str]]:
            settings = config.parse(
                toml_of({"server": {"admin": gateway.service.admin.removeprefix("http://")}}, gateway.engines)
            )
            code = await check.diff(settings, "test.toml")
            return code, capsys.readouterr().out.splitlines()[-1:]

        assert await said() == (0, ["no changes"])
        gateway.engines[0]["slots"] = 3
        assert await said() == (0, ['engine "engine".slots: 4 -> 3'])
        gateway.sections["server"]["listen"] = ["127.0.0.1:1"]
        code, (line,) = await said()
        assert (code, line.partition(";")[0]) == (1, "server.listen: a reload can't change this")
        assert (await gateway.ledger())["engines"]["engine"]["slots"] == 4


async def test_a_removed_engine_ends_its_streams_and_is_gone_then() -> None:
    """Case C59; case C22 for the one that stays."""
    go_on = trio.Event()
    script = Stream(tokens=4, pause_after=2, until=go_on)
    old, kept, new = (ScriptedEngine(script, name=name, slots=1) for name in ("old", "kept", "new"))
    answers: list[Answer] = []

    async def one() -> None:
        answers.append(await ask(gateway, stream=True))

    async with running_gateway(old, kept, check=False) as gateway:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(new.serve)
            nursery.start_soon(one)
            nursery.start_soon(one)
            for engine in (old, kept):
                await (await engine.call(0)).made(2)
            nursery.start_soon(one)
            await gateway.queued(1)
            gateway.engines = [dict(entry(kept, {})), dict(entry(new, {}))]
            assert (await gateway.reload()).status == 200
            await (await new.call(0)).made(2)  # Who has waited goes there.
            engines = (await gateway.ledger())["engines"]
            assert {name: each["running"] for name, each in engines.items()} == {
                "kept": 1,
                "new": 1,
                "old": 1,
            }
            assert (await state_of(gateway, "old"))["retired"]
            go_on.set()
            with trio.fail_after(3):
                while len(answers) < 3 or "old" in (await gateway.ledger())["engines"]:
                    await trio.lowlevel.checkpoint()
            assert (await ask(gateway, stream=True)).status == 200
            nursery.cancel_scope.cancel()
        assert [answer.status for answer in answers] == [200, 200, 200]
        assert all(answer.body == answers[0].body for answer in answers)
        await gateway.idle()


async def test_an_engine_that_comes_back_has_the_books_it_had() -> None:
    go_on = trio.Event()
    flapping = ScriptedEngine(Whole(takes=go_on), name="flapping", slots=2)
    other = ScriptedEngine(honest, name="other", slots=1)
    async with running_gateway(flapping, other) as gateway, trio.open_nursery() as nursery:
        both = list(gateway.engines)
        await gateway.admin("/admin/engines/other/drain", "POST")
        for index in range(2):
            nursery.start_soon(ask, gateway)
            await flapping.call(index)
        for engines in (both[1:], both, both[1:], both):
            gateway.engines = engines
            assert (await gateway.reload()).status == 200
        nursery.start_soon(ask, gateway)
        await gateway.queued(1)
        assert (await gateway.ledger())["engines"]["flapping"] == {
            "slots": 2, "running": 2, "reclaiming": 0, "ghosts": 0, "free": 0,
            "acquired": 2, "released": 0, "balanced": True,
        }  # fmt: skip
        assert len(flapping.calls) == 2
        go_on.set()


async def test_fewer_slots_let_nothing_in_until_below() -> None:
    ends = [trio.Event() for _ in range(6)]
    engine = ScriptedEngine(honest, slots=4)
    engine.plan = [Whole(takes=end) for end in ends]
    async with running_gateway(engine) as gateway, trio.open_nursery() as nursery:
        for index in range(4):
            nursery.start_soon(ask, gateway)
            await engine.call(index)
        gateway.engines[0]["slots"] = 2
        assert (await gateway.reload()).json["changes"] == ['engine "engine".slots: 4 -> 2']
        nursery.start_soon(ask, gateway)
        await gateway.queued(1)
        for end in ends[:2]:
            end.set()
        await gateway.recorded(2, status=200)
        assert ((await gateway.ledger())["engines"]["engine"]["running"], len(engine.calls)) == (2, 4)
        ends[2].set()
        await engine.call(4)
        for end in ends:
            end.set()
    assert engine.peak == 4


async def test_a_removed_key_ends_with_its_requests() -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(Whole(takes=go_on), slots=1)
    tenants = [{"name": name, "keys": [digest_of(f"sk-{name}")]} for name in ("stays", "goes")]
    answers: list[Answer] = []

    async def one() -> None:
        answers.append(await ask(gateway, key="sk-goes"))

    async with running_gateway(engine, tenants=tenants) as gateway, trio.open_nursery() as nursery:
        nursery.start_soon(one)
        await engine.call(0)
        nursery.start_soon(one)
        await gateway.queued(1)
        gateway.tenants = [tenants[0]]
        assert (await gateway.reload()).json["changes"] == ['tenant "goes": removed']
        assert (await ask(gateway, key="sk-goes")).status == 401
        go_on.set()
        await gateway.recorded(2, status=200, tenant="goes")
        assert [answer.status for answer in answers] == [200, 200]
        assert (await ask(gateway, key="sk-stays")).status == 200


async def test_a_rate_remembers_what_was_taken() -> None:
    engine = ScriptedEngine(honest)
    tenant = {"name": "t", "keys": [digest_of("sk-t")], "requests_per_minute": 2}
    async with running_gateway(engine, tenants=[tenant]) as gateway:
        for _ in range(2):
            assert (await ask(gateway, key="sk-t")).status == 200
        gateway.tenants = [{**tenant, "weight": 3}]
        assert (await gateway.reload()).status == 200
        assert (await ask(gateway, key="sk-t")).status == 429
        gateway.tenants = [{**tenant, "requests_per_minute": 5}]
        assert (await gateway.reload()).status == 200
        assert (await ask(gateway, key="sk-t")).status == 200


async def test_an_engine_that_is_down_comes_in_use_when_it_is_up() -> None:
    up, down = ScriptedEngine(honest, name="up"), ScriptedEngine(honest, name="down")
    down.listener.close()
    async with running_gateway(up, health={"probe_seconds": 60}) as gateway:
        gateway.engines.append(dict(entry(down, {})))
        answer = await gateway.reload()
        assert (answer.status, answer.json["down"]) == (200, ["down"])
        for _ in range(4):
            assert (await ask(gateway)).status == 200
        assert not [record for record in gateway.records if record["attempts"] != 1]


async def test_a_new_certificate_is_for_new_handshakes(tls: Tls, tmp_path: Path) -> None:
    def serial_seen_by(stream: trio.SSLStream[trio.SocketStream]) -> str:
        certificate = stream.getpeercert(binary_form=True)
        assert certificate is not None
        return ssl.DER_cert_to_PEM_cert(certificate)

    async def connect(port: int) -> trio.SSLStream[trio.SocketStream]:
        raw = await trio.open_tcp_stream("127.0.0.1", port)
        stream = trio.SSLStream(raw, tls.trusted, server_hostname="localhost")
        await stream.do_handshake()
        return stream

    files = {"certificate": tmp_path / "c.pem", "key": tmp_path / "k.pem"}
    shutil.copy(tls.certificate, files["certificate"])
    shutil.copy(tls.key, files["key"])
    engine = ScriptedEngine(honest)
    section = {"tls": {name: str(path) for name, path in files.items()}}
    async with running_gateway(engine, server=section) as gateway:
        port = int(gateway.url.rpartition(":")[2])
        before = await connect(port)
        issued = tls.authority.issue_cert("localhost")
        issued.private_key_pem.write_to_path(str(files["key"]))
        issued.cert_chain_pems[0].write_to_path(str(files["certificate"]))
        assert (await gateway.reload()).status == 200
        after = await connect(port)
        assert serial_seen_by(before) != serial_seen_by(after)
        files["certificate"].write_text("nonsense")
        assert (await gateway.reload()).status == 422
        again = await connect(port)
        assert serial_seen_by(again) == serial_seen_by(after)
        for stream in (before, after, again):
            await trio.aclose_forcefully(stream)


async def test_a_hundred_reloads_under_load() -> None:
    """Engines come and go, slots grow and shrink: no stream is dropped, and the books are exact."""
    dice = random.Random(7)
    engines = [ScriptedEngine(Stream(tokens=6, gap=0.003), name=name, slots=6) for name in "abc"]
    asked = 0
    going = True

    async def visitor() -> None:
        nonlocal asked
        while going:
            answer = await ask(gateway, stream=True, key="sk-stays")
            assert (answer.status, answer.body.count(b" tk")) == (200, 6), answer
            asked += 1

    stays = {"name": "stays", "keys": [digest_of("sk-stays")]}
    keys = [digest_of(f"sk-{number}") for number in range(4)]
    async with running_gateway(*engines, tenants=[stays], seconds=60) as gateway:
        entries = [dict(each) for each in gateway.engines]
        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(visitor)
            for _ in range(100):
                chosen = dice.sample(entries, dice.randint(1, 3))
                gateway.engines = [{**each, "slots": dice.randint(1, 6)} for each in chosen]
                others = {"name": "others", "keys": dice.sample(keys, 2), "weight": dice.randint(1, 3)}
                gateway.tenants = [{**stays, "weight": dice.randint(1, 3)}, *dice.choice([[], [others]])]
                assert (await gateway.reload()).status == 200
                assert (await gateway.ledger())["balanced"]
            going = False
        gateway.engines = entries
        assert (await gateway.reload()).status == 200
        assert asked > 100
        assert {record["outcome"] for record in gateway.records} == {"completed"}
