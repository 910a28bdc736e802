"""Tickets as most tests need them: for any of some engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.admission import Admission
from gateway.engine import Engine
from gateway.tickets import Stage, Ticket


def ticket_for(admission: Admission, engines: Sequence[Engine], cost: int = 1, **more: Any) -> Ticket:
    return admission.ticket([Stage(tuple(engines))], cost, **more)
