"""What a service manager is told (sd_notify(3)): a datagram a message; nothing without ``$NOTIFY_SOCKET``.

The watchdog's messages come from a task of the loop that serves, so they stop when that does.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import structlog
import trio

log = structlog.get_logger("gateway.notify")

Status = Callable[[], str]

_MOST_DIGITS = 20


class Notifier:
    """Tells the service manager how the process is. ``status`` is the line that it shows to people.

    A message that can't be delivered is a line in the log: nothing else depends on it.
    """

    def __init__(self, status: Status, environ: Mapping[str, str] = os.environ) -> None:
        self._status = status
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self._watchdog_seconds = _watchdog_seconds(environ)
        self._reloads = 0
        self._stopping = False

    def ready(self) -> None:
        """It serves."""
        self._send("READY=1", f"STATUS={self._status()}")

    def stopping(self) -> None:
        """The drain has begun."""
        self._stopping = True
        self._send("STOPPING=1", f"STATUS=Draining: {self._status()}")

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """A reload, well or badly ended. Of several at once the last one's end counts."""
        if self._stopping:
            yield
            return
        self._reloads += 1
        # The manager takes a READY for the end of this reload only if its time is known to be later.
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={now}", "STATUS=Reloading")
        try:
            yield
        finally:
            self._reloads -= 1
            if not self._reloads and not self._stopping:
                self.ready()

    async def watchdog(self) -> None:
        """Say that the loop turns, twice as often as asked for; returns at once if nobody asks."""
        if self._address is None or self._watchdog_seconds is None:
            return
        while True:
            draining = "Draining: " if self._stopping else ""
            self._send("WATCHDOG=1", f"STATUS={draining}{self._status()}")
            await trio.sleep(self._watchdog_seconds / 2)

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to_manager:
                to_manager.setblocking(False)
                to_manager.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            log.warning("the service manager can't be told", message=lines[0], error=str(error))


def _address(text: str) -> bytes | None:
    """Return the socket's address: a path, or ``@`` and a name that is in no folder."""
    if text.startswith("/"):
        return os.fsencode(text)
    if text.startswith("@"):
        return b"\0" + os.fsencode(text[1:])
    if text:
        log.warning("NOTIFY_SOCKET is no unix socket's address; nobody is notified", address=text)
    return None


def _watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    """Return how often at least the manager wants to hear of this process; None: it doesn't."""
    asked, process = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if process not in ("", str(os.getpid())):  # It is another one's, and has been handed down.
        return None
    if not (asked.isascii() and asked.isdigit() and len(asked) < _MOST_DIGITS and int(asked)):
        return None
    return int(asked) / 1e6
