"""The state of the gateway as metrics, read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.engine import Engine
from gateway.gateway import Gateway
from gateway.reclaim import Reclaimer


class Gauges:
    """The state of the gateway, collected at the moment of asking."""

    def __init__(self, gateway: Gateway, more: Callable[[], Iterable[Metric]]) -> None:
        self._gateway = gateway
        self._more = more

    def collect(self) -> Iterable[Metric]:
        """Yield the metric families (prometheus-client's collector protocol)."""
        slots = GaugeMetricFamily("gateway_slots", "Slots by state.", labels=["engine", "state"])
        ghosts = GaugeMetricFamily(
            "gateway_ghosts", "Slots of work that goes on although nobody waits.", labels=["engine"]
        )
        acquired = CounterMetricFamily("gateway_slots_acquired", "Slots ever granted.", labels=["engine"])
        released = CounterMetricFamily("gateway_slots_released", "Slots ever given back.", labels=["engine"])
        for engine in self._gateway.known_engines:
            now = engine.ledger.statement()
            slots.add_metric([engine.name, "running"], now.running)
            slots.add_metric([engine.name, "reclaiming"], now.reclaiming)
            slots.add_metric([engine.name, "ghost"], now.ghosts)
            slots.add_metric([engine.name, "free"], now.free)
            ghosts.add_metric([engine.name], now.ghosts)
            acquired.add_metric([engine.name], now.acquired)
            released.add_metric([engine.name], now.released)
        yield from self._reclaims()
        yield from self._health()
        live = tuple(self._gateway.requests)
        spooled = sum(request.spool.held for request in live if request.spool is not None)
        yield from (slots, ghosts, acquired, released)
        yield from self._tenants()
        yield GaugeMetricFamily("gateway_queue_depth", "Requests waiting.", self._gateway.admission.waiting)
        yield GaugeMetricFamily(
            "gateway_connections", "Client connections of the API.", self._gateway.connections()
        )
        yield GaugeMetricFamily(
            "gateway_connections_most",
            "How many there may be.",
            self._gateway.config.server.max_connections,
        )
        yield GaugeMetricFamily("gateway_streams", "Live requests.", len(live))
        yield GaugeMetricFamily("gateway_spooled_bytes", "Bytes waiting for slower clients.", spooled)
        yield from self._more()

    def _tenants(self) -> Iterable[Metric]:
        slots = GaugeMetricFamily("gateway_tenant_slots", "Slots that a tenant holds.", labels=["tenant"])
        waiting = GaugeMetricFamily(
            "gateway_tenant_waiting", "Requests of a tenant that wait.", labels=["tenant", "priority"]
        )
        for tenant in self._gateway.tenants.all:
            slots.add_metric([tenant.name], tenant.share.held)
            waiting.add_metric([tenant.name, tenant.settings.priority], len(tenant.share.waiters))
        yield from (slots, waiting)

    def _reclaims(self) -> Iterable[Metric]:
        counters = {
            name: CounterMetricFamily(f"gateway_{name}", text, labels=["engine"])
            for name, text in {
                "ghost_seconds": "Seconds that slots were kept by work that went on for nobody.",
                "tokens_wasted": "Tokens generated for clients that had left, where the engine can tell.",
                "unchanged_requests": "Requests that went up as they were though the engine stops better"
                " when it streams: their answers can't be added up exactly.",
            }.items()
        }
        foreign = GaugeMetricFamily(
            "gateway_foreign_sequences", "Load on the engine that isn't this gateway's.", labels=["engine"]
        )
        answers = CounterMetricFamily(
            "gateway_engine_answers", "Answers of engines, by status.", labels=["engine", "class"]
        )
        for engine, reclaimer in self._of_known():
            for digit in (2, 4, 5):
                answers.add_metric([engine.name, f"{digit}xx"], engine.answers[digit])
            counters["ghost_seconds"].add_metric([engine.name], reclaimer.ghost_seconds)
            counters["tokens_wasted"].add_metric([engine.name], reclaimer.wasted)
            counters["unchanged_requests"].add_metric([engine.name], engine.as_they_are)
            foreign.add_metric([engine.name], reclaimer.foreign)
        yield from (*counters.values(), foreign, answers)

    def _of_known(self) -> Iterable[tuple[Engine, Reclaimer]]:
        return ((engine, self._gateway.reclaimers[engine]) for engine in self._gateway.known_engines)

    def _health(self) -> Iterable[Metric]:
        up = GaugeMetricFamily(
            "gateway_engine_up", "Whether an engine is given requests (1) or not (0).", labels=["engine"]
        )
        ejections = CounterMetricFamily(
            "gateway_engine_ejections", "How often an engine was ejected.", labels=["engine"]
        )
        now = trio.current_time()
        for engine in self._gateway.known_engines:
            up.add_metric([engine.name], engine.health.takes(now))
            ejections.add_metric([engine.name], engine.health.ejections)
        retries = self._gateway.retries
        yield from (up, ejections)
        yield CounterMetricFamily("gateway_retries", "Tries of another engine.", retries.retries)
        yield CounterMetricFamily(
            "gateway_retries_refused",
            "Tries of another engine that the budget didn't allow.",
            retries.refused,
        )
        reloads = self._gateway.reloads
        counted = CounterMetricFamily(
            "gateway_config_reloads", "Reloads of the configuration.", labels=["result"]
        )
        counted.add_metric(["done"], reloads.well)
        counted.add_metric(["failed"], reloads.badly)
        yield counted
        yield GaugeMetricFamily(
            "gateway_config_reload_failed",
            "Whether the last reload has failed and changed nothing.",
            reloads.last_failed,
        )
