"""The server with small ASGI applications behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from gateway.server import Plane, bind
from gateway.server.words import STREAM_KEY

App = Callable[[Any, Any, Any], Awaitable[None]]


@asynccontextmanager
async def serving(app: App, **more: Any) -> AsyncIterator[tuple[Plane, str]]:
    """A plane, and where it listens."""
    listener = bind("127.0.0.1:0")
    plane = Plane(app, [listener], name="test", **{"most_connections": 100, **more})
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(plane.serve)
            yield plane, listener.name
            nursery.cancel_scope.cancel()
    finally:
        listener.socket.close()


async def begin(send: Any, *, status: int = 200, length: int | None = None) -> None:
    headers = [] if length is None else [(b"Content-Length", b"%d" % length)]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def say(send: Any, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def answer(send: Any, data: bytes = b"well") -> None:
    await begin(send, length=len(data))
    await say(send, data, more=False)


async def whole_body(receive: Any) -> bytes:
    body: bytes = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def well(scope: Any, receive: Any, send: Any) -> None:
    await whole_body(receive)
    await answer(send)


def stream_of(scope: Any) -> Any:
    return scope["state"][STREAM_KEY]


async def all_gone(plane: Plane, *, within: float = 2) -> None:
    """Until nobody is connected any more."""
    for _ in range(int(within / 0.02)):
        if not plane.connections:
            return
        await trio.sleep(0.02)
    raise AssertionError(f"{plane.connections} are still connected")
