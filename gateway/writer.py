"""The writer: the client's side of one request.

It empties the spool, all it holds in one go, and tells how the answer ended. It may
be stuck for as long as the client likes; nothing of the engine's hangs on it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Protocol

import trio

from gateway.dialect import error_event
from gateway.errors import GatewayError
from gateway.events import SseTail
from gateway.request import FAREWELL_SECONDS, Request
from gateway.response import Response
from gateway.words import RawHeaders

_HEARTBEAT = b": heartbeat\n\n"

Send = Callable[[bytes], bytes | None]
"""Sends a piece without waiting. Returns what is left of it for ``send_rest``; None if it could not."""


class Writer(Protocol):
    """The way to one client."""

    async def begin(self, status: int, headers: RawHeaders) -> None:
        """Send the response's head."""

    async def send(self, data: bytes) -> None:
        """Send a piece of the response's body. Returns when it is on its way, not if the client has left."""

    def outlet(self) -> Send | None:
        """Return what sends pieces without waiting, once the head is sent, if there is such a way."""

    async def send_rest(self, rest: bytes) -> None:
        """Send what the outlet has left."""

    async def settled(self) -> None:
        """Wait until the client's connection holds nothing of what was sent: it counts as held till then."""

    async def finish(self) -> None:
        """End the response well. Without it, it ends as broken off."""

    def abort(self) -> None:
        """Cut the client off, a write in progress too."""


async def write(request: Request, client: Writer, response: Response, heartbeat_seconds: float) -> None:
    """Send the response, all the spool holds in one go, and its end: the writer.

    Writing can be cancelled at any moment: our server's connections don't shield it, and
    reset a connection whose write was cut in the middle. So the deadline that ``request.stop``
    sets gets the writer out also where the client takes nothing any more.
    """
    request.status, request.spool = response.status, response.spool
    if not isinstance(response.tail, SseTail):
        heartbeat_seconds = inf
    with request.writing:
        try:
            await _send(request, client, response, heartbeat_seconds)
        finally:
            response.spool.no_outlet()
    if request.writing.cancelled_caught:
        client.abort()


async def _send(request: Request, client: Writer, response: Response, heartbeat_seconds: float) -> None:
    spool = response.spool
    await client.begin(response.status, response.headers)
    if heartbeat_seconds < inf and not (spool.held or spool.ended):
        # The engine's silence has committed the response; this is the heartbeat it was done for.
        await client.send(_HEARTBEAT)
    # The reader's task sends what needs no waiting itself, past the spool: a token then costs one turn of a
    # task, not two. But heartbeats need the writer's clock, which the outlet would not set back.
    if heartbeat_seconds == inf:
        note_all = partial(_note_all, request, response)
        spool.let_out(client.outlet(), note_all, counted=response.length is not None)
    while True:
        data = await _next(client, response, heartbeat_seconds)
        if spool.rest:
            await client.send_rest(spool.take_rest())
        elif data:
            await client.send(data)
            spool.sent += len(data)
        else:
            break
        _note_all(request, response)
        await client.settled()
    if spool.failure is not None:
        request.failed(spool.failure)
        await _farewell(request, client, response, request.error or spool.failure)
        return
    await client.finish()
    request.answered()


def _note_all(request: Request, response: Response) -> None:
    if response.is_all():
        request.answered()


async def _next(client: Writer, response: Response, heartbeat_seconds: float) -> bytes:
    while heartbeat_seconds < inf:
        with trio.move_on_after(heartbeat_seconds):
            return await response.spool.get()
        # What has come in this very turn is in the spool: the boundary is behind it, not where the client is.
        if response.spool.empty and response.tail.at_boundary:
            await client.send(_HEARTBEAT)
    return await response.spool.get()


async def _farewell(request: Request, client: Writer, response: Response, failure: GatewayError) -> None:
    """Say in the stream why it ends, where that can be said; the end itself stays abnormal."""
    event = error_event(response.route, response.tail, failure) if response.route else None
    if event is not None:
        writing = request.writing
        writing.deadline = min(writing.deadline, trio.current_time() + FAREWELL_SECONDS)
        await client.send(event)
