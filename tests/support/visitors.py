"""Clients that come, ask, and leave: one interface over the ways a client can leave.

`h2_reset` is one stream of a connection that stays; its connection must go on serving afterwards.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from tests.support.http1 import Head, Http1, http1, request_bytes
from tests.support.http2 import Stream, http2
from tests.support.routes import Body

WAYS = ["fin", "rst", "half_close", "h2_reset", "h2_fin"]


@dataclass
class Visitor:
    """One request under way, and how its client will leave."""

    exchange: Http1 | Stream
    way: str

    async def head(self) -> Head:
        return await self.exchange.head()

    async def until(self, mark: bytes, count: int = 1) -> bytes:
        return await self.exchange.until(mark, count)

    async def rest(self) -> bytes:
        return await self.exchange.rest()

    async def leave(self) -> float:
        """Leave; returns when."""
        if isinstance(self.exchange, Stream):
            stream = self.exchange
            leave = stream.reset if self.way == "h2_reset" else stream.connection.close
        else:
            client = self.exchange
            leave = {"fin": client.close, "rst": client.reset, "half_close": client.half_close}[self.way]
        now = trio.current_time()
        await leave()
        return now

    async def still_served(self) -> None:
        """What stays of the connection is good for more requests."""
        if self.way == "h2_reset":
            assert isinstance(self.exchange, Stream)
            answer = await self.exchange.connection.ask("/v1/models")
            assert answer.status == 200


@asynccontextmanager
async def visit(way: str, url: str, path: str, payload: Body, *, withhold: int = 0) -> AsyncIterator[Visitor]:
    """POST the payload, but for its last `withhold` bytes."""
    body = json.dumps(payload).encode()
    if way.startswith("h2"):
        async with http2(url) as connection:
            if withhold:
                fields = {"content-type": "application/json", "content-length": str(len(body))}
                stream = await connection.request("POST", path, fields, end=False)
                await stream.send_data(body[:-withhold])
            else:
                stream = await connection.post(path, body)
            yield Visitor(stream, way)
    else:
        async with http1(url) as client:
            request = request_bytes(path, body)
            await client.send(request[: len(request) - withhold])
            yield Visitor(client, way)
