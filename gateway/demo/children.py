"""Child processes of the demonstration, and what may happen to us meanwhile.

The children get a session of their own, so that a Ctrl-C at the terminal reaches only us and the engine
outlives the gateway's drain; should we be killed, the kernel ends them.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path


class Signals:
    """Ctrl-C and its like, and the end of a child: counted, and woken up by."""

    def __init__(self) -> None:
        self.stops = 0
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _stop(self, *_: object) -> None:
        self.stops += 1

    def wait(self, seconds: float) -> None:
        """Sleep until something happens, but no longer."""
        select.select([self._wake], [], [], max(0.0, seconds))
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)


class Child:
    """A process that we started."""

    def __init__(
        self, name: str, command: list[str], log: Path | None = None, death: int = signal.SIGTERM
    ) -> None:
        self.name = name
        self.log = log
        libc = ctypes.CDLL(None)

        def die_with_us() -> None:
            if sys.platform.startswith("linux"):
                libc.prctl(1, death)  # PR_SET_PDEATHSIG: what the kernel sends it when we are gone

        with contextlib.ExitStack() as stack:
            output = stack.enter_context(log.open("wb")) if log else None
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,
                preexec_fn=die_with_us,  # noqa: PLW1509 - there are no threads here
            )

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            self._process.send_signal(number)

    def how_it_ended(self) -> str:
        """In words."""
        status = self.poll() or 0
        if status >= 0:
            return f"it exited with status {status}"
        return f"it was ended by {signal.Signals(-status).name}"

    def last_words(self) -> list[str]:
        """What its log ends with, and where that is."""
        if self.log is None or not self.log.exists():
            return []
        lines = self.log.read_text(errors="replace").splitlines()[-8:]
        return [f"Its log, {self.log}, ends:", *(f"  {line}" for line in lines)]
