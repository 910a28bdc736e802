"""Probing one engine: is it there, and which models has it.

A probe is a cheap GET of the engine's health page, never a completion. It counts only while no
bytes of answers flow: an engine that is at work may have no time for its health page, and its
answers are the better witness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

import structlog
import trio

from gateway.asking import MODELS_SECONDS, ask, ask_models
from gateway.config import Health as Settings
from gateway.engine import Engine
from gateway.errors import EngineError, GatewayError
from gateway.health import Change
from gateway.marks import Marks
from gateway.profiles import Ask

log = structlog.get_logger("gateway.health")

_MOST_BYTES = 64 * 1024
_LEARN_SECONDS = 30.0
_REMIND_SECONDS = 60.0


class Probes:
    """Keeps an engine's health up to date. :meth:`run` has to be running.

    ``live`` are the requests alive now; ``wake`` is called when the engine may be given requests again,
    and ``learnt`` when it has other models.
    """

    def __init__(
        self,
        engine: Engine,
        live: Iterable[Marks],
        *,
        wake: Callable[[], None] = lambda: None,
        learnt: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._live = live
        self._wake = wake
        self._learnt = learnt
        self._settings_changed = trio.lowlevel.ParkingLot()
        self._news = trio.lowlevel.ParkingLot()
        self._flowed: dict[str, int] = {}
        self._learnt_at = -inf
        self._said_at = -inf
        engine.health.changed = self._changed

    @property
    def _settings(self) -> Settings:
        return self._engine.health.settings

    async def run(self) -> None:
        """Probe until cancelled, and tell when a backoff is over."""
        probed_at = -inf
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._mind_backoff)
            while True:
                now = trio.current_time()
                if now >= probed_at + (self._settings.probe_seconds or inf):
                    probed_at = now
                    await self.probe()
                if self._engine.learns and now >= self._learnt_at + _LEARN_SECONDS:
                    await self.learn()
                next_look = max(probed_at, now) + (self._settings.probe_seconds or inf)
                if self._engine.learns:
                    next_look = min(next_look, now + _LEARN_SECONDS)
                with trio.move_on_at(next_look):
                    await self._settings_changed.park()

    def settings_changed(self) -> None:
        """The engine or its health has other settings: look at once what they say."""
        self._settings_changed.unpark_all()

    async def probe(self) -> None:
        """Ask once whether the engine is well."""
        health, timeout = self._engine.health, self._settings.probe_timeout_seconds
        problem, absent = f"no answer to a probe within {timeout:g} s", False
        with trio.move_on_after(timeout):
            try:
                status, _ = await ask(
                    self._engine, Ask(self._engine.profile.health_path), most_bytes=_MOST_BYTES
                )
                problem = "" if status < 500 else f"it answers {status} to a probe"
            except GatewayError as error:
                problem = error.detail or error.message
                absent = isinstance(error, EngineError) and error.absent
        now, flows = trio.current_time(), self._flow()
        if not problem:
            health.probed_well(now)
        else:
            health.probed_ill(now, problem, absent=absent, alive=flows)
            self._remind(now, problem)
        self._news.unpark_all()

    def _remind(self, now: float, problem: str) -> None:
        """Say once a minute that an engine is still away: the first line may be hours old."""
        if self._engine.health.ejected and now >= self._said_at + _REMIND_SECONDS:
            self._said_at = now
            log.warning("engine is still away", engine=self._engine.name, reason=problem)

    async def learn(self) -> None:
        """Ask once which models the engine has; if it doesn't say, it keeps those that it had."""
        with trio.move_on_after(MODELS_SECONDS):
            found = await ask_models(self._engine)
            if found.problem is not None:
                return  # It is asked again with the next probe.
            self._learnt_at = trio.current_time()
            if found.names != self._engine.learnt:
                self._engine.learnt = found.names
                self._learnt()
                log.info("engine has these models", engine=self._engine.name, models=list(found.names))

    def _flow(self) -> bool:
        """Whether anything has come of an answer of the engine's since this was asked last."""
        name, before = self._engine.name, self._flowed
        self._flowed = {one.id: one.bytes + one.tail.events for one in self._live if one.engine == name}
        return any(count > before.get(request, 0) for request, count in self._flowed.items())

    def _changed(self, change: Change) -> None:
        engine = self._engine
        if change is Change.EJECTED:
            seconds = round(max(0.0, engine.health.until - trio.current_time()), 3)
            self._said_at = trio.current_time()
            log.warning("engine ejected", engine=engine.name, reason=engine.health.reason, seconds=seconds)
        elif change is Change.BACK:
            log.info("engine is back", engine=engine.name)
            self._learnt_at = -inf
        self._news.unpark_all()
        self._wake()

    async def _mind_backoff(self) -> None:
        """Grant when time has made the engine take requests again."""
        while True:
            with trio.move_on_at(self._engine.health.opens_at(trio.current_time())):
                await self._news.park()
            self._wake()
