"""The file of usage when everything goes wrong: kills at any moment, and disks without room."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import trio

from tests.support.http1 import http1
from tests.support.process import gateway_process
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import honest
from tests.test_usagestore import stored, until_stored

FLUSH_SECONDS = 0.1

WRITER = """
import sys, time, trio
from gateway.config import Usage
from gateway.usagefile import Row
from gateway.usagestore import UsageStore

async def main():
    store = UsageStore(Usage(path=sys.argv[1], flush_seconds={flush}, keep_days=0))
    async with store.writing():
        number = 0
        while True:
            for _ in range(20):
                store.add(Row(0, "", "m", "e", "/v1/x", "completed", 200, 1, 1, "a", "a", 1, str(number)))
                number += 1
            print(number, time.monotonic(), store.dropped, flush=True)
            await trio.sleep(0.002)

trio.run(main)
"""


@pytest.mark.parametrize("seconds", [0.3, 0.45, 0.6, 0.75, 0.9])
def test_a_kill_loses_the_last_interval_at_most(seconds: float, tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER.format(flush=FLUSH_SECONDS), str(path)],
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None
        first = float(writer.stdout.readline().split()[1])
        added: list[tuple[int, float]] = [(20, first)]
        while (at := added[-1][1]) < first + seconds:
            number, when, _ = writer.stdout.readline().split()
            added.append((int(number), float(when)))
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().splitlines()
    assert writer.returncode == -signal.SIGKILL
    kept = [int(row[-1]) for row in stored(path)]
    assert kept == list(range(len(kept))), "batches are whole, and in order"
    # What was added an interval before the end is there; writing may have taken as long again here.
    due = max((number for number, when in added if when <= at - 4 * FLUSH_SECONDS), default=0)
    assert len(kept) >= due, (len(kept), due, rest[-1:])
    assert len(kept) > 0 or seconds < 0.4
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def test_a_gateway_that_is_killed_leaves_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    usage = {"path": str(path), "flush_seconds": FLUSH_SECONDS}
    with trio.fail_after(60):
        for killed in range(2):
            engine = ScriptedEngine(honest, kind="vllm")
            async with gateway_process(tmp_path, engine, usage=usage) as gateway:
                async with http1(gateway.url) as client:
                    for _ in range(5):
                        await client.ask(CHAT.path, CHAT.payload(stream=True))
                await until_stored(path, 5 * (killed + 1))
                gateway.signal(signal.SIGKILL)
                await gateway.exited.wait()
            assert len(stored(path)) == 5 * (killed + 1)


# No room.


@contextmanager
def tiny_disk(at: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    at.mkdir()
    if subprocess.call(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(at)]):
        pytest.skip("may not mount")
    try:
        yield at
    finally:
        subprocess.check_call(["umount", str(at)])


def drive(path: Path, seconds: float, limit: int | None = None) -> tuple[int, int]:
    """Let the writer run, then end it; how many rows it added, and how many it says it has dropped."""

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-c", WRITER.format(flush=0.02), str(path)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limited,  # noqa: PLW1509
    ) as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        end, last = time.monotonic() + seconds, ""
        while time.monotonic() < end:
            last = writer.stdout.readline()
            assert last, writer.stderr.read()
        writer.kill()
    number, _, dropped = last.split()
    return int(number), int(dropped)


def check(path: Path, added: int) -> None:
    kept = [int(row[-1]) for row in stored(path)]
    assert 0 < len(kept) < added
    assert kept == list(range(len(kept)))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_full_disk_ends_nothing_and_harms_no_file(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk") as disk:
        path = disk / "usage.db"
        added, _ = drive(path, 2.0)
        copy = tmp_path / "usage.db"
        for each in disk.iterdir():
            (tmp_path / each.name).write_bytes(each.read_bytes())
    check(copy, added)


def test_a_file_that_may_not_grow_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    added, _ = drive(path, 2.0, limit=400_000)
    check(path, added)
