"""A restart without a gap: a second gateway takes over from the first, under load, and no engine notices."""

from __future__ import annotations

import os
import socket
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from gateway import config
from gateway.handover import take_over
from gateway.service import Service, run
from tests.support.gateway import entry, toml_of
from tests.support.http1 import Http1, connect, http1
from tests.support.process import command, free_ports
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Stream, Whole, honest


class Successive:
    """Gateways with one configuration, each of which takes over from the one before."""

    def __init__(self, folder: Path, *engines: ScriptedEngine, nursery: trio.Nursery, **server: Any) -> None:
        self.path = folder / "handover.sock"
        self._nursery = nursery
        self.records: list[list[dict[str, Any]]] = []
        self.ended: list[trio.Event] = []
        self.services: list[Service] = []
        addresses = {"listen": ["127.0.0.1:0"], "admin": "127.0.0.1:0", "handover": f"unix:{self.path}"}
        sections = {"server": {**addresses, **server}, "health": {"probe_seconds": 0}}
        self.config = config.parse(toml_of(sections, [entry(engine, {}) for engine in engines]))

    @property
    def url(self) -> str:
        return self.services[-1].listen[0]

    async def start(self, settings: config.Config | None = None) -> Service:
        records: list[dict[str, Any]] = []
        self.records.append(records)
        self.ended.append(trio.Event())
        self.services.append(
            await self._nursery.start(partial(self._run, settings or self.config, records, self.ended[-1]))
        )
        return self.services[-1]

    async def _run(
        self,
        settings: config.Config,
        records: list[dict[str, Any]],
        ended: trio.Event,
        *,
        task_status: trio.TaskStatus[Service],
    ) -> None:
        await run(settings, sink=records.append, task_status=task_status)
        ended.set()

    def held(self) -> list[int]:
        """Slots of the first engine, by gateway."""
        return [each.gateway.engines[0].ledger.held for each in self.services]

    def usable(self) -> list[int]:
        return [each.gateway.engines[0].ledger.slots for each in self.services]


@asynccontextmanager
async def successive(folder: Path, *engines: ScriptedEngine, **server: Any) -> AsyncIterator[Successive]:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for engine in engines:
                nursery.start_soon(engine.serve)
            gateways = Successive(folder, *engines, nursery=nursery, **server)
            await gateways.start()
            yield gateways
            nursery.cancel_scope.cancel()
    for engine in engines:
        assert engine.peak <= engine.slots


async def until(true: Any) -> None:
    while not true():  # noqa: ASYNC110 - what it is about is another process's, or as good as that
        await trio.sleep(0.005)


@pytest.mark.parametrize("http2", [False, True])
async def test_under_load_nothing_fails_and_no_engine_has_too_much(tmp_path: Path, http2: bool) -> None:
    """Clients that keep their connections alive ask all the time, while three gateways follow each other."""
    engine = ScriptedEngine(Stream(tokens=6, gap=0.004), slots=5)
    statuses: Counter[Any] = Counter()
    over = trio.Event()

    async def client(gateways: Successive) -> None:
        async with httpx.AsyncClient(http1=not http2, http2=http2, timeout=30, trust_env=False) as asking:
            while not over.is_set():
                try:
                    answer = await asking.post(gateways.url + CHAT.path, json=CHAT.payload(stream=True))
                    whole = CHAT.parts is not None and answer.content == CHAT.parts.all(6)
                    statuses[(answer.status_code, whole)] += 1
                except httpx.HTTPError as error:
                    statuses[repr(error)] += 1

    async with successive(tmp_path, engine) as gateways, trio.open_nursery() as nursery:
        for _ in range(12):
            nursery.start_soon(client, gateways)
        for number in range(2):
            await until(lambda number=number: len(engine.calls) > 40 * (1 + number))
            await gateways.start()
            await gateways.ended[-2].wait()
        seen = len(engine.calls)
        await until(lambda: len(engine.calls) > seen + 40)
        over.set()
    assert set(statuses) == {(200, True)}, statuses
    assert engine.peak == engine.slots, "all of it was used"
    assert all(len(records) > 10 for records in gateways.records)


