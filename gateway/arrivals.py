"""What engines send, handed on in one task's turn, whoever it is for.

A task that waits for its own socket costs, for each read, a registration with the kernel, a
reschedule and a turn: as much as the read itself. Here one epoll knows all sockets whose
readers have nothing to do but to pass on what comes; one task is woken when any of them has
something, and does for each what its reader would. A reader is woken when there is something
to decide: its engine has ended or failed, or its spool is full.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import suppress

import outcome
import trio

_MOST_AT_ONCE = 64
"""Sockets served before others get their turn."""

_FEW = 16
"""After so few it is asked once more: others have come meanwhile, and a turn of Trio's loop costs as much as
serving one or two."""


class Arrivals:
    """Serves sockets for tasks that sleep in :meth:`until`. :meth:`run` has to be running."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._steps: dict[int, Callable[[], bool]] = {}
        self._tasks: dict[int, trio.lowlevel.Task] = {}

    async def until(self, descriptor: int, step: Callable[[], bool]) -> None:
        """Have ``step`` called whenever there is something to read, until it returns False.

        Raises what ``step`` raises. The socket must stay open meanwhile.
        """
        self._epoll.register(descriptor, select.EPOLLIN)
        self._steps[descriptor] = step
        self._tasks[descriptor] = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._forget(descriptor)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            while True:
                await trio.lowlevel.wait_readable(self._epoll.fileno())
                ready = self._epoll.poll(0, _MOST_AT_ONCE)
                self._serve(ready)
                if len(ready) <= _FEW:
                    self._serve(self._epoll.poll(0, _MOST_AT_ONCE))
        finally:
            self._epoll.close()

    def _serve(self, ready: list[tuple[int, int]]) -> None:
        for descriptor, _ in ready:
            step = self._steps.get(descriptor)
            if step is None:
                continue  # What came before it in this turn has cancelled its task.
            try:
                goes_on = step()
            except Exception as error:  # noqa: BLE001 - it is the sleeping task's, and raised there
                self._wake(descriptor, step, outcome.Error(error))
            else:
                if not goes_on:
                    self._wake(descriptor, step, outcome.Value(None))
        step = None  # An error's traceback leads to this frame, and would keep whoever was served last.

    def _wake(self, descriptor: int, step: Callable[[], bool], result: outcome.Outcome[None]) -> None:
        if self._steps.get(descriptor) is step:  # Else the step itself has cancelled its task.
            task = self._tasks[descriptor]
            self._forget(descriptor)
            trio.lowlevel.reschedule(task, result)

    def _forget(self, descriptor: int) -> None:
        del self._steps[descriptor], self._tasks[descriptor]
        with suppress(OSError):  # Of a socket that was closed in spite of all the kernel knows nothing more.
            self._epoll.unregister(descriptor)
