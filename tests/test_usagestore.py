"""The file of usage: batches, faults of the file that reach nobody, versions, old rows."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
from trio.testing import wait_all_tasks_blocked

from gateway import usagefile, usagestore
from gateway.config import Usage as Settings
from gateway.usagefile import Row, UsageFileError, examine
from gateway.usagestore import UsageStore

SECONDS = 0.01


def row(number: int = 0, **changes: Any) -> Row:
    values: dict[str, Any] = {
        "time": int(datetime.now(UTC).timestamp() * 1000),
        "tenant": "",
        "model": "m",
        "engine": "e",
        "route": "/v1/chat/completions",
        "outcome": "completed",
        "status": 200,
        "prompt_tokens": 9,
        "completion_tokens": None,
        "prompt_source": "engine",
        "completion_source": "unknown",
        "duration_ms": 12,
        "request_id": f"id-{number}",
    }
    return Row(**{**values, **changes})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.db"


@pytest.fixture
def told() -> Iterator[list[Any]]:
    """What is logged."""
    with structlog.testing.capture_logs() as events:
        yield events


def store_at(path: Path, **settings: Any) -> UsageStore:
    return UsageStore(Settings(path=str(path), **{"flush_seconds": SECONDS, **settings}))


def stored(path: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT * FROM usage ORDER BY rowid").fetchall()


def there(path: Path | str) -> bool:
    return Path(path).exists()


def replace(path: Path, data: bytes | None = None) -> None:
    """Delete the file, and what SQLite has beside it; put something else there, if given."""
    for each in path.parent.iterdir():
        each.unlink()
    if data is not None:
        path.write_bytes(data)


async def until(true: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not true():
            await wait_all_tasks_blocked(0.005)


async def until_stored(path: Path, count: int) -> None:
    def are() -> bool:
        try:
            return len(stored(path)) == count
        except sqlite3.OperationalError:  # It has just been made anew.
            return False

    await until(are)


async def test_rows_are_written_as_they_are(path: Path) -> None:
    rows = [row(), row(1, model=None, engine=None, status=None, prompt_tokens=None, tenant="a'b")]
    store = store_at(path)
    async with store.writing():
        for each in rows:
            store.add(each)
        await until_stored(path, 2)
    assert stored(path) == rows
    assert store.dropped == 0


async def test_what_is_left_is_written_at_the_end(path: Path) -> None:
    store = store_at(path, flush_seconds=1000)
    with trio.CancelScope() as scope:
        async with store.writing():
            for number in range(5000):
                store.add(row(number))
            scope.cancel()
            await trio.lowlevel.checkpoint()
    assert [each[-1] for each in stored(path)] == [f"id-{number}" for number in range(5000)]
    assert sorted(os.listdir(path.parent)) == ["usage.db"], "closed well, it is one file"


async def test_the_file_is_taken_up_again(path: Path) -> None:
    for number in range(3):
        store = store_at(path)
        async with store.writing():
            store.add(row(number))
    assert len(stored(path)) == 3


async def test_a_locked_file_is_written_to_later(
    path: Path, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usagefile, "_BUSY_SECONDS", 0.0)
    store = store_at(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with store.writing():
            store.add(row())
            await until(lambda: bool(told))
            assert store.dropped == 0
            other.execute("ROLLBACK")
            await until_stored(path, 1)
    assert [event["event"] for event in told] == ["usage can't be written"], "and not for each try"
    assert "locked" in told[0]["error"]


async def test_one_that_is_locked_at_the_start_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usagefile, "_BUSY_SECONDS", 0.0)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        store = store_at(path)
        async with store.writing():
            store.add(row())
            await trio.sleep(5 * SECONDS)
            other.execute("ROLLBACK")
            await until_stored(path, 1)


async def test_what_does_not_fit_in_is_counted_and_the_rest_written_later(
    path: Path, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usagestore, "_MOST_ROWS", 10)
    monkeypatch.setattr(usagefile, "_BUSY_SECONDS", 0.0)
    store = store_at(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with store.writing():
            for number in range(15):
                store.add(row(number))
            assert store.dropped == 5
            other.execute("ROLLBACK")
            await until_stored(path, 10)
    assert [each[-1] for each in stored(path)] == [f"id-{number}" for number in range(10)]
    assert told[-1]["event"] == "usage of requests was lost"
    assert told[-1]["rows"] == 5


async def test_a_deleted_file_is_made_anew(path: Path) -> None:
    store = store_at(path)
    async with store.writing():
        store.add(row(1))
        await until_stored(path, 1)
        replace(path)
        store.add(row(2))
        await until(lambda: there(path))
        await until_stored(path, 1)
    assert stored(path)[0][-1] == "id-2"


async def test_a_file_that_was_overwritten_ends_nothing(path: Path, told: list[Any]) -> None:
    store = store_at(path)
    async with store.writing():
        store.add(row(1))
        await until_stored(path, 1)
        replace(path, b"something else altogether" * 1000)
        store.add(row(2))
        await until(lambda: bool(told))
    assert store.dropped == 1
    assert "isn't a usage file" in told[0]["error"]


async def test_a_row_that_cannot_be_written_holds_up_no_other(path: Path, told: list[Any]) -> None:
    store = store_at(path)
    async with store.writing():
        store.add(row(1, prompt_tokens=2**70))
        await until(lambda: bool(store.dropped))
        store.add(row(2, model="\ud800"))
        await until(lambda: store.dropped == 2)
        store.add(row(3))
        await until_stored(path, 1)
    assert len(told) == 2  # the first, and what was lost since


async def test_a_thread_that_is_stuck_holds_up_the_end_for_a_second_at_most(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usagestore, "_LAST_FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(usagefile, "_BUSY_SECONDS", 2.0)
    store = store_at(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with trio.fail_after(1.5):
            async with store.writing():
                store.add(row())
                await trio.sleep(5 * SECONDS)
        other.execute("ROLLBACK")
    assert store.dropped == 1


# Old rows.


async def test_old_rows_are_deleted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usagefile, "PURGE_ROWS", 3)
    monkeypatch.setattr(usagestore, "PURGE_ROWS", 3)
    now = datetime.now(UTC)
    ages = [11, 11, 11, 11, 10.5, 9.5, 0]
    store = store_at(path, keep_days=0)
    async with store.writing():
        for number, days in enumerate(ages):
            store.add(row(number, time=int((now - timedelta(days=days)).timestamp() * 1000)))
        await until_stored(path, 7)
        await trio.sleep(3 * SECONDS)
    assert len(stored(path)) == 7, "kept for ever"
    async with store_at(path, keep_days=10).writing():
        await until_stored(path, 2)


async def test_a_jump_of_the_clock_deletes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(days=40_000)

    monkeypatch.setattr(usagestore, "_PURGE_SECONDS", SECONDS)
    store = store_at(path, keep_days=1)
    async with store.writing():
        monkeypatch.setattr(usagestore, "datetime", Later)
        store.add(row())
        await until_stored(path, 1)
        await trio.sleep(10 * SECONDS)
    assert len(stored(path)) == 1


# Files that aren't right at the start.


def make(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


async def test_files_that_are_not_ours_are_refused(path: Path) -> None:
    make(path, "CREATE TABLE songs (title)")
    for look in (store_at, lambda path: examine(str(path))):
        with pytest.raises(UsageFileError, match="another program's"):
            look(path)
    assert not there(f"{path}-wal"), "it isn't touched"


async def test_text_is_refused(path: Path) -> None:
    replace(path, b"no database " * 100)
    for look in (store_at, lambda path: examine(str(path))):
        with pytest.raises(UsageFileError, match="isn't an SQLite database"):
            look(path)


async def test_a_newer_gateways_file_is_refused(path: Path) -> None:
    async with store_at(path).writing():
        pass
    examine(str(path))
    make(path, "PRAGMA user_version = 2")
    for look in (store_at, lambda path: examine(str(path))):
        with pytest.raises(UsageFileError, match=r"newer gateway: its tables are of version 2.* knows 1"):
            look(path)


async def test_places_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageFileError, match="can't be opened: unable to open"):
        store_at(tmp_path / "none" / "usage.db")
    with pytest.raises(UsageFileError, match="is a directory"):
        store_at(tmp_path)
    with pytest.raises(UsageFileError, match="folder doesn't exist"):
        examine(str(tmp_path / "none" / "usage.db"))
    examine(str(tmp_path / "usage.db"))
    assert os.listdir(tmp_path) == [], "looking makes nothing"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to everything")
async def test_a_file_that_may_not_be_written_to_is_refused(path: Path) -> None:
    async with store_at(path).writing():
        pass
    os.chmod(path, stat.S_IRUSR)
    with pytest.raises(UsageFileError, match="readonly"):
        store_at(path)