async def test_streams_end_where_they_began_and_the_new_one_has_what_is_left(tmp_path: Path) -> None:
    go = trio.Event()
    engine = ScriptedEngine(Stream(tokens=5, pause_after=1, until=go), slots=3)
    async with (
        successive(tmp_path, engine) as gateways,
        http1(gateways.url) as first,
        http1(gateways.url) as idle,
    ):
        await idle.ask("/v1/models", method="GET")
        await first.post(CHAT.path, CHAT.payload(stream=True))
        await first.head()
        await gateways.start()
        await until(lambda: gateways.usable() == [1, 2])
        engine.script = Whole(takes=go)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask, gateways.url)
            await engine.until(lambda: engine.running == 3)
            await until(lambda: gateways.services[1].gateway.admission.waiting == 1)
            assert gateways.held() == [1, 2]
            go.set()
            assert CHAT.parts is not None
            assert (await first.rest()).endswith(CHAT.parts.all(5)[-20:])
        for client in (first, idle):
            answer = await client.ask("/v1/models", method="GET")
            assert (answer.status, answer.head["connection"]) == (200, "close")
        await gateways.ended[0].wait()
        await until(lambda: gateways.usable()[1] == 3)


async def ask(url: str) -> int:
    async with http1(url) as client:
        return (await client.ask(CHAT.path, CHAT.payload(stream=False))).status


async def test_who_waits_in_the_old_one_is_served_by_it(tmp_path: Path) -> None:
    go, engine = trio.Event(), ScriptedEngine(honest, slots=1)
    engine.plan = [Whole(takes=go)]
    said: list[int] = []

    async def one() -> None:
        said.append(await ask(gateways.url))

    async with successive(tmp_path, engine) as gateways, trio.open_nursery() as nursery:
        nursery.start_soon(one)
        await engine.call(0)
        nursery.start_soon(one)
        await until(lambda: gateways.services[0].gateway.admission.waiting == 1)
        await gateways.start()
        nursery.start_soon(one)
        await until(lambda: gateways.services[1].gateway.admission.waiting == 1)
        assert gateways.usable() == [1, 0]
        go.set()
        await gateways.ended[0].wait()
    assert said == [200, 200, 200]
    assert [len(records) for records in gateways.records] == [2, 1]


async def test_one_that_does_not_come_to_serve_takes_nothing(tmp_path: Path) -> None:
    engine = ScriptedEngine(honest)
    async with successive(tmp_path, engine) as gateways:
        before = await take_over(str(gateways.path))
        assert before is not None
        assert before.keeps == {engine.url: (4, 0)}
        before.close()
        assert await ask(gateways.url) == 200
        await gateways.start()
        await gateways.ended[0].wait()
        assert await ask(gateways.url) == 200


