"""What the connections of a plane have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext

from gateway.server.hangups import Hangups


class Context(WorkerContext):
    """What all connections of a plane know of its end."""

    draining = False

    leaving = False
    """Another process accepts: who was told that his connection stays may send one more request on it."""

    holding = False
    """No stream is begun beside others any more: see :mod:`gateway.server.parting`."""

    @property
    def ending(self) -> bool:
        """Whether an idle connection is to be closed."""
        return self.draining or bool(self.terminated.is_set())


@dataclass(frozen=True, slots=True)
class Shared:
    """What the connections of a plane share.

    ``stall_seconds`` of 0 is off; ``short_way``: bodies may go past Hypercorn's layers.
    """

    app: Any
    config: Config
    context: Context
    hangups: Hangups
    fault: Callable[[BaseException], None]
    stall_seconds: float
    short_way: bool
