"""The gateway under test, in the test's own loop, with what a test asks of it.

`running_gateway(engine, …)` starts scripted engines and the gateway before them. When the test's body has
ended, it checks what holds after every test: the ledger idle and balanced, the gauges zero, no engine ever
given more than its slots.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

from gateway import config
from gateway.service import Service, run
from tests.support.http1 import Answer, Http1, connect, request_bytes
from tests.support.scripted import Notes, ScriptedEngine

Record = Mapping[str, Any]
Section = Mapping[str, Any]

TEST_SECONDS = float(os.environ.get("TEST_SECONDS", "20"))  # a test that hangs fails, and says where
IDLE_SECONDS = 3  # how long the ledger may take to be idle once everybody has left


class Gateway:
    """A running gateway."""

    def __init__(self) -> None:
        self.service: Service
        self.records: list[Record] = []
        self._notes = Notes()
        self.ended = trio.Event()
        self.sections: dict[str, dict[str, Any]] = {}
        self.engines: list[dict[str, Any]] = []
        self.tenants: list[Section] = []
        self.routes: list[Section] = []

    @property
    def url(self) -> str:
        address: str = self.service.listen[0]
        return address

    def take_record(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        self._notes.changed()

    def matching(self, **fields: Any) -> list[Record]:
        return [r for r in self.records if all(r.get(name) == value for name, value in fields.items())]

    async def record(self, **fields: Any) -> Record:
        """The first access record with these fields, as soon as it is written."""
        await self.recorded(1, **fields)
        return self.matching(**fields)[0]

    async def recorded(self, count: int, **fields: Any) -> None:
        await self._notes.until(lambda: len(self.matching(**fields)) >= count)

    # Its configuration: what a test changes here a reload finds.

    def load(self) -> config.Config:
        text = toml_of(self.sections, self.engines, self.tenants, self.routes)
        return config.parse(text, file="test.toml", environ={})

    async def reload(self) -> Answer:
        return await self.admin("/admin/reload", "POST")

    # The control plane.

    async def admin(self, path: str, method: str = "GET") -> Answer:
        client = Http1(await connect(self.service.admin))
        try:
            await client.send(request_bytes(path, method=method))
            return await client.answer()
        finally:
            await client.close()

    async def ledger(self) -> dict[str, Any]:
        answer = await self.admin("/admin/ledger")
        assert answer.status == 200, answer
        ledger: dict[str, Any] = answer.json
        return ledger

    async def requests(self) -> list[dict[str, Any]]:
        answer = await self.admin("/admin/requests")
        assert answer.status == 200, answer
        requests: list[dict[str, Any]] = answer.json["requests"]
        return requests

    async def queued(self, count: int) -> None:
        """Until so many requests wait for a slot."""
        await self._poll(lambda state: state["queued"] == count, "/admin/requests")

    async def live(self, count: int) -> None:
        """Until so many requests are alive in the gateway."""
        await self._poll(lambda state: len(state["requests"]) == count, "/admin/requests")

    async def spools_full(self, count: int) -> None:
        """Until so many requests have spools, of the usual size, into which nothing more goes."""
        await self._poll(
            lambda state: sum(request["spooled_bytes"] > 180_000 for request in state["requests"]) == count,
            "/admin/requests",
        )

    async def engine(self, name: str, true: Callable[[Any], bool]) -> None:
        """Until an engine is seen so in the control plane."""
        await self._poll(lambda state: true(state["engines"][name]), "/admin/engines")

    async def in_phase(self, phase: str, count: int = 1) -> None:
        await self._poll(
            lambda state: sum(r["phase"] == phase for r in state["requests"]) >= count, "/admin/requests"
        )

    async def _poll(self, true: Any, path: str) -> Any:
        state: Any = None
        with trio.move_on_after(IDLE_SECONDS):
            while True:
                state = (await self.admin(path)).json
                if true(state):
                    return state
                await trio.sleep(0.005)
        raise AssertionError(f"{path} stays {json.dumps(state)}")

    async def metrics(self) -> dict[str, float]:
        """Every sample, by its line without the value."""
        answer = await self.admin("/metrics")
        assert answer.status == 200, answer
        lines = [line for line in answer.body.decode().splitlines() if line and not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    async def idle(self) -> None:
        """Until nothing runs, or fail: all gauges at zero and the sums in agreement."""
        ledger = await self._poll(is_idle, "/admin/ledger")
        for name, engine in ledger["engines"].items():
            assert engine["balanced"], (name, engine)
            assert engine["acquired"] == engine["released"], (name, engine)
            assert engine["free"] == engine["slots"], (name, engine)
        metrics = await self.metrics()
        for name, value in metrics.items():
            busy = (
                name.startswith("gateway_slots{")
                and 'state="free"' not in name
                and 'state="slots"' not in name
            )
            gauge = name.partition("{")[0] in (
                "gateway_queue_depth",
                "gateway_streams",
                "gateway_spooled_bytes",
                "gateway_ghosts",
            )
            assert not ((busy or gauge) and value), f"{name} is {value} though the ledger is idle"


def is_idle(ledger: Any) -> bool:
    engines = ledger["engines"].values()
    return bool(ledger["balanced"]) and all(
        e["running"] == e["reclaiming"] == e["ghosts"] == 0 for e in engines
    )


def toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {toml_value(v)}" for name, v in value.items()) + " }"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    return json.dumps(value)


def toml_of(
    sections: Mapping[str, Section],
    engines: Sequence[Section],
    tenants: Sequence[Section] = (),
    routes: Sequence[Section] = (),
) -> str:
    lines: list[str] = []
    for title, section in [
        *((f"[{name}]", s) for name, s in sections.items()),
        *(("[[engine]]", e) for e in engines),
        *(("[[tenant]]", tenant) for tenant in tenants),
        *(("[[route]]", route) for route in routes),
    ]:
        lines += [title, *(f"{name} = {toml_value(value)}" for name, value in section.items()), ""]
    return "\n".join(lines)


def entry(engine: ScriptedEngine | Section, more: Section) -> Section:
    """The `[[engine]]` of a scripted engine; one given in words stays as it is."""
    if not isinstance(engine, ScriptedEngine):
        return engine
    # Ollama can't be asked: each of its requests that is cut short costs a second. Few tests are about that.
    grace = {"reclaim_seconds": 0} if engine.kind == "ollama" else {}
    return {
        "name": engine.name,
        "kind": engine.kind,
        "url": engine.url,
        "slots": engine.slots,
        "models": list(engine.models),
        **grace,
        **more,
    }


@asynccontextmanager
async def running_gateway(
    *engines: ScriptedEngine | Section,
    server: Section | None = None,
    stream: Section | None = None,
    admission: Section | None = None,
    usage: Section | None = None,
    health: Section | None = None,
    retry: Section | None = None,
    traces: Section | None = None,
    routes: Sequence[Section] = (),
    engine: Section | None = None,
    tenants: Sequence[Section] = (),
    seconds: float = TEST_SECONDS,
    check: bool = True,
) -> AsyncIterator[Gateway]:
    """`engine` is added to each scripted engine's entry. `check` off: something is left running.

    Engines are probed only if `health` says so: most tests count connections.
    """
    sections = {
        "server": {"listen": ["127.0.0.1:0"], "admin": "127.0.0.1:0", **(server or {})},
        "stream": stream or {},
        "admission": admission or {},
        "usage": usage or {},
        "health": {"probe_seconds": 0, **(health or {})},
        "retry": retry or {},
        "traces": traces or {},
    }
    gateway = Gateway()
    gateway.sections = {name: dict(section) for name, section in sections.items()}
    gateway.engines = [dict(entry(e, engine or {})) for e in engines]
    gateway.tenants, gateway.routes = list(tenants), list(routes)
    cfg = gateway.load()

    async def gateway_to_its_end(*, task_status: trio.TaskStatus[Service]) -> None:
        await run(cfg, sink=gateway.take_record, load=gateway.load, task_status=task_status)
        gateway.ended.set()

    scripted = [e for e in engines if isinstance(e, ScriptedEngine)]
    with trio.move_on_after(seconds) as limit:
        async with trio.open_nursery() as nursery:
            for one in scripted:
                nursery.start_soon(one.serve)
            gateway.service = await nursery.start(partial(gateway_to_its_end))
            yield gateway
            if check and not gateway.ended.is_set():
                await gateway.idle()
            nursery.cancel_scope.cancel()
    if limit.cancelled_caught:
        told = [*(repr(call) for one in scripted for call in one.calls[-5:]), *map(str, gateway.records[-5:])]
        raise AssertionError("\n".join([f"not over after {seconds} s", *told]))
    for one in scripted:
        assert one.peak <= one.slots, f"{one.name} ran {one.peak} at once with {one.slots} slots"
