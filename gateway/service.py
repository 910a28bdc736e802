"""One gateway from start to end: both planes, the telemetry, and the drain."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import trio

from gateway import logs
from gateway.app import DataPlane
from gateway.arrivals import Arrivals
from gateway.config import ADMIN_TOKEN_HINT, Config, ConfigError, Fault
from gateway.control import control_plane
from gateway.dashboard import Board
from gateway.engine import Engine
from gateway.fleet import Fleet, close
from gateway.gateway import DRAIN_FAREWELL_SECONDS, Gateway
from gateway.guard import Guard
from gateway.reload import Reloader
from gateway.server import Listener, Plane, bind, tls_context
from gateway.telemetry import Sink, Telemetry
from gateway.transport import make_engine
from gateway.usagefile import UsageFileError
from gateway.usagestore import UsageStore

log = structlog.get_logger("gateway.service")

_ADMIN_CONNECTIONS = 256

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

    def drain(self) -> None:
        """Begin the drain: admit nobody, let streams end, then end. :func:`run` returns after it."""
        self._drain.set()

    async def drain_requested(self) -> None:
        """Wait for :meth:`drain`."""
        await self._drain.wait()


async def run(
    config: Config,
    *,
    sink: Sink | None = None,
    load: Callable[[], Config] | None = None,
    task_status: trio.TaskStatus[Service] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a gateway until it has drained. Cancelling it ends everything at once.

    ``sink`` gets each access record instead of standard output; ``load`` reads the configuration again
    for a reload. Raises BindError when an address can't be listened on, ConfigError for TLS and usage
    files that can't be used.
    """
    store = make_store(config)
    telemetry = Telemetry(sink=sink, store=store)
    arrivals = Arrivals()
    engines = make_engines(config, arrivals)
    gateway = Gateway(config, engines, ended=telemetry.ended, reclaimed=telemetry.reclaimed)
    telemetry.watch(gateway)
    tls = make_tls(config)
    # The records are written to the end, also when everything is cancelled at once.
    keeping = store.writing() if store is not None else nullcontext()
    with _bound(config, "https" if tls else "http") as (listen, admin):
        _keep_private(config, admin)
        app = DataPlane(gateway)
        data = _plane(app, listen, "data", config, tls)
        async with _closing(gateway), keeping, telemetry.writing(), trio.open_nursery() as nursery:
            nursery.start_soon(arrivals.run)
            fleet = Fleet(gateway, nursery)
            reloader = Reloader(
                gateway,
                fleet,
                load=load,
                make=lambda new, number: make_engines(new, arrivals, only=number)[0],
                prepare=_Prepared(gateway, app, data, admin),
            )
            await fleet.probe([engine for engine in engines if engine.learns])
            for engine in engines:
                fleet.look_after(engine)
            board = Board(gateway, telemetry)
            nursery.start_soon(board.run)
            guard = Guard(lambda: gateway.config.server.admin_token or "", by_name=not admin.is_unix)
            pages = control_plane(gateway, telemetry, reloader, guard=guard, board=board)
            control = _plane(pages, [admin], "control", config)
            service = Service(tuple(each.name for each in listen), admin.name, gateway, reloader)
            await nursery.start(data.serve)
            await nursery.start(control.serve)
            task_status.started(service)
            await service.drain_requested()
            await _drain(gateway, data)
            await control.close()
            nursery.cancel_scope.cancel()


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Reads what a new configuration names, and tells those of it who don't look at it each time."""

    gateway: Gateway
    app: DataPlane
    data: Plane
    admin: Listener

    def __call__(self, new: Config) -> Callable[[], None]:
        _keep_private(new, self.admin)
        tls = make_tls(new)
        authorities = _authorities(new)

        def take_into_use() -> None:
            self.data.tls = tls
            for engine in self.gateway.engines:
                if engine.tls is not None and engine.name in authorities:
                    engine.tls.load_verify_locations(cadata=authorities[engine.name])
            logs.apply(new.log)
            self.app.budget.resize(new.server.bodies_bytes)
            self.data.most_connections = new.server.max_connections

        return take_into_use


