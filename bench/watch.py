"""Looking at a target while a load runs on it: its memory, its sockets' memory, its CPU time in a window."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.plan import Plan
from bench.targets import BenchError, Target

SOCKET_MEMORY = re.compile(r"skmem:\(r(\d+),rb\d+,t\d+,tb\d+,f\d+,w(\d+),o\d+,bl(\d+)")


@dataclass(frozen=True)
class Look:
    """What to look at, and how often in seconds; 0: not at all. Looking takes the target's time, too."""

    memory_every: float = 0.0
    sockets_every: float = 0.0


NOTHING = Look()


def socket_bytes(listing: str) -> int:
    """The sum over what `ss -m` lists."""
    return sum(sum(map(int, match.groups())) for match in SOCKET_MEMORY.finditer(listing))


def own_socket_bytes(target: Target) -> int:
    """What the kernel holds for a proxy's own sockets: received, queued to be sent, in the backlog.

    What is allocated ahead (f) is left out: less than a page a socket, and shown as 4 GiB when it is below 0.
    The proxy's are the sockets bound to its port (towards the clients) and those connected to the engine's.
    """
    wanted = f"( sport = :{target.port} or dport = :{target.engine.port} )"
    listing = subprocess.run(["ss", "-tmnH", wanted], capture_output=True, text=True, check=True, timeout=20)
    return socket_bytes(listing.stdout)


class Watch:
    """A context around a load; `seen` tells afterwards."""

    def __init__(self, target: Target, look: Look, plan: Plan) -> None:
        self.target, self.window = target, plan.window
        self.begin_at = plan.begin_at
        self.over = threading.Event()
        self.peaks: dict[str, int] = {}
        self.cpu_seconds: float | None = None
        self.jobs: list[Callable[[], None]] = []
        if target.tree and look.memory_every:
            self.pss_before = target.tree.memory().pss
            self.jobs.append(lambda: self._repeat("pss", look.memory_every, self._pss))
        if target.tree and look.sockets_every:
            self.jobs.append(lambda: self._repeat("sockets", look.sockets_every, self._sockets))
        if target.tree and self.window:
            self.jobs.append(self._time_window)
        self.threads: list[threading.Thread] = []

    def __enter__(self) -> None:
        self.threads = [threading.Thread(target=job, daemon=True) for job in self.jobs]
        for thread in self.threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()

    def seen(self) -> dict[str, float]:
        """Peaks in bytes, and the window's CPU seconds; only what was looked for."""
        found: dict[str, float] = {f"{name}_peak": peak for name, peak in self.peaks.items()}
        if "pss" in self.peaks:
            found["pss_before"] = self.pss_before
        if self.target.tree and self.window:
            if self.cpu_seconds is None:
                raise BenchError("the load ended before its window did")
            found["window_cpu_seconds"] = self.cpu_seconds
        return found

    def _pss(self) -> int:
        return self.target.tree.memory().pss if self.target.tree else 0

    def _sockets(self) -> int:
        return own_socket_bytes(self.target)

    def _repeat(self, name: str, every: float, read: Callable[[], int]) -> None:
        self.peaks[name] = 0
        while not self.over.wait(every):
            self.peaks[name] = max(self.peaks[name], read())

    def _time_window(self) -> None:
        """Both ends are instants on the clock that the clients count their events by."""
        assert self.window is not None
        tree = self.target.tree
        assert tree is not None
        start, end = (self.begin_at + seconds for seconds in self.window)
        if self.over.wait(start - time.monotonic()):
            return
        before = tree.cpu()
        if not self.over.wait(end - time.monotonic()):
            self.cpu_seconds = tree.cpu().since(before)
