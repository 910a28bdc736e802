"""One gateway from start to end: both planes, the telemetry, and the drain."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import trio

from gateway.app import DataPlane
from gateway.arrivals import Arrivals
from gateway.config import Config, ConfigError, Fault
from gateway.control import control_plane
from gateway.engine import Engine
from gateway.gateway import DRAIN_FAREWELL_SECONDS, Gateway
from gateway.probes import Probes
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
    task_status: trio.TaskStatus[Service] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a gateway until it has drained. Cancelling it ends everything at once.

    ``sink`` gets each access record instead of standard output. Raises BindError when an
    address can't be listened on, ConfigError for TLS and usage files that can't be used.
    """
    store = make_store(config)
    telemetry = Telemetry(sink=sink, store=store)
    arrivals = Arrivals()
    engines = make_engines(config, arrivals)
    gateway = Gateway(config, engines, ended=telemetry.ended, reclaimed=telemetry.reclaimed)
    telemetry.watch(gateway)
    tls = make_tls(config)
    listeners: list[Listener] = []
    try:
        scheme = "https" if tls else "http"
        listeners.extend(bind(address, scheme=scheme) for address in config.server.listen)
        admin = bind(config.server.admin)
        listeners.append(admin)
        data = Plane(
            DataPlane(gateway),
            listeners[:-1],
            name="data",
            tls=tls,
            most_connections=config.server.max_connections,
            stall_seconds=config.stream.stall_seconds,
        )
        control = Plane(
            control_plane(gateway, telemetry),
            [admin],
            name="control",
            most_connections=_ADMIN_CONNECTIONS,
            stall_seconds=config.stream.stall_seconds,
        )
        service = Service(tuple(each.name for each in listeners[:-1]), admin.name, gateway)
        # The records are written to the end, also when everything is cancelled at once.
        keeping = store.writing() if store is not None else nullcontext()
        async with keeping, telemetry.writing(), trio.open_nursery() as nursery:
            nursery.start_soon(arrivals.run)
            for reclaimer in gateway.reclaimers.values():
                nursery.start_soon(reclaimer.run)
            for engine in engines:
                probes = Probes(engine, gateway.requests, gateway.admission.wake)
                if engine.learns:
                    await probes.learn()
                nursery.start_soon(probes.run)
            await nursery.start(data.serve)
            await nursery.start(control.serve)
            task_status.started(service)
            await service.drain_requested()
            await _drain(gateway, data)
            await control.close()
            nursery.cancel_scope.cancel()
    finally:
        for listener in listeners:
            listener.socket.close()
        with trio.move_on_after(1, shield=True):
            for engine in engines:
                await engine.transport.aclose()


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
        for reclaimer in gateway.reclaimers.values():
            await reclaimer.none_left()
    await data.close()


def make_engines(config: Config, arrivals: Arrivals | None = None) -> list[Engine]:
    """Make all engines of the configuration. ``arrivals``, if given, has to be running.

    Raises ConfigError when a ``ca`` can't be used.
    """
    seconds = config.stream.connect_seconds
    engines = []
    for number, settings in enumerate(config.engines):
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
