"""The point of no return of one request."""

from __future__ import annotations

import trio

from gateway.response import Response


class Commit:
    """The point of no return: the response goes to the client from here on."""

    def __init__(self, task_status: trio.TaskStatus[Response]) -> None:
        self.done = False
        self.response: Response | None = None
        self.scope = trio.CancelScope()
        self._task_status = task_status

    def __call__(self) -> None:
        if not self.done:
            assert self.response is not None
            self.done = True
            self.scope.cancel()
            self._task_status.started(self.response)

    async def later(self, seconds: float) -> None:
        """Commit after ``seconds`` of the engine's silence, so that heartbeats can be sent."""
        with self.scope:
            await trio.sleep(seconds)
            self()
