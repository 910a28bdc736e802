"""``gateway usage``: tables of what requests took, from the file that the gateway keeps."""

from __future__ import annotations

import argparse
import re
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from gateway import config
from gateway.usage import Source
from gateway.usagefile import UsageFileError, holds_usage, read_only

_KEYS = {
    "day": "date(time / 1000, 'unixepoch')",
    "model": "coalesce(model, '')",
    "tenant": "tenant",
}
_NUMBERS = ("requests", "prompt_tokens", "completion_tokens", "estimated", "unknown")
_AGO = re.compile(r"([0-9]{1,6})([mhd])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


def add_arguments(parser: argparse.ArgumentParser, files: argparse._MutuallyExclusiveGroup) -> None:
    """Declare the options of the command."""
    files.add_argument(
        "--path", metavar="FILE", help="usage file, in place of the configuration's usage.path"
    )
    parser.add_argument("--tenant", metavar="NAME", help="only this tenant's requests")
    parser.add_argument(
        "--since",
        type=since,
        metavar="TIME",
        help="only requests that arrived since then: 2026-11-01 (UTC), 2026-11-01T08:00, or 90m, 24h, 7d ago",
    )
    parser.add_argument("--by", choices=sorted(_KEYS), default="day", help="rows by (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    """Print the report that ``options`` ask for. Returns the exit code: 0, or 1 if the file can't be read.

    Raises ConfigError when a configuration that is to name the file doesn't.
    """
    path = options.path or _configured(options.config)
    if not Path(path).exists():
        print(f"{path}: there is no such file; the gateway makes it when it starts", file=sys.stderr)
        return 1
    try:
        with closing(read_only(path)) as connection:
            rows = _rows(connection, options) if holds_usage(connection) else []
    except UsageFileError as error:
        print(f"{path}: the file {error}", file=sys.stderr)
        return 1
    except sqlite3.Error as error:
        print(f"{path}: the file can't be read: {error}", file=sys.stderr)
        return 1
    total = dict(zip(_NUMBERS, (sum(row[name] for row in rows) for name in _NUMBERS), strict=True))
    print(_json(options, rows, total) if options.json else _table(options.by, rows, total))
    return 0


def since(text: str) -> datetime:
    """Read the argument of ``--since``. Raises ArgumentTypeError."""
    try:
        if ago := _AGO.fullmatch(text):
            return datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        when = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"expected a day (2026-11-01), a time, or how long ago (7d, 24h), got {text!r}"
        ) from None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


def _configured(file: str) -> str:
    path = config.load(file).usage.path
    if path is None:
        hint = "nothing is kept; set it, or name a file with --path"
        raise config.ConfigError((config.Fault(file, "usage.path", "missing", hint),))
    return path


def _rows(connection: sqlite3.Connection, options: argparse.Namespace) -> list[dict[str, Any]]:
    wheres, values = ["1"], {}
    if options.tenant is not None:
        wheres.append("tenant = :tenant")
        values["tenant"] = options.tenant
    if options.since is not None:
        wheres.append("time >= :since")
        values["since"] = int(options.since.timestamp() * 1000)
    has = "(prompt_source = '{0}' OR completion_source = '{0}')".format
    query = f"""
        SELECT {_KEYS[options.by]} AS key, count(*),
            coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0),
            coalesce(sum({has(Source.ESTIMATED)}), 0), coalesce(sum({has(Source.UNKNOWN)}), 0)
        FROM usage WHERE {" AND ".join(wheres)} GROUP BY key ORDER BY key
    """
    return [dict(zip((options.by, *_NUMBERS), row, strict=True)) for row in connection.execute(query, values)]


def _json(options: argparse.Namespace, rows: Sequence[dict[str, Any]], total: dict[str, int]) -> str:
    asked = {
        "by": options.by,
        "tenant": options.tenant,
        "since": options.since.isoformat(timespec="seconds") if options.since is not None else None,
    }
    return msgspec.json.encode({**asked, "rows": rows, "total": total}).decode()


def _table(by: str, rows: Sequence[dict[str, Any]], total: dict[str, int]) -> str:
    lines = [[by, *(name.replace("_", " ") for name in _NUMBERS)]]
    for key, row in [*((row[by] or "-", row) for row in rows), ("total", total)]:
        # A model's name is its client's: nothing in it may steer a terminal.
        shown = "".join(letter if letter.isprintable() else "?" for letter in key)
        lines.append([shown, *(f"{row[name]:,}" for name in _NUMBERS)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines
    )
