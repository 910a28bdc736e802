"""What a configuration names, opened: sockets, certificates, authorities, the usage file, engines."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.arrivals import Arrivals
from gateway.config import ADMIN_TOKEN_HINT, Config, ConfigError, Fault
from gateway.engine import Engine
from gateway.server import Listener, adopt, bind, tls_context
from gateway.transport import make_engine
from gateway.usagefile import UsageFileError
from gateway.usagestore import UsageStore

if TYPE_CHECKING:
    from gateway.tracing import Tracing


@contextmanager
def bound(
    config: Config, scheme: str, taken: Sequence[tuple[str, socket.socket]] = ()
) -> Iterator[tuple[list[Listener], Listener]]:
    """Listen on the API's addresses and the control plane's, until the block is left.

    ``taken`` are sockets of another process, with their addresses. Raises BindError.
    """
    left = list(taken)
    with ExitStack() as listening:

        def listen(address: str, scheme: str = "http") -> Listener:
            found = next((each for each in left if each[0] == address), None)
            if found is None:
                listener = bind(address, scheme=scheme)
            else:
                left.remove(found)
                listener = adopt(address, found[1], scheme=scheme)
            listening.callback(listener.socket.close)
            return listener

        yield [listen(address, scheme) for address in config.server.listen], listen(config.server.admin)


def keep_private(config: Config, admin: Listener) -> None:
    """Demand a token where others reach the control plane: an inherited socket's address isn't in the file.

    Raises ConfigError.
    """
    if not admin.stays_here and config.server.admin_token is None:
        message = f"missing, as others reach {admin.name}"
        raise ConfigError((Fault("", "server.admin_token", message, ADMIN_TOKEN_HINT),))


def check_handover(config: Config) -> None:
    """See that a successor's door can be opened. Raises ConfigError."""
    if config.server.handover is None:
        return
    folder = Path(config.server.handover.removeprefix("unix:")).parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        what = "isn't a folder that can be written to" if folder.exists() else "doesn't exist"
        hint = f"install -d -m 0700 {folder}, as the gateway's user; /run is emptied at each boot"
        raise ConfigError((Fault("", "server.handover", f"{folder} {what}", hint),))


def read_authorities(config: Config) -> dict[str, str]:
    """Read the authorities of the engines that have their own, by engine. Raises ConfigError."""
    found = {}
    for number, engine in enumerate(config.engines):
        if engine.ca is not None:
            with fault_of(f"engine[{number}].ca"):
                found[engine.name] = Path(engine.ca).read_text("ascii", "replace")
                ssl.create_default_context(cadata=found[engine.name])
    return found


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
        with fault_of(f"engine[{number}].ca"):
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


def make_tracing(config: Config) -> Tracing | None:
    """Load what makes traces, if there are to be any. Raises ConfigError without OpenTelemetry."""
    if config.traces.endpoint is None:
        return None
    try:
        from gateway.tracing import Tracing  # noqa: PLC0415 - what it costs is paid where it is wanted
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        hint = (
            "scripts/run --config FILE installs it; without the scripts: pip install '.[otel]' in the project"
        )
        message = f"traces need OpenTelemetry, which isn't installed ({error.name})"
        raise ConfigError((Fault("", "traces.endpoint", message, hint),)) from None
    return Tracing(config.traces)


def make_tls(config: Config) -> ssl.SSLContext | None:
    """Make the TLS context of the API, if it has one. Raises ConfigError for files that can't be used."""
    tls = config.server.tls
    if tls is None:
        return None
    with fault_of("server.tls"):
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
def fault_of(key: str) -> Iterator[None]:
    """Say which key is at fault when the content of a file it names can't be used."""
    try:
        yield
    except (OSError, ssl.SSLError) as error:
        message = f"the file can't be used: {error}"
        raise ConfigError((Fault("", key, message, "is it the right PEM file?"),)) from None
