"""One gateway from start to end: both planes, the telemetry, and the drain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

import structlog
import trio

from gateway.arrivals import Arrivals
from gateway.config import Config
from gateway.fleet import Fleet, close
from gateway.gateway import DRAIN_FAREWELL_SECONDS, Gateway
from gateway.handover import Door, Predecessor, take_over
from gateway.planes import Planes
from gateway.reload import Reloader
from gateway.resources import (
    bound,
    check_handover,
    keep_private,
    make_engines,
    make_store,
    make_tls,
    make_tracing,
)
from gateway.server import Plane
from gateway.telemetry import Sink, Telemetry

log = structlog.get_logger("gateway.service")

_RECLAIM_SECONDS = 1.0
"""How long the end of a drain waits for engines to be seen to have stopped."""


@dataclass(frozen=True, slots=True)
class Service:
    """A running gateway: where it listens, and the handle to end it."""

    listen: tuple[str, ...]
    admin: str
    gateway: Gateway
    reloader: Reloader
    _drain: trio.Event = field(default_factory=trio.Event)
    _leave: trio.Event = field(default_factory=trio.Event)
    _end: trio.Event = field(default_factory=trio.Event)

    def drain(self) -> None:
        """Begin the drain: admit nobody, let streams end, then end. :func:`run` returns after it."""
        self._drain.set()
        self._end.set()

    def leave(self) -> None:
        """Another process accepts from now on: serve those who are connected, then end."""
        self._leave.set()
        self._end.set()

    @property
    def leaves(self) -> bool:
        """Whether another process has taken over."""
        return self._leave.is_set()

    async def end_requested(self) -> None:
        """Wait for :meth:`drain` or :meth:`leave`."""
        await self._end.wait()

    async def drain_requested(self) -> None:
        """Wait for :meth:`drain`."""
        await self._drain.wait()

    def summary(self) -> str:
        """Say in a line what it does, for people who look at the process from outside."""
        live, waiting = len(self.gateway.requests), self.gateway.admission.waiting
        failed = "; the last reload failed" if self.gateway.reloads.last_failed else ""
        return f"{live} live requests, {waiting} of them waiting for a slot{failed}"


async def run(
    config: Config,
    *,
    sink: Sink | None = None,
    load: Callable[[], Config] | None = None,
    file: str = "",
    task_status: trio.TaskStatus[Service] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a gateway until it has drained. Cancelling it ends everything at once.

    ``sink`` gets each access record instead of standard output; ``load`` reads the configuration again
    for a reload, from ``file``. Raises BindError when an address can't be listened on, ConfigError for
    files that can't be used, HandoverError.
    """
    store = make_store(config)
    tracing = make_tracing(config)
    telemetry = Telemetry(sink=sink, store=store, traces=tracing)
    arrivals = Arrivals()
    engines = make_engines(config, arrivals)
    gateway = Gateway(
        config,
        engines,
        ended=telemetry.ended,
        reclaimed=telemetry.reclaimed,
        begun=tracing.begun if tracing is not None else None,
    )
    telemetry.watch(gateway)
    tls = make_tls(config)
    # The records are written to the end, also when everything is cancelled at once.
    keeping = store.writing() if store is not None else nullcontext()
    exporting = tracing.exporting() if tracing is not None else nullcontext()
    async with AsyncExitStack() as opened:
        before = await _predecessor(config, gateway, opened)
        taken = before.sockets if before is not None else []
        door = _door(config, opened)
        listen, admin = opened.enter_context(bound(config, "https" if tls else "http", taken))
        keep_private(config, admin)
        for context in (_closing(gateway), keeping, exporting, telemetry.writing()):
            await opened.enter_async_context(context)
        nursery = await opened.enter_async_context(trio.open_nursery())
        nursery.start_soon(arrivals.run)
        fleet = Fleet(gateway, nursery)
        await fleet.probe([engine for engine in engines if engine.learns])
        for engine in engines:
            fleet.look_after(engine)
        planes = Planes(gateway, telemetry, listen, admin)
        reloader = Reloader(
            gateway,
            fleet,
            load=load,
            file=file,
            make=lambda new, number: make_engines(new, arrivals, only=number)[0],
            prepare=planes.prepare,
        )
        service = Service(tuple(each.name for each in listen), admin.name, gateway, reloader)
        await planes.open(nursery, reloader, tls)
        if before is not None:
            await before.serves((*config.server.listen, config.server.admin))
            nursery.start_soon(before.follow, gateway)
        if door is not None:
            door.show()
            nursery.start_soon(planes.handover(config, door, service.leave).serve)
        task_status.started(service)
        await service.end_requested()
        if service.leaves:
            await planes.leave(service.drain_requested, before)
        await _drain(gateway, planes.data, at_once=service.leaves)
        await planes.control.close()
        nursery.cancel_scope.cancel()


async def _predecessor(config: Config, gateway: Gateway, opened: AsyncExitStack) -> Predecessor | None:
    """Find the process that is to hand over to this one, if there is one."""
    if config.server.handover is None:
        return None
    before = await take_over(config.server.handover.removeprefix("unix:"))
    if before is not None:
        opened.callback(before.close)
        before.leave_free(gateway)
    return before


def _door(config: Config, opened: AsyncExitStack) -> Door | None:
    """Open the door for a successor, where there is to be one; nobody finds it yet."""
    if config.server.handover is None:
        return None
    check_handover(config)
    door = Door(config.server.handover.removeprefix("unix:"))
    opened.callback(door.close)
    return door


@asynccontextmanager
async def _closing(gateway: Gateway) -> AsyncIterator[None]:
    """Close all engines' idle connections on leaving."""
    try:
        yield
    finally:
        for engine in (*gateway.engines, *gateway.retiring):
            await close(engine)


async def _drain(gateway: Gateway, data: Plane, *, at_once: bool = False) -> None:
    """Admit nobody, and let answers end; ``at_once``: they have had their time."""
    seconds = 0.0 if at_once else gateway.config.server.drain_seconds
    log.info("draining", live_requests=len(gateway.requests), at_most_seconds=seconds)
    data.drain()
    gateway.drain()
    with trio.move_on_after(seconds):
        await gateway.requests.none_left()
    if len(gateway.requests):
        log.info("drain deadline reached, ending the rest", live_requests=len(gateway.requests))
        gateway.end_streams()
        with trio.move_on_after(DRAIN_FAREWELL_SECONDS + 0.25):
            await gateway.requests.none_left()
    with trio.move_on_after(_RECLAIM_SECONDS):
        for reclaimer in tuple(gateway.reclaimers.values()):
            await reclaimer.none_left()
    await data.close()
