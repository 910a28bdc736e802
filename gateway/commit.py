"""The point of no return of one request."""

from __future__ import annotations

import trio

from gateway.errors import GatewayError
from gateway.response import Response


class Commit:
    """The point of no return: the response goes to the client from here on.

    It is what :meth:`trio.Nursery.start` would be for: whoever has started the reader waits here for what
    it has to say first. A nursery of its own for that took a twentieth of a short request.
    """

    def __init__(self) -> None:
        self.done = False
        self.response: Response | None = None
        self._failure: GatewayError | None = None
        self._known = trio.Event()
        self._waiting: trio.CancelScope | None = None

    def __call__(self) -> None:
        if not self.done:
            self.done = True
            self.over()
            self._known.set()

    async def reached(self) -> Response:
        """Wait for the response that goes to the client. Raises what the reader has failed with before it."""
        await self._known.wait()
        if self._failure is not None:
            raise self._failure
        assert self.response is not None
        return self.response

    def failed(self, failure: GatewayError) -> None:
        """The reader has failed before anything has gone to the client."""
        self._failure = failure
        self._known.set()

    def over(self) -> None:
        """There is nothing to wait for any more."""
        if self._waiting is not None:
            self._waiting.cancel()

    def later(self, seconds: float, nursery: trio.Nursery) -> None:
        """Commit after ``seconds`` of the engine's silence, so that heartbeats can be sent."""
        self._waiting = trio.CancelScope()
        nursery.start_soon(self._wait, seconds, self._waiting)

    async def _wait(self, seconds: float, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(seconds)
            self()
