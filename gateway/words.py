"""The words everything else speaks in: phases and outcomes of a request.

They appear in access records, metrics and the control plane, so a change here
is a change of the product's contract.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

RawHeaders = list[tuple[bytes, bytes]]
"""Header fields as they travel: names in any case, repeated ones kept, in order."""


class Phase(StrEnum):
    """Where a live request is."""

    RECEIVING = "receiving"
    """The request's body is still arriving."""
    QUEUED = "queued"
    """Waiting for a slot."""
    CONNECTING = "connecting"
    """It has a slot; the connection to the engine is being made."""
    PREFILL = "prefill"
    """The engine has been called and has not yet sent a body byte."""
    STREAMING = "streaming"
    """Body bytes are flowing."""
    DRAINING = "draining"
    """The engine has ended; the client is still reading."""
    RECLAIMING = "reclaiming"
    """Our side has ended; the engine may not have."""


class Outcome(StrEnum):
    """How a request ended. Every request has exactly one."""

    COMPLETED = "completed"
    CLIENT_GONE = "client_gone"
    CLIENT_STALLED = "client_stalled"
    CANCELLED = "cancelled"
    DRAINED = "drained"
    ENGINE_TIMEOUT = "engine_timeout"
    ENGINE_FAILED = "engine_failed"
    SHED = "shed"
    REJECTED = "rejected"


class ReclaimedBy(StrEnum):
    """Why the slot of a request that was cut short was free again."""

    ENGINE_IDLE = "engine_idle"
    """The engine was seen to have stopped, or to have gone."""
    BOUND = "bound"
    """``reclaim_seconds`` were over, and the engine hadn't said that it was still at it."""
    NONE = "none"
    """Nobody waited for it (``reclaim = "off"``), or it isn't free: a ghost has it."""


_PRECEDENCE = tuple(Outcome)


def first_outcome(facts: Iterable[Outcome]) -> Outcome:
    """Return the outcome that decides when several things ended a request at once.

    The order is that of :class:`Outcome`: a reader who left is never the engine's
    fault, and an answer that was complete is never an abort.
    """
    return min(facts, key=_PRECEDENCE.index)


CLIENT_CLOSED_REQUEST = 499
"""Status in the access record of a client that left (or stalled) before its answer was
complete: nginx's number. Nobody saw it."""
