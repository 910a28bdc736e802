"""Engines as they are deployed: behind TLS with a private CA, with a key, under a path, on a unix socket."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.conftest import Tls
from tests.support.gateway import running_gateway
from tests.support.http1 import http1
from tests.support.routes import CHAT
from tests.support.scripted import Call, Script, ScriptedEngine
from tests.support.scripts import Stream, honest

KEY = "sk-engine"


class Behind(ScriptedEngine):
    """An engine of which everything lies under a path."""

    prefix = ""

    def admit(self, call: Call) -> Script:
        self._unprefix(call)
        return super().admit(call)

    async def probe(self, call: Call) -> None:
        self._unprefix(call)
        await super().probe(call)

    def _unprefix(self, call: Call) -> None:
        assert call.target.startswith(self.prefix + "/"), call
        call.target = call.target.removeprefix(self.prefix)


async def pump(source: trio.abc.Stream, sink: trio.abc.Stream, both: trio.CancelScope) -> None:
    try:
        while data := await source.receive_some(65536):
            await sink.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    both.cancel()  # Whoever closes, closes for both.


@asynccontextmanager
async def tls_before(engine: ScriptedEngine, tls: Tls) -> AsyncIterator[str]:
    """What ends TLS before an engine; its URL."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.certificate, tls.key)

    async def relay(client: trio.abc.Stream) -> None:
        there = await trio.open_tcp_stream("127.0.0.1", engine.port)
        async with client, there, trio.open_nursery() as nursery:
            nursery.start_soon(pump, client, there, nursery.cancel_scope)
            nursery.start_soon(pump, there, client, nursery.cancel_scope)

    async with trio.open_nursery() as nursery:
        serve: Any = partial(trio.serve_ssl_over_tcp, relay, 0, context, host="127.0.0.1")
        (listener,) = await nursery.start(partial(serve, https_compatible=True))
        yield f"https://127.0.0.1:{listener.transport_listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("way", ["https", "unix"])
async def test_everything_goes_the_same_way(way: str, tls: Tls, tmp_path: Path) -> None:
    """Answers, leavers, the reclaim's questions, probes and the list of models."""
    engine = Behind(honest, kind="vllm", unix=str(tmp_path / "engine.sock") if way == "unix" else None)
    async with AsyncExitStack() as before:
        entry: dict[str, Any] = {"api_key": KEY, "models": ["auto"]}
        if way == "https":
            engine.prefix = "/llm/gpu0"
            entry["url"] = await before.enter_async_context(tls_before(engine, tls)) + engine.prefix
            entry["ca"] = str(tls.certificate.parent / "authority.pem")
        async with running_gateway(engine, engine=entry, health={"probe_seconds": 0.05}) as gateway:
            async with http1(gateway.url) as client:
                answer = await client.ask(CHAT.path, CHAT.payload(stream=True))
                assert CHAT.parts is not None
                assert (answer.status, answer.body) == (200, CHAT.parts.all(5))
            engine.script = Stream(pause_after=1, until=trio.Event())
            async with http1(gateway.url) as client:
                await client.post(CHAT.path, CHAT.payload(stream=True))
                await client.head()
            await engine.calls[1].closed()
            await gateway.record(outcome="client_gone", reclaimed_by="engine_idle")
            pages = {"/health", "/metrics", "/v1/models"}
            await engine.until(lambda: pages <= {call.path for call in engine.asked})
    for call in (*engine.calls, *engine.asked):
        assert call.header("Authorization") == f"Bearer {KEY}", call
