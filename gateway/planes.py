"""The API and the control plane of one gateway: opened, changed by a reload, left to a successor."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
import trio

from gateway import logs
from gateway.app import DataPlane
from gateway.config import Config
from gateway.control import control_plane
from gateway.dashboard import Board
from gateway.gateway import Gateway
from gateway.guard import Guard
from gateway.handover import Door, Handover, Predecessor
from gateway.reload import Reloader
from gateway.resources import keep_private, make_tls, read_authorities
from gateway.server import Listener, Plane, why_ordinary
from gateway.telemetry import Telemetry

log = structlog.get_logger("gateway.service")

ORDINARY_WAY = "HTTP/1.1 bodies take Hypercorn's ordinary way, which costs more"

_ADMIN_CONNECTIONS = 256

_SETTLE_SECONDS = 0.1
"""How long connections that were accepted in the last moment may take to be known."""


class Planes:
    """The API and the control plane, on their listeners."""

    def __init__(
        self, gateway: Gateway, telemetry: Telemetry, listen: list[Listener], admin: Listener
    ) -> None:
        self._gateway, self._telemetry = gateway, telemetry
        self._listen, self._admin = listen, admin
        self._app = DataPlane(gateway)
        self._board = Board(gateway, telemetry)
        self.data: Plane
        self.control: Plane

    async def open(self, nursery: trio.Nursery, reloader: Reloader, tls: ssl.SSLContext | None) -> None:
        """Begin to accept."""
        gateway, admin, config = self._gateway, self._admin, self._gateway.config
        nursery.start_soon(self._board.run)
        guard = Guard(lambda: gateway.config.server.admin_token or "", by_name=not admin.is_unix)
        pages = control_plane(gateway, self._telemetry, reloader, guard=guard, board=self._board)
        self.data = _plane(self._app, self._listen, "data", config, tls)
        self.control = _plane(pages, [admin], "control", config)
        gateway.connections = lambda: self.data.connections
        if (reason := why_ordinary()) is not None:
            log.warning(ORDINARY_WAY, reason=reason)
        await nursery.start(self.data.serve)
        await nursery.start(self.control.serve)

    def prepare(self, new: Config) -> Callable[[], None]:
        """Read what a new configuration names; return what tells those of it who don't look each time."""
        keep_private(new, self._admin)
        tls = make_tls(new)
        authorities = read_authorities(new)

        def take_into_use() -> None:
            self.data.tls = tls
            for engine in self._gateway.engines:
                if engine.tls is not None and engine.name in authorities:
                    engine.tls.load_verify_locations(cadata=authorities[engine.name])
            logs.apply(new.log)
            self._app.budget.resize(new.server.bodies_bytes)
            self.data.most_connections = new.server.max_connections

        return take_into_use

    def handover(self, config: Config, door: Door, leave: Callable[[], None]) -> Handover:
        """Make the way out, for when another process takes over."""
        addresses = (*config.server.listen, config.server.admin)
        listeners = (*self._listen, self._admin)

        def leave_at_once() -> None:
            self._gateway.leaving = True
            self.data.leave()
            self.control.leave()
            leave()

        return Handover(
            self._gateway,
            door,
            [(name, each.socket) for name, each in zip(addresses, listeners, strict=True)],
            leave=leave_at_once,
            connected=self._gateway.connections,
        )

    async def leave(self, hurried: Callable[[], Awaitable[None]], before: Predecessor | None) -> None:
        """Another process serves from now on: have those who are connected end, in their own time.

        ``hurried`` returns when they have no more time. The process before us has to have ended, too:
        the new one learns of it through us.
        """
        gateway, data = self._gateway, self.data
        seconds, live = gateway.config.server.drain_seconds, len(gateway.requests)
        log.info("handed over", live_requests=live, connections=data.connections, at_most_seconds=seconds)
        self._board.close()
        async with trio.open_nursery() as nursery:

            async def until_hurried() -> None:
                await hurried()
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_hurried)
            nursery.start_soon(self._end_busy_ones, seconds)
            with trio.move_on_after(seconds):
                await trio.sleep(_SETTLE_SECONDS)
                await data.no_connection_left()
                await gateway.requests.none_left()
                if before is not None:
                    await before.ended.wait()
            nursery.cancel_scope.cancel()

    async def _end_busy_ones(self, seconds: float) -> None:
        """Have those HTTP/2 connections end, too, that always have a stream open."""
        await trio.sleep(seconds / 4)
        self.data.hold()
        await trio.sleep(seconds / 2)
        self.data.go_away()


def _plane(
    app: Any, listeners: list[Listener], name: str, config: Config, tls: ssl.SSLContext | None = None
) -> Plane:
    most = config.server.max_connections if name == "data" else _ADMIN_CONNECTIONS
    return Plane(
        app,
        listeners,
        name=name,
        tls=tls,
        most_connections=most,
        stall_seconds=config.stream.stall_seconds,
    )
