"""The point of no return of one request."""

from __future__ import annotations

import trio

from gateway.response import Response


class Commit:
    """The point of no return: the response goes to the client from here on."""

    def __init__(self, task_status: trio.TaskStatus[Response]) -> None:
        self.done = False
        self.response: Response | None = None
        self._waiting: trio.CancelScope | None = None
        self._task_status = task_status

    def __call__(self) -> None:
        if not self.done:
            assert self.response is not None
            self.done = True
            self.over()
            self._task_status.started(self.response)

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
