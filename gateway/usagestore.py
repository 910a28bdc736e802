"""What requests took, kept in a file: SQLite, written in batches by a thread.

The end of a request only adds a row to a buffer. Every ``flush_seconds`` the rows are written
in one transaction, so a kill at any moment loses those of the last interval and nothing else:
the file is in WAL mode, in which a transaction is there whole or not at all.

Nothing that happens to the file reaches a request. What can't be written stays in the buffer
and is tried again; what no longer fits in is dropped, counted and logged.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from math import inf
from typing import TypeVar

import structlog
import trio

from gateway.config import Usage as Settings
from gateway.usagefile import PURGE_ROWS, Row, UsageFile, UsageFileError

log = structlog.get_logger("gateway.usagestore")

_MOST_ROWS = 100_000
"""Kept while the file takes none; newer ones are dropped. Some 50 MB."""

_BATCH_ROWS = 2000
_SLOWEST_SECONDS = 10.0
"""Between two tries at a file that doesn't take anything, growing up to it."""

_LAST_FLUSH_SECONDS = 1.0
_LOG_SECONDS = 60.0
_PURGE_SECONDS = 3600.0

_DAY_MS = 24 * 3600 * 1000

_T = TypeVar("_T")

_OF_THE_ROWS = (
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    ValueError,
    OverflowError,
)
"""Faults of what is written: trying again would help nobody. All others are the file's."""
_OF_THE_FILE = (sqlite3.Error, OSError, UsageFileError)


class UsageStore:
    """Keeps rows in the file that ``settings`` name.

    Raises UsageFileError when it can't be opened, or isn't one of this version's.
    """

    def __init__(self, settings: Settings) -> None:
        assert settings.path is not None
        self._file = UsageFile(settings.path)
        self._file.open()
        self._file.close()  # It is opened again when there is something to write.
        self._settings = settings
        self._rows: deque[Row] = deque()
        self._dropped = 0
        self._something = trio.Event()
        self._flushing = trio.CancelScope()
        self._purge_at = -inf
        self._log_at = -inf
        self._told_dropped = 0
        # Rows are deleted by a clock that doesn't jump while the process runs.
        self._wall_ms = int(datetime.now(UTC).timestamp() * 1000) - int(trio.current_time() * 1000)

    @property
    def dropped(self) -> int:
        """Rows that could not be stored."""
        return self._dropped

    def add(self, row: Row) -> None:
        """Take a row. It is written within ``flush_seconds``."""
        if len(self._rows) >= _MOST_ROWS:
            self._dropped += 1
        else:
            self._rows.append(row)
        self._something.set()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write rows as they come, and when the block is left those that are left, for at most a second."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_rows)
                try:
                    yield
                finally:
                    nursery.cancel_scope.cancel()
                    self._file.ending = True
                    self._flushing.deadline = trio.current_time() + _LAST_FLUSH_SECONDS
        finally:
            if not self._flushing.cancelled_caught:  # Else a thread is still stuck in the file.
                with trio.move_on_after(_LAST_FLUSH_SECONDS, shield=True):
                    await self._flush()
                    await _in_thread(self._file.close)
            self._dropped += len(self._rows)
            if self._dropped > self._told_dropped:
                log.error("usage of requests was lost", rows=self._dropped - self._told_dropped)

    async def _write_rows(self) -> None:
        pause = self._settings.flush_seconds
        while True:
            if not self._rows:
                with trio.move_on_at(self._purge_at):
                    await self._something.wait()
            self._something = trio.Event()
            if self._rows:
                await trio.sleep(pause)
            with trio.CancelScope(shield=True) as self._flushing:
                await self._flush()
                await self._purge()
            # Rows that are left are those that the file didn't take.
            pause = max(self._settings.flush_seconds, min(_SLOWEST_SECONDS, 2 * pause) if self._rows else 0)

    async def _flush(self) -> None:
        """Write what there is, or leave it."""
        while self._rows:
            rows = tuple(islice(self._rows, _BATCH_ROWS))
            try:
                await _in_thread(partial(self._file.write, rows))
            except _OF_THE_ROWS as error:
                self._dropped += len(rows)
                self._tell(error)
            except _OF_THE_FILE as error:
                self._tell(error)
                return
            for _ in rows:
                self._rows.popleft()

    async def _purge(self) -> None:
        now = trio.current_time()
        if self._rows or now < self._purge_at:
            return
        if not self._settings.keep_days:
            self._purge_at = inf
            return
        self._purge_at = now + _PURGE_SECONDS
        before = self._wall_ms + int(now * 1000) - self._settings.keep_days * _DAY_MS
        try:
            if await _in_thread(partial(self._file.purge, before)) == PURGE_ROWS:
                self._purge_at = now + self._settings.flush_seconds  # There are more.
        except (*_OF_THE_FILE, *_OF_THE_ROWS) as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        now = trio.current_time()
        if now >= self._log_at:
            self._log_at = now + _LOG_SECONDS
            lost, self._told_dropped = self._dropped - self._told_dropped, self._dropped
            log.error("usage can't be written", error=str(error), waiting=len(self._rows), lost=lost)


async def _in_thread(work: Callable[[], _T]) -> _T:
    return await trio.to_thread.run_sync(work, abandon_on_cancel=True)
