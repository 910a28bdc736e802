"""What requests took, at their end: counted in the metrics, and kept if there is a file for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, Metric

from gateway.dialect import ROUTES
from gateway.request import Request
from gateway.usagefile import Row
from gateway.usagestore import UsageStore


class Accounts:
    """Keeps the books of tokens. Without a ``store`` nothing is left of them but the metrics."""

    def __init__(self, registry: CollectorRegistry, store: UsageStore | None = None) -> None:
        self._store = store
        self._tokens = cache(
            Counter(
                "gateway_tokens",
                "Tokens of requests that went to an engine, by where the number comes from.",
                ("direction", "engine", "source"),
                registry=registry,
            ).labels
        )

    def collect(self) -> Iterable[Metric]:
        """Yield what is counted elsewhere (prometheus-client's collector protocol)."""
        yield CounterMetricFamily(
            "gateway_usage_rows_dropped",
            "Usage that could not be stored.",
            self._store.dropped if self._store is not None else 0,
        )

    def ended(self, request: Request, record: Mapping[str, Any], arrived: datetime) -> None:
        """Note the end of ``request``, whose access record is ``record``."""
        usage = request.usage
        if request.meter is not None:
            for direction, tokens, source in (
                ("prompt", usage.prompt, usage.prompt_source),
                ("completion", usage.completion, usage.completion_source),
            ):
                self._tokens(direction, request.engine or "", source).inc(tokens or 0)
        if self._store is None or request.route not in ROUTES:
            return
        self._store.add(
            Row(
                time=int(arrived.timestamp() * 1000),
                tenant=request.tenant,
                model=record["model"],
                engine=request.engine,
                route=request.route,
                outcome=str(record["outcome"]),
                status=record["status"],
                prompt_tokens=usage.prompt,
                completion_tokens=usage.completion,
                prompt_source=str(usage.prompt_source),
                completion_source=str(usage.completion_source),
                duration_ms=round(record["duration_ms"]) if record["duration_ms"] is not None else None,
                request_id=request.id,
            )
        )
