"""What keeps open pages of the dashboard up to date.

Each second's state is put together once, however many pages are open, and not at all when none is. A page
that reads slower than that skips what it missed: a state is whole in itself. So nothing is buffered, and the
relay's spool has nothing to do here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import trio

import gateway as package
from gateway.enginesview import view_of
from gateway.gateway import Gateway
from gateway.history import Sample
from gateway.marks import Marks
from gateway.telemetry import Telemetry

MOST_PAGES = 32
"""Pages that are open at once; each costs its own sending."""

COLUMNS = ("id", "tenant", "model", "engine", "phase", "age_seconds", "events", "bytes", "spooled_bytes")
"""Of each live request, in this order; the rest is in ``/admin/requests``."""


class Board:
    """Tells open pages the state of a gateway. :meth:`run` has to be running."""

    def __init__(self, gateway: Gateway, telemetry: Telemetry) -> None:
        self._gateway = gateway
        self._telemetry = telemetry
        self._history = telemetry.history
        self._started = trio.current_time()
        self._next = trio.Event()
        self._state = b""
        self._closed = False
        self.pages = 0
        """Pages that are open."""

    async def run(self) -> None:
        """Take samples, and tell the pages, until cancelled."""
        await self._history.run(self._gateway, self._looked)

    def close(self) -> None:
        """End what pages are sent: they ask again, and find another process."""
        self._closed = True

    def _looked(self) -> None:
        if self.pages:
            self._state = self.event("state", self.state())
        event, self._next = self._next, trio.Event()
        event.set()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield what one page is sent: at once what there is, then the state each second."""
        self.pages += 1
        try:
            yield self.event("history", [self._point(sample) for sample in self._history.samples])
            yield self.event("state", self.state())
            while not self._closed:
                await self._next.wait()
                yield self._state
        finally:
            self.pages -= 1

    @staticmethod
    def event(name: str, data: Any) -> bytes:
        """Write a server-sent event (HTML Standard, 9.2.6)."""
        return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))

    def _point(self, sample: Sample) -> list[Any]:
        second = round(sample.at - self._started)
        return [second, round(sample.tokens, 1), sample.waiting, sample.running, sample.ended]

    def state(self) -> dict[str, Any]:
        """Put the present together, in one step: its numbers are of one instant."""
        gateway, history, now = self._gateway, self._history, trio.current_time()
        samples = history.samples
        return {
            "version": package.__version__,
            "uptime_seconds": round(now - self._started),
            "draining": gateway.draining,
            "login": gateway.config.server.admin_token is not None,
            "engines": {engine.name: view_of(engine) for engine in gateway.known_engines},
            "queue": gateway.admission.view(),
            "outcomes": history.outcomes,
            "tokens": history.tokens,
            "saved": {
                name: {"seconds": round(each.seconds, 3), "tokens": round(each.unmade)}
                for name, each in history.savings.items()
            },
            "ttft": self._telemetry.spans("ttft"),
            "teardown": self._telemetry.spans("teardown"),
            "columns": COLUMNS,
            "requests": [[view[column] for column in COLUMNS] for view in map(Marks.view, gateway.requests)],
            "sample": self._point(samples[-1]) if samples else None,
        }
