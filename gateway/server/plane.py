"""A plane: listeners, the application behind them, and the connections they brought."""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import structlog
import trio
from hypercorn.utils import wrap_app

from gateway.server import peer
from gateway.server.clocks import hypercorn_config
from gateway.server.connection import Connection
from gateway.server.hangups import Hangups
from gateway.server.listeners import Listener
from gateway.server.seam import why_ordinary
from gateway.server.shared import Context, Shared

log = structlog.get_logger("gateway.server")

_SUMMARY_SECONDS = 60.0
_CLOSE_SECONDS = 0.1

_LOOK_SECONDS = 0.5
"""How often stalled and vanished clients are looked for."""

_LOOKS_A_TURN = 64
"""Connections looked at before others get their turn."""


class Plane:
    """Serves one ASGI application on its listeners until it is cancelled.

    ``most_connections`` bounds the open connections; more are closed as they come.
    ``stall_seconds`` is how long a client may take nothing of what there is; 0 is off.
    """

    def __init__(
        self,
        app: Any,
        listeners: Sequence[Listener],
        *,
        name: str,
        tls: ssl.SSLContext | None = None,
        most_connections: int,
        stall_seconds: float = 0.0,
    ) -> None:
        self.name = name
        self._connections: set[Connection] = set()
        self._none_left = trio.Event()
        self._context = Context(None)
        self._hangups = Hangups()
        self._faults = _Faults(name)
        self._shared = Shared(
            app=wrap_app(app, 0, "asgi"),
            config=hypercorn_config(),
            context=self._context,
            hangups=self._hangups,
            fault=self._faults.exception,
            stall_seconds=stall_seconds,
            short_way=why_ordinary() is None,
        )
        self._listeners = listeners
        self.tls = tls
        """What handshakes from now on are made with."""
        self.most_connections = most_connections
        self._released = trio.Event()
        self._left = trio.Event()

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept and serve. Calls ``started`` once connections are accepted."""
        async with trio.open_nursery() as connections, trio.open_nursery() as accepting:
            for listener in self._listeners:
                peer.prepare(listener.socket, stall_seconds=self._shared.stall_seconds)
            connections.start_soon(self._hangups.run)
            connections.start_soon(self._look_after_all)
            for listener in self._listeners:
                accepting.start_soon(self._accept, listener, connections)
            task_status.started()

    def drain(self) -> None:
        """End HTTP/2 connections as they become idle, and leave inherited sockets to our successor.

        On sockets of our own it goes on accepting, so that whoever comes is told to come back.
        """
        self._context.draining = True
        self._released.set()

    def leave(self) -> None:
        """Another process accepts from now on: serve whom we have, and tell each that his connection ends."""
        self._left.set()
        self._context.leaving = True
        self.drain()

    def hold(self) -> None:
        """Begin no stream of HTTP/2 beside others any more: each connection becomes idle, and ends."""
        self._context.holding = True

    def go_away(self) -> None:
        """Have HTTP/2 connections that still aren't idle send nothing new."""
        for connection in self._connections:
            connection.go_away()

    async def no_connection_left(self) -> None:
        """Wait until no connection is open."""
        while self._connections:
            self._none_left = trio.Event()
            await self._none_left.wait()

    async def close(self) -> None:
        """Close the idle connections, and those that end within a moment."""
        await self._context.terminated.set()
        for connection in tuple(self._connections):
            connection.end_if_idle()
        self._none_left = trio.Event()
        if not self.connections:
            return
        with trio.move_on_after(_CLOSE_SECONDS):
            await self._none_left.wait()

    async def _accept(self, listener: Listener, connections: trio.Nursery) -> None:
        def fault(error: OSError) -> None:
            self._faults.note("can't accept", str(error))

        async with trio.open_nursery() as nursery:
            accept = partial(listener.accept, self._connected, connections, tls=lambda: self.tls, fault=fault)
            nursery.start_soon(partial(accept, stall_seconds=self._shared.stall_seconds))
            await (self._released if listener.inherited else self._left).wait()
            nursery.cancel_scope.cancel()

    async def _connected(self, stream: Any) -> None:
        if self.connections >= self.most_connections:
            self._faults.note("connection refused", f"{self.connections} connections are open")
            await trio.aclose_forcefully(stream)
            return
        connection = Connection(self._shared, stream)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.remove(connection)
            if not self._connections:
                self._none_left.set()

    async def _look_after_all(self) -> None:
        while True:
            await trio.sleep(_LOOK_SECONDS)
            now = trio.current_time()
            for number, connection in enumerate(tuple(self._connections), 1):
                if number % _LOOKS_A_TURN == 0:
                    await trio.lowlevel.checkpoint()
                try:
                    connection.look_after(now)
                except Exception as error:  # noqa: BLE001 - one connection's fault must not end the others
                    self._faults.exception(error)
                    connection.abort()


class _Faults:
    """Faults of connections in the log: the first of a kind at once, the rest as one line a minute."""

    def __init__(self, plane: str) -> None:
        self._plane = plane
        self._kept_back: Counter[str] = Counter()
        self._since: dict[str, float] = {}

    def exception(self, error: BaseException) -> None:
        leaf = error
        while isinstance(leaf, BaseExceptionGroup):
            leaf = leaf.exceptions[0]
        self.note(f"connection ended by {type(leaf).__name__}", str(leaf)[:200])

    def note(self, kind: str, detail: str) -> None:
        now = trio.current_time()
        if now - self._since.get(kind, -_SUMMARY_SECONDS) < _SUMMARY_SECONDS:
            self._kept_back[kind] += 1
            return
        self._since[kind] = now
        log.warning(kind, plane=self._plane, detail=detail, not_logged_before=self._kept_back.pop(kind, 0))
