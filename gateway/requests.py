"""The list of all live requests."""

from __future__ import annotations

from collections.abc import Iterator

import trio

from gateway.request import Request


class Requests:
    """All live requests."""

    def __init__(self) -> None:
        self._live: dict[str, Request] = {}
        self._idle = trio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._live.values()))

    def get(self, request_id: str) -> Request | None:
        """Return the live request with this id, or None."""
        return self._live.get(request_id)

    def add(self, request: Request) -> None:
        """Take a request in."""
        if not self._live:
            self._idle = trio.Event()
        self._live[request.id] = request

    def remove(self, request: Request) -> None:
        """Let a request go."""
        del self._live[request.id]
        if not self._live:
            self._idle.set()

    async def none_left(self) -> None:
        """Wait until there is no live request."""
        while self._live:
            await self._idle.wait()
