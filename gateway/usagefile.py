"""The file in which usage is kept: an SQLite database of one table, in WAL mode.

Its form is for others to read too: docs/usage.md describes it. Everything here blocks, and is
called in a thread while requests run.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

APPLICATION_ID = 0x67775573
"""Marks a file as one of ours (``PRAGMA application_id``)."""

VERSION = 1
"""Of the tables (``PRAGMA user_version``)."""

_TABLES = f"""
BEGIN IMMEDIATE;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
CREATE TABLE IF NOT EXISTS usage (
    time INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    model TEXT,
    engine TEXT,
    route TEXT NOT NULL,
    outcome TEXT NOT NULL,
    status INTEGER,
    prompt_tokens INTEGER,
    completion_tokens INTEGER,
    prompt_source TEXT NOT NULL,
    completion_source TEXT NOT NULL,
    duration_ms INTEGER,
    request_id TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS usage_time ON usage (time);
COMMIT;
"""

_BUSY_SECONDS = 0.5
"""How long a write waits for another process that has the file locked."""

_PASSES = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL})
"""Errors at the start that are no reason not to start."""

PURGE_ROWS = 5000
"""Deleted in one transaction."""


class UsageFileError(Exception):
    """The file can't be used; the text says why."""


class Row(NamedTuple):
    """One request, as a row of the table. ``time`` is its arrival, in milliseconds of Unix time (UTC)."""

    time: int
    tenant: str
    model: str | None
    engine: str | None
    route: str
    outcome: str
    status: int | None
    prompt_tokens: int | None
    completion_tokens: int | None
    prompt_source: str
    completion_source: str
    duration_ms: int | None
    request_id: str


_INSERT = f"INSERT INTO usage VALUES ({','.join('?' * len(Row._fields))})"
_PURGE = "DELETE FROM usage WHERE rowid IN (SELECT rowid FROM usage WHERE time < ? LIMIT ?)"


class UsageFile:
    """The file and the connection to it, if there is one. Used by one thread at a time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self.ending = False
        """No transaction is the one before another: each closes the connection. Its thread may be the last
        that knows it."""

    def open(self) -> None:
        """Open the file; make it, or its tables, if they aren't there. Raises UsageFileError.

        One that is locked, or has no room for its tables, is left to be opened later.
        """
        try:
            self._connect()
        except sqlite3.Error as error:
            if _code(error) not in _PASSES:
                raise UsageFileError(f"can't be opened: {error}") from None

    def write(self, rows: Sequence[Row]) -> None:
        """Write ``rows`` in one transaction."""
        with self._transaction() as connection:
            connection.executemany(_INSERT, rows)

    def purge(self, before: int) -> int:
        """Delete some of the rows from before a time; return how many."""
        with self._transaction() as connection:
            return connection.execute(_PURGE, (before, PURGE_ROWS)).rowcount

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with ExitStack() as otherwise:
            otherwise.callback(self.close)  # Which also rolls back.
            connection = self._connect()
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
            if not self.ending:
                otherwise.pop_all()

    def _connect(self) -> sqlite3.Connection:
        # SQLite would go on writing to a file that somebody has deleted.
        if self._connection is not None and _identity(self._path) == self._identity:
            return self._connection
        self.close()
        _refuse_folder(self._path)
        with ExitStack() as otherwise:
            connection = sqlite3.connect(
                self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            otherwise.callback(connection.close)
            if not holds_usage(connection):
                connection.execute("PRAGMA journal_mode = WAL")
                connection.executescript(_TABLES)
            if connection.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
                raise UsageFileError("can't be used: its file system has no shared memory for WAL mode")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("BEGIN IMMEDIATE")  # Says whether it may be written to.
            connection.execute("ROLLBACK")
            otherwise.pop_all()
        self._connection, self._identity = connection, _identity(self._path)
        return connection


def holds_usage(connection: sqlite3.Connection) -> bool:
    """Whether the open file has our tables; an empty one has none yet.

    Raises UsageFileError for another program's, or a newer version's.
    """
    try:
        (mark,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.DatabaseError as error:
        if _code(error) == sqlite3.SQLITE_NOTADB:
            raise UsageFileError("isn't a usage file: it isn't an SQLite database") from None
        raise
    if (mark, version, tables) == (0, 0, 0):
        return False
    if mark != APPLICATION_ID:
        raise UsageFileError("isn't a usage file: the database is another program's")
    if version > VERSION:
        newer = f"its tables are of version {version}, this gateway knows {VERSION}"
        raise UsageFileError(f"was written by a newer gateway: {newer}")
    return True


def examine(path: str) -> None:
    """Look whether a file can be used, without making it. Raises UsageFileError."""
    folder = os.path.dirname(path) or "."
    if not os.path.exists(path):
        if not os.path.isdir(folder):
            raise UsageFileError("can't be made: its folder doesn't exist; create it")
        if not os.access(folder, os.W_OK):
            raise UsageFileError("can't be made: its folder can't be written to")
        return
    with closing(read_only(path)) as connection:
        holds_usage(connection)
    if not (os.access(path, os.W_OK) and os.access(folder, os.W_OK)):
        raise UsageFileError("can't be written to")


def read_only(path: str) -> sqlite3.Connection:
    """Open a file to read it, also while a gateway writes to it. Raises UsageFileError."""
    _refuse_folder(path)
    connection: sqlite3.Connection | None = None
    try:
        connection = sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error as error:
        if connection is not None:
            connection.close()
        if _code(error) == sqlite3.SQLITE_NOTADB:
            raise UsageFileError("isn't a usage file: it isn't an SQLite database") from None
        raise UsageFileError(f"can't be read: {error}") from None
    return connection


def _refuse_folder(path: str) -> None:
    if os.path.isdir(path):
        raise UsageFileError("is a directory; name a file in it")


def _code(error: sqlite3.Error) -> int:
    """Return SQLite's primary code of an error; 0 if it has none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _identity(path: str) -> tuple[int, int] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_dev, state.st_ino
