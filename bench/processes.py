"""Processes the bench starts: pinned, ended by pid, and measured through /proc.

Only processes started here are ever signalled, each by its pid and start time (a pid alone may have been
given to somebody else). Linux only, like the rest of the bench.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
CPUS = sorted(os.sched_getaffinity(0))  # at the start: later the bench is on one of them itself
PR_SET_PDEATHSIG = 1
TERM_SECONDS, KILL_SECONDS = 6.0, 2.0
PACE_STEPS = 200_000
SLOW = 4 / 3
ONE_WAIT_SECONDS = 15.0


def gateway_cpu() -> int | None:
    """The core for the gateway; None (nothing is pinned) on a machine with a single one."""
    return CPUS[1] if len(CPUS) > 1 else None


def rest_cpu() -> int | None:
    """The core for everything else: engine, clients and the bench itself."""
    return CPUS[0] if len(CPUS) > 1 else None


def _child_setup(cpu: int | None, libc: ctypes.CDLL, parent: int) -> Callable[[], None]:
    def setup() -> None:
        # Ended with its parent, even if that is killed: nothing is left behind.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        if cpu is not None:
            os.sched_setaffinity(0, {cpu})

    return setup


def start(  # noqa: PLR0913 (Popen's own)
    command: Sequence[str],
    *,
    cpu: int | None,
    cwd: str,
    env: Mapping[str, str] | None = None,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start a process on one core, in a session of its own: Ctrl-C reaches the bench, which ends the rest."""
    return subprocess.Popen(
        list(command),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        start_new_session=True,
        preexec_fn=_child_setup(cpu, ctypes.CDLL(None), os.getpid()),  # noqa: PLW1509 (no threads here yet)
    )


def busy(cpu: int | None) -> float:
    """Busy seconds so far of one core, or of all: less one's own, it tells who else was at work there."""
    wanted = "cpu" if cpu is None else f"cpu{cpu}"
    for line in _read("/proc/stat").splitlines():
        name, *fields = line.split()
        if name == wanted:
            ticks = [int(field) for field in fields[:8]]
            return (sum(ticks) - ticks[3] - ticks[4]) / TICKS
    return 0.0


def pace(cpu: int | None) -> float:
    """How long a step of a plain Python loop takes on one core, in ns of CPU time, about 15 ms long.

    A virtual machine's core is often half of one: what other machines do on the same hardware is nowhere to
    be read, but everything takes twice as long.
    """
    mine = os.sched_getaffinity(0)
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    try:
        since = time.process_time_ns()
        for _ in range(PACE_STEPS):
            pass
        return (time.process_time_ns() - since) / PACE_STEPS
    finally:
        os.sched_setaffinity(0, mine)


class Patience:
    """Waits for the machine to be quiet, for so many seconds in all; when they are used up, no more."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self._best = math.inf

    def wait(self) -> None:
        """Look for half a second, and again while others keep a tenth of a core busy or make ours slow.

        Slow is: a step on the gateway's core takes a third more than the least it has taken so far. No load
        takes more than a part of the patience, or the first ones would have it all.
        """
        enough = self.left - ONE_WAIT_SECONDS
        while self.left > max(0, enough):
            before, since = busy(None), time.monotonic()
            time.sleep(0.5)
            seconds = time.monotonic() - since
            quiet = (busy(None) - before) / seconds < 0.1
            now = pace(gateway_cpu())
            self._best = min(self._best, now)
            if quiet and now <= self._best * SLOW:
                return
            self.left -= seconds


def _read(path: str) -> str:
    try:
        with open(path, encoding="latin-1") as file:
            return file.read()
    except OSError:
        return ""


@dataclass(frozen=True)
class Cpu:
    """CPU time a process tree has used: per thread in ns, and the whole tree in seconds (user + sys; sys)."""

    threads: Mapping[tuple[int, str], int]
    seconds: float
    system: float

    def since(self, earlier: Cpu) -> float:
        """Seconds used since `earlier`: exact while no thread has ended in between, else by clock ticks."""
        if all(thread in self.threads for thread in earlier.threads):
            return sum(ns - earlier.threads.get(thread, 0) for thread, ns in self.threads.items()) / 1e9
        return self.seconds - earlier.seconds


@dataclass(frozen=True)
class Memory:
    """Resident and proportional set size of a process tree, in bytes."""

    rss: int
    pss: int


class Tree:
    """A process started by the bench, with its descendants."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._seen: dict[int, str] = {}

    def pids(self) -> list[int]:
        found: list[int] = []
        todo = [self.process.pid]
        while todo and len(found) < 500:
            pid = todo.pop()
            stat = self._stat(pid)
            if not stat:
                continue
            found.append(pid)
            self._seen[pid] = stat[19]
            for thread in self._threads(pid):
                todo += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
        return found

    @staticmethod
    def _stat(pid: int) -> list[str]:
        """/proc/PID/stat's fields behind the name: [0] state, [11:15] CPU times, [19] start time."""
        text = _read(f"/proc/{pid}/stat")
        return text[text.rfind(")") + 2 :].split() if text else []

    @staticmethod
    def _threads(pid: int) -> list[str]:
        try:
            return os.listdir(f"/proc/{pid}/task")
        except OSError:
            return []

    def cpu(self) -> Cpu:
        threads: dict[tuple[int, str], int] = {}
        ticks = system = 0
        for pid in self.pids():
            times = [int(field) for field in self._stat(pid)[11:15]]
            ticks += sum(times)
            system += sum(times[1::2])
            for thread in self._threads(pid):
                fields = _read(f"/proc/{pid}/task/{thread}/schedstat").split()
                if fields:
                    threads[pid, thread] = int(fields[0])
        return Cpu(threads, ticks / TICKS, system / TICKS)

    def memory(self) -> Memory:
        rss = pss = 0
        for pid in self.pids():
            fields = _read(f"/proc/{pid}/statm").split()
            rss += int(fields[1]) * PAGE if fields else 0
            for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
                if line.startswith("Pss:"):
                    pss += int(line.split()[1]) * 1024
        return Memory(rss, pss)

    def running(self) -> bool:
        return self.process.poll() is None

    def _alive(self, pid: int) -> bool:
        stat = self._stat(pid)
        return bool(stat) and stat[19] == self._seen[pid] and stat[0] != "Z"

    def end(self) -> bool:
        """SIGTERM to the root, then SIGKILL to whatever of the tree is left. True: it went by itself."""
        self.pids()
        for sent, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
            for pid in list(self._seen):
                if self._alive(pid) and (sent == signal.SIGKILL or pid == self.process.pid):
                    os.kill(pid, sent)
            limit = time.monotonic() + seconds
            while time.monotonic() < limit:
                self.process.poll()  # reaps the root, else it stays a zombie
                if not any(self._alive(pid) for pid in self._seen):
                    return sent == signal.SIGTERM
                time.sleep(0.02)
        return False
