"""Changing the configuration of a running gateway: read, check, probe, then switch in one step.

What can't be done leaves everything as it was. Running streams are never touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import trio

from gateway.config import Change, Config, ConfigError, Fault, changes
from gateway.engine import Engine
from gateway.fleet import Fleet, Make
from gateway.gateway import Gateway

log = structlog.get_logger("gateway.reload")


@dataclass(frozen=True, slots=True)
class Report:
    """What a reload has done, or would do: a line for each change, and which new engines don't answer.

    ``down`` is None where none was asked.
    """

    changes: tuple[Change, ...]
    down: tuple[str, ...] | None = None


class Reloader:
    """Reloads. ``load`` reads the configuration, ``prepare`` reads the files that it names and returns what
    takes them into use, ``make`` makes an engine of it; these three raise ConfigError.
    """

    def __init__(
        self,
        gateway: Gateway,
        fleet: Fleet,
        *,
        load: Callable[[], Config] | None,
        file: str = "",
        make: Make,
        prepare: Callable[[Config], Callable[[], None]],
    ) -> None:
        self._gateway = gateway
        self._fleet = fleet
        self._load = load
        self.file = os.path.abspath(file) if file else ""
        """What is read again."""
        self._make = make
        self._prepare = prepare
        self._one_at_a_time = trio.Lock()

    async def reload(self, *, dry_run: bool = False) -> Report:
        """Reload, or only say what that would do. Raises ConfigError; then nothing is changed."""
        async with self._one_at_a_time:
            try:
                report = await self._reload(dry_run=dry_run)
            except ConfigError as error:
                self._failed(error, dry_run=dry_run)
                raise
            except Exception as error:
                # Whatever it was, requests go on as they did.
                log.exception("reload failed")
                fault = ConfigError((Fault("", "", f"it failed ({error!r})", "the log says more"),))
                self._failed(fault, dry_run=dry_run)
                raise fault from error
        if not dry_run:
            self._gateway.reloads.done()
            log.info(
                "reloaded", changes=[change.text for change in report.changes], down=list(report.down or ())
            )
        return report

    def _failed(self, error: ConfigError, *, dry_run: bool) -> None:
        if not dry_run:
            self._gateway.reloads.failed()
            log.error("reload failed, nothing is changed", faults=str(error).splitlines())

    async def _reload(self, *, dry_run: bool) -> Report:
        if self._gateway.leaving:
            hint = "reload that one; this one only ends what it has"
            raise ConfigError((Fault("", "", "another process has taken over", hint),))
        if self._load is None:
            raise ConfigError((Fault("", "", "this gateway was started without a file"),))
        new = await trio.to_thread.run_sync(self._load)
        found = tuple(changes(self._gateway.config, new))
        _refuse_what_needs_a_restart(self._gateway.config, new, found)
        take_into_use = self._prepare(new)
        if dry_run:
            return Report(found)
        made: dict[int, Engine] = {}
        switched = False
        try:
            engines = await self._looked_at(new, made)
            self._refuse_two_at_one_address(engines, list(made.values()))
            self._switch(new, engines, list(made.values()))
            take_into_use()
            switched = True
        finally:
            if not switched:
                for engine in made.values():
                    await self._fleet.forget(engine)
        now = trio.current_time()
        return Report(found, tuple(engine.name for engine in made.values() if not engine.health.takes(now)))

    async def _looked_at(self, new: Config, made: dict[int, Engine]) -> list[Engine]:
        """Return the engines, once the new ones have been probed and who is to list its models has."""
        probed = set[Engine]()
        engines = self._engines(new, made)
        learn = [
            engine
            for engine, settings in zip(engines, new.engines, strict=True)
            if settings.models == ("auto",) and not engine.learns
        ]
        for engine in learn:
            await self._fleet.learn(engine)
        while unprobed := [engine for engine in made.values() if engine not in probed]:
            probed.update(unprobed)
            await self._fleet.probe(unprobed)
            engines = self._engines(new, made)  # One that was on its way out may be gone by now.
        return engines

    def _refuse_two_at_one_address(self, engines: list[Engine], made: list[Engine]) -> None:
        """What comes in another's place at its address has books of its own: that has to be free before.

        Raises ConfigError.
        """
        leaving = [engine for engine in self._gateway.engines if engine not in engines]
        at_work = {
            each.settings.url: each for each in (*leaving, *self._gateway.retiring) if each.ledger.held
        }
        faults = [
            Fault(
                "",
                f'engine "{engine.name}".url',
                f'engine "{before.name}" ({before.settings.kind}) is still at work there',
                f"POST /admin/engines/{before.name}/drain, and reload when its slots are free",
            )
            for engine in made
            if (before := at_work.get(engine.settings.url)) is not None and before not in engines
        ]
        if faults:
            raise ConfigError(tuple(faults))

    def _engines(self, new: Config, made: dict[int, Engine]) -> list[Engine]:
        """Return the engines of a configuration, in order: those that there are, and new ones, by number."""
        engines = []
        for number, settings in enumerate(new.engines):
            engine = made.get(number) or self._fleet.find(settings)
            if engine is None:
                engine = made[number] = self._make(new, number)
            engines.append(engine)
        return engines

    def _switch(self, new: Config, engines: list[Engine], made: list[Engine]) -> None:
        """The one step: no await from here to its end."""
        gateway = self._gateway
        before = gateway.engines
        kept_free = {engine.name for engine in before if engine.health.drained}
        for engine in made:
            engine.health.drained = engine.name in kept_free
        for engine, settings in zip(engines, new.engines, strict=True):
            self._fleet.take_back(engine)
            engine.used_elsewhere(*gateway.elsewhere.get(settings.url, (0, 0)))
            engine.apply(settings, new.health, connect_seconds=new.stream.connect_seconds)
            self._fleet.settings_changed(engine)
        gateway.apply(new, engines)
        for engine in made:
            self._fleet.look_after(engine)
        for engine in before:
            if engine not in engines:
                self._fleet.retire(engine)
        gateway.replan()


def _refuse_what_needs_a_restart(old: Config, new: Config, found: tuple[Change, ...]) -> None:
    keys = {change.key for change in found if change.needs_restart}
    if (old.server.tls is None) == (new.server.tls is None):
        keys.discard("server.tls")
    if keys:
        hint = "restart the gateway to change it"
        raise ConfigError(tuple(Fault("", key, "a reload can't change this", hint) for key in sorted(keys)))
