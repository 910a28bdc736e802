"""The engines of a running gateway, each with the tasks that look after it.

An engine has a nursery of its own, for as long as it is configured and until the last of its slots is
free: one that has been removed ends its streams and its reclaims, and only then is it let go. One
that comes back meanwhile is the same engine, with the same books.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
import trio

from gateway import config
from gateway.engine import Engine
from gateway.gateway import Gateway
from gateway.probes import Probes

log = structlog.get_logger("gateway.fleet")

_CLOSE_SECONDS = 1.0


class Fleet:
    """Starts and ends the engines' tasks, in ``nursery``."""

    def __init__(self, gateway: Gateway, nursery: trio.Nursery) -> None:
        self._gateway = gateway
        self._nursery = nursery
        self._probes: dict[Engine, Probes] = {}
        self._scopes: dict[Engine, trio.CancelScope] = {}
        self._leaving: dict[Engine, trio.CancelScope] = {}

    def look_after(self, engine: Engine) -> None:
        """Begin to look after an engine; nothing happens if that is so already."""
        if engine not in self._scopes:
            scope = self._scopes[engine] = trio.CancelScope()
            self._nursery.start_soon(self._run, engine, scope)

    async def probe(self, engines: list[Engine]) -> None:
        """Have engines looked at once, before they are given requests: are they there, what have they?"""
        async with trio.open_nursery() as nursery:
            for engine in engines:
                nursery.start_soon(self._probe, engine)

    async def learn(self, engine: Engine) -> None:
        """Have an engine that is in use asked for its models, which are to count from now on.

        If it doesn't say, those that were configured count until it does.
        """
        if not engine.learnt:
            engine.learnt = tuple(engine.settings.models if not engine.serves_any else ())
        await self._probes_of(engine).learn()

    def retire(self, engine: Engine) -> None:
        """Let an engine go once it is free; it is given nothing any more."""
        engine.retired = True
        self._gateway.retiring.append(engine)
        self._leaving[engine] = trio.CancelScope()
        self._nursery.start_soon(self._until_free, engine)

    def take_back(self, engine: Engine) -> None:
        """An engine that was on its way out is configured again."""
        if engine.retired:
            engine.retired = False
            self._gateway.retiring.remove(engine)
            self._leaving.pop(engine).cancel()

    def find(self, settings: config.Engine) -> Engine | None:
        """Return the engine with these settings that is looked after already, in use or leaving."""
        for engine in (*self._gateway.engines, *self._gateway.retiring):
            if _identity(engine.settings) == _identity(settings):
                return engine
        return None

    def settings_changed(self, engine: Engine) -> None:
        """An engine has other settings."""
        if engine in self._probes:
            self._probes[engine].settings_changed()

    async def forget(self, engine: Engine) -> None:
        """Let an engine go that was probed and is not to be used after all."""
        if engine not in self._scopes:
            self._probes.pop(engine, None)
            await close(engine)

    def _probes_of(self, engine: Engine) -> Probes:
        if engine not in self._probes:
            gateway = self._gateway
            self._probes[engine] = Probes(
                engine, gateway.requests, wake=gateway.health_changed, learnt=gateway.learnt
            )
        return self._probes[engine]

    async def _probe(self, engine: Engine) -> None:
        probes = self._probes_of(engine)
        if engine.health.settings.probe_seconds:
            await probes.probe()
        if engine.learns:
            await probes.learn()

    async def _run(self, engine: Engine, scope: trio.CancelScope) -> None:
        probes = self._probes_of(engine)
        with scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._gateway.reclaimers[engine].run)
                nursery.start_soon(probes.run)

    async def _until_free(self, engine: Engine) -> None:
        with self._leaving[engine] as scope:
            await engine.ledger.all_free()
            if scope.cancel_called:
                return  # It was taken back as it became free.
            # From here to the end of its tasks nothing waits: it can't be taken back half gone.
            log.info("engine is gone", engine=engine.name)
            self._gateway.retiring.remove(engine)
            del self._leaving[engine], self._gateway.reclaimers[engine]
            self._scopes.pop(engine).cancel()
            self._probes.pop(engine, None)
            await close(engine)


async def close(engine: Engine) -> None:
    """Close an engine's idle connections."""
    with trio.move_on_after(_CLOSE_SECONDS, shield=True):
        await engine.transport.aclose()


def _identity(settings: config.Engine) -> tuple[str, str, str, str | None]:
    """What makes an engine another one when it changes: everything else is set anew while it runs."""
    return settings.name, settings.kind, settings.url, settings.ca


Make = Callable[[config.Config, int], Engine]
"""Makes the engine with that number of a configuration. Raises ConfigError."""