@contextmanager
def _bound(config: Config, scheme: str) -> Iterator[tuple[list[Listener], Listener]]:
    """Listen on the API's addresses and the control plane's, until the block is left."""
    with ExitStack() as listening:

        def listen(address: str, scheme: str = "http") -> Listener:
            listener = bind(address, scheme=scheme)
            listening.callback(listener.socket.close)
            return listener

        yield [listen(address, scheme) for address in config.server.listen], listen(config.server.admin)


def _authorities(config: Config) -> dict[str, str]:
    """Read the authorities of the engines that have their own, by engine. Raises ConfigError."""
    found = {}
    for number, engine in enumerate(config.engines):
        if engine.ca is not None:
            with _fault_of(f"engine[{number}].ca"):
                found[engine.name] = Path(engine.ca).read_text("ascii", "replace")
                ssl.create_default_context(cadata=found[engine.name])
    return found


def _keep_private(config: Config, admin: Listener) -> None:
    """Demand a token where others reach the control plane: an inherited socket's address isn't in the file.

    Raises ConfigError.
    """
    if not admin.stays_here and config.server.admin_token is None:
        message = f"missing, as others reach {admin.name}"
        raise ConfigError((Fault("", "server.admin_token", message, ADMIN_TOKEN_HINT),))


@asynccontextmanager
async def _closing(gateway: Gateway) -> AsyncIterator[None]:
    """Close all engines' idle connections on leaving."""
    try:
        yield
    finally:
        for engine in (*gateway.engines, *gateway.retiring):
            await close(engine)


def _plane(
    app: Any, listeners: list[Listener], name: str, config: Config, tls: ssl.SSLContext | None = None
) -> Plane:
    most = config.server.max_connections if name == "data" else _ADMIN_CONNECTIONS
    return Plane(
        app,
        listeners,
        name=name,
        tls=tls,
        most_connections=most,
        stall_seconds=config.stream.stall_seconds,
    )


async def _drain(gateway: Gateway, data: Plane) -> None:
    seconds = gateway.config.server.drain_seconds
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


def make_engines(
    config: Config, arrivals: Arrivals | None = None, *, only: int | None = None
) -> list[Engine]:
    """Make all engines of the configuration, or ``only`` one. ``arrivals``, if given, has to be running.

    Raises ConfigError when a ``ca`` can't be used.
    """
    seconds = config.stream.connect_seconds
    engines = []
    for number, settings in enumerate(config.engines):
        if only not in (None, number):
            continue
        with _fault_of(f"engine[{number}].ca"):
            engines.append(
                make_engine(settings, connect_seconds=seconds, arrivals=arrivals, health=config.health)
            )
    return engines


def make_store(config: Config) -> UsageStore | None:
    """Open the file of usage, if there is to be one. Raises ConfigError when it can't be used."""
    if config.usage.path is None:
        return None
    try:
        return UsageStore(config.usage)
    except UsageFileError as error:
        raise ConfigError((Fault("", "usage.path", f"the file {error}"),)) from None


def make_tls(config: Config) -> ssl.SSLContext | None:
    """Make the TLS context of the API, if it has one. Raises ConfigError for files that can't be used."""
    tls = config.server.tls
    if tls is None:
        return None
    with _fault_of("server.tls"):
        try:
            return tls_context(tls.certificate, tls.key)
        except ssl.SSLError as error:
            # What OpenSSL says of the two files together doesn't name the one at fault.
            for key, path, mark in (
                ("certificate", tls.certificate, "CERTIFICATE-----"),
                ("key", tls.key, "PRIVATE KEY-----"),
            ):
                if mark not in Path(path).read_text("latin-1"):
                    what = mark.rstrip("-").lower()
                    fault = Fault(
                        "", f"server.tls.{key}", f"the file holds no {what}", "is it the right PEM file?"
                    )
                    raise ConfigError((fault,)) from None
            raise error from None


@contextmanager
def _fault_of(key: str) -> Iterator[None]:
    """Say which key is at fault when the content of a file it names can't be used."""
    try:
        yield
    except (OSError, ssl.SSLError) as error:
        message = f"the file can't be used: {error}"
        raise ConfigError((Fault("", key, message, "is it the right PEM file?"),)) from None
