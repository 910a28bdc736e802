"""Reloads that go wrong late, change what an engine is, or meet what an operator has done."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from gateway.config import ConfigError
from gateway.tenants import digest_of
from tests.conftest import Tls
from tests.support.gateway import Gateway, entry, running_gateway
from tests.support.http1 import http1, request_bytes
from tests.support.process import gateway_process
from tests.support.routes import CHAT
from tests.support.scripted import Call, ScriptedEngine
from tests.support.scripts import Whole, honest, never_answers


async def ask(gateway: Gateway, **headers: str) -> int:
    async with http1(gateway.url) as client:
        return (await client.ask(CHAT.path, CHAT.payload(stream=False), headers=headers)).status


async def engines_of(gateway: Gateway) -> Any:
    return (await gateway.admin("/admin/engines")).json["engines"]


class Late(ScriptedEngine):
    """A new engine whose probe takes until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(honest, name="late")
        self.probed, self.go_on = trio.Event(), trio.Event()
        self.pages["/v1/models"] = self._page

    async def _page(self, call: Call) -> None:
        self.probed.set()
        await self.go_on.wait()
        await call.head(200, framing="length", length=0)


async def test_files_that_change_while_it_probes_harm_nobody(tls: Tls, tmp_path: Path) -> None:
    """What was read and checked is what is used: certbot writes the chain first, and then the key."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    shutil.copy(tls.certificate, certificate)
    shutil.copy(tls.key, key)
    engine, late = ScriptedEngine(honest), Late()
    files = {"certificate": str(certificate), "key": str(key)}
    async with (
        running_gateway(engine, server={"tls": files}, health={"probe_seconds": 60}) as gateway,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(late.serve)
        gateway.engines.append(dict(entry(late, {})))
        nursery.start_soon(gateway.service.reloader.reload)
        await late.probed.wait()
        shutil.copy(tls.certificate.parent / "authority.pem", certificate)  # Not this key's.
        late.go_on.set()
        await gateway.engine("late", lambda each: each["state"] == "healthy")
        stream = trio.SSLStream(
            await trio.open_tcp_stream("127.0.0.1", int(gateway.url.rpartition(":")[2])),
            tls.trusted,
            server_hostname="localhost",
        )
        await stream.do_handshake()
        await stream.aclose()
        with pytest.raises(ConfigError, match=r"server\.tls"):
            await gateway.service.reloader.reload()
        nursery.cancel_scope.cancel()


async def test_a_fault_of_our_own_is_told_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_gateway(ScriptedEngine(honest)) as gateway:
        monkeypatch.setattr(gateway.service.reloader, "_load", lambda: 1 / 0)
        answer = await gateway.reload()
        assert answer.status == 422
        assert "ZeroDivisionError" in answer.json["faults"][0]
        assert (await gateway.metrics())["gateway_config_reload_failed"] == 1
        assert await ask(gateway) == 200


async def test_a_file_that_is_gone_does_not_end_the_process(tmp_path: Path) -> None:
    engine = ScriptedEngine(honest)
    with trio.fail_after(30):
        async with gateway_process(tmp_path, engine) as process:
            (tmp_path / "config.toml").unlink()
            process.signal(signal.SIGHUP)
            await process.said(b"reload failed")
            async with http1(process.url) as client:
                assert (await client.ask(CHAT.path, CHAT.payload(stream=False))).status == 200


async def test_an_engine_that_is_to_list_its_models_from_now_on_serves_on() -> None:
    go, engine = trio.Event(), ScriptedEngine(honest, slots=1)
    engine.plan = [Whole(takes=go)]
    said: list[int] = []
    async with running_gateway(engine) as gateway, trio.open_nursery() as nursery:

        async def one() -> None:
            said.append(await ask(gateway))

        nursery.start_soon(one)
        await engine.call(0)
        nursery.start_soon(one)
        await gateway.queued(1)
        gateway.engines[0]["models"] = ["auto"]
        assert (await gateway.reload()).status == 200
        assert (await engines_of(gateway))["engine"]["models"] == ["model"]
        go.set()
    assert said == [200, 200]


@pytest.mark.parametrize("key", ["kind", "name"])
async def test_what_is_at_work_there_is_not_given_a_second_account(key: str) -> None:
    go, engine = trio.Event(), ScriptedEngine(honest, name="a", slots=1)
    engine.plan = [Whole(takes=go)]
    async with running_gateway(engine) as gateway, trio.open_nursery() as nursery:
        nursery.start_soon(ask, gateway)
        await engine.call(0)
        gateway.engines[0][key] = "vllm"
        answer = await gateway.reload()
        assert answer.status == 422
        assert 'engine "a" (openai) is still at work there' in answer.json["faults"][0]
        go.set()
        await gateway.idle()
        assert (await gateway.reload()).status == 200
        assert await ask(gateway) == 200


@pytest.mark.parametrize("key", ["kind", "url"])
async def test_what_an_operator_keeps_free_stays_free(key: str) -> None:
    a, b = ScriptedEngine(honest, name="a"), ScriptedEngine(honest, name="b")
    other = ScriptedEngine(honest)
    async with running_gateway(a, b) as gateway, trio.open_nursery() as nursery:
        nursery.start_soon(other.serve)
        assert (await gateway.admin("/admin/engines/a/drain", "POST")).status == 200
        gateway.engines[0][key] = {"kind": "vllm", "url": other.url}[key]
        assert (await gateway.reload()).status == 200
        assert (await engines_of(gateway))["a"]["drained"]
        assert await ask(gateway) == 200
        assert len(b.calls) == 1
        nursery.cancel_scope.cancel()


async def test_another_interval_between_probes_counts_at_once() -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine, health={"probe_seconds": 3600}) as gateway:
        await engine.until(lambda: len(engine.probes) == 1)
        gateway.sections["health"]["probe_seconds"] = 0.05
        assert (await gateway.reload()).status == 200
        await engine.until(lambda: len(engine.probes) > 3)


async def test_a_tenant_that_comes_back_has_the_slots_it_had() -> None:
    go, engine = trio.Event(), ScriptedEngine(Whole(takes=trio.Event()), slots=4)
    engine.plan = [Whole(takes=go), Whole(takes=go)]
    tenant, mine = {"name": "t", "keys": [digest_of("sk-t")], "slots": 1}, {"x-api-key": "sk-t"}
    other = {"name": "other", "keys": [digest_of("sk-o")]}
    async with running_gateway(engine, tenants=[tenant, other]) as gateway, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: ask(gateway, **mine))
        await engine.call(0)
        for absent in (True, False):
            gateway.tenants = [other] if absent else [tenant, other]
            assert (await gateway.reload()).status == 200
        nursery.start_soon(lambda: ask(gateway, **mine))
        await gateway.queued(1)
        assert engine.peak == 1
        go.set()


async def test_another_authority_in_the_same_file_is_believed(tls: Tls, tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    shutil.copy(tls.certificate.parent / "authority.pem", authority)
    engine = ScriptedEngine(honest)
    settings = {"url": "https://127.0.0.1:1", "ca": str(authority)}
    async with running_gateway(engine, engine=settings) as gateway:
        (running,) = gateway.service.gateway.engines
        assert running.tls is not None
        before = len(running.tls.get_ca_certs())
        authority.write_text("no certificate")
        answer = await gateway.reload()
        assert answer.status == 422
        assert answer.json["faults"][0].startswith("engine[0].ca: ") or ".ca: " in answer.json["faults"][0]
        shutil.copy(tls.certificate, authority)
        assert (await gateway.reload()).status == 200
        assert len(running.tls.get_ca_certs()) >= before


async def test_a_reload_that_nobody_waits_for_any_more_leaves_nothing_behind() -> None:
    engine, hung = ScriptedEngine(honest, name="a"), ScriptedEngine(honest, name="hung")
    hung.pages["/v1/models"] = never_answers
    async with (
        running_gateway(engine, health={"probe_seconds": 60}) as gateway,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(hung.serve)
        gateway.engines.append(dict(entry(hung, {})))
        for number in range(3):
            async with http1(gateway.service.admin) as client:
                await client.send(request_bytes("/admin/reload", method="POST"))
                await hung.until(lambda number=number: len(hung.probes) > number)  # type: ignore[misc]
        probed = gateway.service.reloader._fleet._probes
        while len(probed) > 1:  # noqa: ASYNC110 - the reload is on its way out
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
