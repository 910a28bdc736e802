"""Clients and engines that are gone without a FIN: found within half a minute, whatever was going on.

Everything runs at once, in two networks: in one the link goes down, in the other packets just get no answer.
"""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio

from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import Truncated, http1, request_bytes
from tests.support.routes import CHAT
from tests.support.scripted import Call, Notes, ScriptedEngine
from tests.support.scripts import Stream, Whole, never_answers
from tests.wire import frames as f
from tests.wire.namespaces import Network, network
from tests.wire.raw2 import Raw2

FOUND_SECONDS = 30
ROUNDING_SECONDS = 1.5
"""The clocks look twice a second, and the machine may be busy."""

CLIENT_PHASES = ["queue", "body", "prefill", "silent stream", "stream", "stuck stream", "whole"]
ENGINE_PHASES = {
    "prefill": (502, "engine_failed"),
    "silent stream": (200, "engine_failed"),
    "whole": (502, "engine_failed"),
}
"""And what their clients are told."""


async def endless(call: Call) -> None:
    await call.head(200, [("Content-Type", CHAT.media)])
    while True:
        await call.send(b"data: " + b"x" * 16_000 + b"\n\n")


async def script(call: Call) -> None:
    """What the request's user asks for."""
    never = trio.Event()
    phase: str = call.json["user"].partition("/")[2]
    if phase in ("silent stream", "stream"):
        await Stream(tokens=1000, gap=0.1, pause_after=3 if "silent" in phase else None, until=never)(call)
    elif phase == "stuck stream":
        await endless(call)
    elif phase == "whole":
        await Whole(takes=never)(call)
    else:
        await never_answers(call)


def payload(who: str, phase: str, model: str, size: int = 0) -> bytes:
    content = CHAT.payload(stream=phase != "whole", user=f"{who}/{phase}")
    return json.dumps({**content, "model": model}).encode().ljust(size)


class Far:
    """What is on the other side of one network: clients of ours, and an engine."""

    def __init__(self, net: Network, name: str) -> None:
        self.net, self.name = net, name
        self.engine: ScriptedEngine

    async def start_engine(self) -> None:
        self.engine = ScriptedEngine(script, name=self.name, models=(self.name,), slots=10)
        self.engine.listener.close()
        self.engine.listener = await self.net.inside(lambda: socket.create_server((self.net.far, 0)))
        self.engine.listener.setblocking(False)
        self.engine.url = f"http://{self.net.far}:{self.engine.listener.getsockname()[1]}"

    async def connect(self, gateway: Gateway) -> Any:
        port = next(url for url in gateway.service.listen if self.net.near in url).rpartition(":")[2]
        raw = await self.net.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        raw.setblocking(False)
        stream = trio.socket.from_stdlib_socket(raw)
        await stream.connect((self.net.near, int(port)))
        return trio.SocketStream(stream)

    async def ask(self, gateway: Gateway, protocol: str, phase: str) -> None:
        """Ask, and see what happens to the connection: nothing, from here."""
        stream = await self.connect(gateway)
        body = payload(f"{self.name} {protocol}", phase, "busy" if phase == "queue" else "near")
        try:
            if protocol == "http1":
                request = request_bytes(CHAT.path, body)
                await stream.send_all(request[:-10] if phase == "body" else request)
            else:
                await self.ask_over_http2(stream, phase, body)
            await trio.Event().wait()
        finally:
            await trio.aclose_forcefully(stream)

    async def ask_over_http2(self, stream: Any, phase: str, body: bytes) -> None:
        connection = Raw2(stream)
        fields = f.head(more=[(b"content-length", b"%d" % len(body))])
        await connection.send(f.PREFACE, f.settings(), f.headers(1, fields, end=False))
        await connection.send(f.data(1, body[:-10]))
        if phase != "body":
            await connection.send(f.data(1, body[-10:], end=True))
        if phase != "stuck stream":
            await connection.read()


@dataclass
class Local:
    """Clients on this side, who ask the engines on the other."""

    gateway: Gateway
    gone: trio.Event = field(default_factory=trio.Event)
    notes: Notes = field(default_factory=Notes)
    told: dict[str, Any] = field(default_factory=dict)
    """What each was told in the end: a status, or the words of an answer that broke off."""

    async def ask(self, engine: str, phase: str) -> None:
        url = next(url for url in self.gateway.service.listen if "127.0.0.1" in url)
        body = payload("local", phase, engine, 3_000_000 if phase == "new request" else 0)
        async with http1(url) as client:
            await client.send(request_bytes(CHAT.path, body))
            try:
                answer = await client.answer()
                told: Any = (answer.status, answer.json["error"]["code"])
            except Truncated as cut:
                told = (200, "engine_failed" if b'"engine_failed"' in cut.got else cut.got)
            assert self.gone.is_set(), (phase, told)
            self.told[f"{engine}, {phase}"] = told
            self.notes.changed()


@asynccontextmanager
async def everything() -> AsyncIterator[tuple[Gateway, ScriptedEngine, list[Far]]]:
    """Two networks with an engine each, and a gateway for all with two engines on this side."""
    async with AsyncExitStack() as stack:
        nets = [await stack.enter_async_context(network(number)) for number in range(2)]
        fars = [Far(net, name) for net, name in zip(nets, ["down", "silent"], strict=True)]
        for far in fars:
            await far.start_engine()
        near = ScriptedEngine(script, name="near", models=("near",), slots=100)
        busy = ScriptedEngine(never_answers, name="busy", models=("busy",), slots=1)
        engines = [near, busy, *[far.engine for far in fars]]
        server = {"listen": ["127.0.0.1:0", *[f"{far.net.near}:0" for far in fars]], "body_seconds": 120}
        serving = running_gateway(*engines, server=server, stream={"stall_seconds": 60}, seconds=100)
        gateway = await stack.enter_async_context(serving)
        occupant = await stack.enter_async_context(http1(gateway.url))
        await occupant.post(CHAT.path, {**CHAT.payload(stream=True), "model": "busy"})
        await busy.call()
        yield gateway, near, fars


@pytest.mark.slow
async def test_peers_that_vanish_are_found_in_every_phase() -> None:
    async with everything() as (gateway, near, fars), trio.open_nursery() as nursery:
        local = Local(gateway)
        for far in fars:
            for phase in CLIENT_PHASES:
                nursery.start_soon(far.ask, gateway, "http1", phase)
                nursery.start_soon(far.ask, gateway, "http2", phase)
            for phase in ENGINE_PHASES:
                nursery.start_soon(local.ask, far.name, phase)
        strangers = len(fars) * 2 * len(CLIENT_PHASES)
        await gateway.live(strangers + len(fars) * len(ENGINE_PHASES) + 1)
        await gateway.queued(2 * len(fars))
        await gateway.spools_full(2 * len(fars))
        assert gateway.records == []

        local.gone.set()
        await fars[0].net.link_goes_down()
        await fars[1].net.nobody_is_there()
        for far in fars:
            nursery.start_soon(local.ask, far.name, "new request")
        with trio.move_on_after(FOUND_SECONDS + ROUNDING_SECONDS):
            await gateway.recorded(strangers, outcome="client_gone")
            await local.notes.until(lambda: len(local.told) == len(fars) * (len(ENGINE_PHASES) + 1))
        assert len(gateway.matching(outcome="client_gone")) == strangers
        assert local.told == {
            f"{far.name}, {phase}": told for far in fars for phase, told in ENGINE_PHASES.items()
        } | {f"{far.name}, new request": (503, "no_engine") for far in fars}
        assert all(call.closed_at is not None for call in near.calls)
        nursery.cancel_scope.cancel()