async def test_what_an_old_one_held_when_it_was_killed_is_kept_free_for_a_while(tmp_path: Path) -> None:
    engine = ScriptedEngine(honest, slots=2, kind="vllm")
    async with successive(tmp_path, engine) as gateways:
        path, mine = str(tmp_path / "other.sock"), {engine.url: [1, 0]}
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen()
            other = config.parse(
                config.show(gateways.config)
                .replace(str(gateways.path), path)
                .replace("seconds = 10", "seconds = 1")
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(dying, listening, mine)
                await gateways.start(other)
        assert gateways.usable()[1] == 1
        await until(lambda: gateways.usable()[1] == 2)


async def dying(listening: socket.socket, keeps: dict[str, Any]) -> None:
    """A gateway that is killed as soon as it has handed over."""
    listening.setblocking(False)
    with trio.socket.from_stdlib_socket(listening) as server:
        end, _ = await server.accept()
        with end:
            await end.recv(100)
            await end.send(b'{"sockets": []}\n{"keeps": ' + repr(keeps).replace("'", '"').encode() + b"}\n")
            await end.recv(100)
            await end.send(b'{"left": true}\n')


async def test_strangers_and_nonsense_change_nothing(tmp_path: Path) -> None:
    engine = ScriptedEngine(honest)
    async with successive(tmp_path, engine) as gateways:
        assert oct(gateways.path.stat().st_mode & 0o777) == "0o600"
        for word in (
            b"",
            b"\n",
            b"nonsense\n",
            b'{"takes": 2}\n',
            b"[1]\n",
            b'{"takes": 1}\n[]\n',
            b"x" * (2 << 20),
        ):
            stream = await trio.open_unix_socket(os.fspath(gateways.path))
            try:
                await stream.send_all(word)
                await stream.send_eof()
                while await stream.receive_some():
                    pass
            except trio.BrokenResourceError:
                pass
            await stream.aclose()
        assert await ask(gateways.url) == 200
        await gateways.start()
        await gateways.ended[0].wait()
        assert await ask(gateways.url) == 200


async def test_without_a_process_there_it_starts_as_ever(tmp_path: Path) -> None:
    engine = ScriptedEngine(honest)
    async with successive(tmp_path, engine) as gateways:
        assert await ask(gateways.url) == 200
        gateways.services[0].drain()
        await gateways.ended[0].wait()
        await gateways.start()
        assert await ask(gateways.url) == 200


async def test_a_signal_ends_the_old_one_sooner(tmp_path: Path) -> None:
    engine = ScriptedEngine(Stream(pause_after=1, until=trio.Event()))
    async with successive(tmp_path, engine, drain_seconds=300) as gateways:
        client = Http1(await connect(gateways.url))
        await client.post(CHAT.path, CHAT.payload(stream=True))
        await client.head()
        await gateways.start()
        await until(lambda: gateways.services[0].leaves)
        gateways.services[0].drain()
        await gateways.ended[0].wait()
        assert gateways.records[0][0]["outcome"] == "drained"
        await client.close()


async def test_two_processes(tmp_path: Path) -> None:
    """The same with processes, as a supervisor has them: the first one ends by itself, with status 0."""
    engine = ScriptedEngine(Stream(tokens=6, gap=0.004), slots=3)
    port, admin = free_ports(2)
    sections = {
        "server": {
            "listen": [f"127.0.0.1:{port}"],
            "admin": f"127.0.0.1:{admin}",
            "handover": f"unix:{tmp_path / 'handover.sock'}",
        }
    }
    file = tmp_path / "config.toml"
    file.write_text(toml_of(sections, [entry(engine, {})]))
    statuses: Counter[Any] = Counter()
    over = trio.Event()

    async def client() -> None:
        async with httpx.AsyncClient(timeout=30, trust_env=False) as asking:
            while not over.is_set():
                answer = await asking.post(
                    f"http://127.0.0.1:{port}{CHAT.path}", json=CHAT.payload(stream=True)
                )
                statuses[answer.status_code] += 1

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.serve)
            async with process_of(file) as first, trio.open_nursery() as clients:
                for _ in range(6):
                    clients.start_soon(client)
                await until(lambda: len(engine.calls) > 40)
                async with process_of(file):
                    assert await first.wait() == 0
                    seen = len(engine.calls)
                    await until(lambda: len(engine.calls) > seen + 40)
                    over.set()
                    await until(lambda: not clients.child_tasks)
            nursery.cancel_scope.cancel()
    assert set(statuses) == {200}
    assert engine.peak <= engine.slots


@asynccontextmanager
async def process_of(file: Path) -> AsyncIterator[trio.Process]:
    """A gateway that is ready."""
    process = await trio.lowlevel.open_process(
        command("serve", "--config", str(file)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        said = b""
        while b"ready" not in said:
            more = await process.stderr.receive_some()
            assert more, said
            said += more
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stderr.aclose()
