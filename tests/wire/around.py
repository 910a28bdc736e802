"""What stands around a hostile connection and must not notice: streams of others, and the log."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import structlog

from gateway.planes import ORDINARY_WAY
from gateway.server import why_ordinary
from tests.conftest import Tls
from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import Http1, http1
from tests.support.http2 import Stream as Stream2
from tests.support.http2 import http2
from tests.support.routes import CHAT
from tests.support.scripted import Call, Notes, ScriptedEngine
from tests.support.scripts import honest

TRANSPORTS = ["plain", "tls"]

BODY = json.dumps(CHAT.payload(stream=True)).encode()
"""The body of a request that is answered well."""


def whole(tokens: int = 5) -> bytes:
    """The answer to it."""
    assert CHAT.parts is not None
    return CHAT.parts.all(tokens)


@contextmanager
def quiet_log(*allowed: str) -> Iterator[list[Any]]:
    """Nothing is logged inside but records, and each `allowed` kind once at most."""
    with structlog.testing.capture_logs() as lines:
        yield lines
    told = [line["event"] for line in lines if line["log_level"] not in ("info", "debug")]
    if why_ordinary() is not None:
        allowed = (*allowed, ORDINARY_WAY)
    assert all(told.count(each) <= 1 for each in allowed), lines
    assert set(told) <= set(allowed), lines


class Scene:
    """A gateway with bystanders whose answers come a token at a time, when the test says so."""

    def __init__(self, gateway: Gateway, engine: ScriptedEngine, tls: Tls | None) -> None:
        self.gateway, self.engine, self.tls = gateway, engine, tls
        self.granted = 0
        self.client: Http1
        self.stream: Stream2
        self._over = False
        self._notes = Notes()

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def trusted(self) -> Any:
        return self.tls.trusted if self.tls else None

    async def script(self, call: Call) -> None:
        """The engine's part: strangers get all at once."""
        assert CHAT.parts is not None
        if call.json.get("user") != "bystander":
            await honest(call)
            return
        await call.head(200, [("Content-Type", CHAT.media)])
        await call.send(b"".join(CHAT.parts.opening))
        while call.tokens < self.granted or not self._over:
            await self._notes.until(lambda: self._over or call.tokens < self.granted)
            if call.tokens < self.granted:
                await call.send(CHAT.parts.token(call.tokens))
                call.token()
        call.done()
        await call.send(b"".join(CHAT.parts.closing))
        await call.end()

    async def still_there(self) -> None:
        """Each bystander gets its next token."""
        mark = b' tk%d"' % self.granted
        self.granted += 1
        self._notes.changed()
        await self.client.until(mark)
        await self.stream.until(mark)

    @asynccontextmanager
    async def bystanders(self) -> AsyncIterator[None]:
        """One over each protocol: under way before, whole afterwards, and served again."""
        async with (
            http1(self.url, tls=self.trusted) as self.client,
            http2(self.url, tls=self.trusted) as connection,
        ):
            await self.client.post(CHAT.path, CHAT.payload(stream=True, user="bystander"))
            self.stream = await connection.post(CHAT.path, CHAT.payload(stream=True, user="bystander"))
            await self.client.head()
            await self.still_there()
            yield
            await self.still_there()
            self._over = True
            self._notes.changed()
            assert await self.client.rest() == whole(self.granted)
            assert await self.stream.rest() == whole(self.granted)
            assert (await self.client.ask("/v1/models")).status == 200
            assert (await connection.ask("/v1/models")).status == 200

    def strangers(self) -> list[Call]:
        """The calls that weren't the bystanders'."""
        return [call for call in self.engine.calls if call.json.get("user") != "bystander"]


@asynccontextmanager
async def scene(
    tls: Tls | None = None, *, slots: int = 8, allowed: tuple[str, ...] = (), **more: Any
) -> AsyncIterator[Scene]:
    """A gateway, bystanders around the block, and a quiet log."""
    engine = ScriptedEngine(honest, slots=slots)
    server = {**more.pop("server", {}), **({"tls": tls.section} if tls else {})}
    with quiet_log(*allowed):
        async with running_gateway(engine, server=server, **more) as gateway:
            here = Scene(gateway, engine, tls)
            engine.script = here.script
            async with here.bystanders():
                yield here
