"""One engine, as the control plane describes it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import trio

from gateway.engine import Engine


def view_of(engine: Engine) -> dict[str, Any]:
    """Describe an engine: its state, its books, and what it says itself."""
    now, health, load = trio.current_time(), engine.health, engine.load
    return {
        "kind": engine.settings.kind,
        "state": health.state(now),
        "drained": health.drained,
        "retired": engine.retired,
        "reason": health.reason or None,
        "ejections": health.ejections,
        "backoff_seconds": round(max(0.0, health.until - now), 3) if health.ejected else None,
        "resting_seconds": round(max(0.0, health.resting_until - now), 3),
        "models": ["*"] if engine.serves_any else list(engine.models),
        "says": None if load is None else {"running": load.running, "waiting": load.waiting},
        "slots": asdict(engine.ledger.statement()),
    }
