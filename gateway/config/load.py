"""From a file to a `Config`, or to a `ConfigError` with all its faults."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.config import rules
from gateway.config.faults import ConfigError, Fault
from gateway.config.schema import Config, described
from gateway.config.walk import Walk

MAX_FILE_BYTES = 1024 * 1024
"""Hundreds of engines fit; more is not a configuration, and /dev/zero has no end."""

_TOML_HINTS = {
    "Invalid value": 'text needs quotes: "text"',
    "Cannot overwrite a value": "a key may be given only once",
}
_TOML_POSITION = re.compile(r"(?P<what>.*) \(at (?P<where>[^()]*)\)", re.DOTALL)


def load(path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> Config:
    """Read and check a file."""
    file = os.fspath(path)
    try:
        with open(file, "rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise _unusable(file, "no such file", "create it, or name another one with --config") from None
    except IsADirectoryError:
        raise _unusable(file, "a directory, not a file", "name the file in it with --config") from None
    except PermissionError:
        raise _unusable(file, "permission denied", "let the gateway's user read it") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "unusable path"
        raise _unusable(file, f"can't be read: {reason}", "name another one with --config") from None
    if len(data) > MAX_FILE_BYTES:
        raise _unusable(file, f"larger than {MAX_FILE_BYTES} bytes", "is it the right file?")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _unusable(file, "not UTF-8 text", "save it as UTF-8", f"line {line}") from None
    return parse(text, file=file, environ=environ)


def parse(text: str, *, file: str = "config.toml", environ: Mapping[str, str] = os.environ) -> Config:
    """Check a text. `file` is what faults call it, and where relative paths in it start."""
    walk = Walk(file, environ)
    tree = walk.struct(described(), _toml(text, file), "")
    rules.check(walk, tree)
    if walk.faults:
        raise ConfigError(tuple(walk.faults))
    return msgspec.convert(tree, Config)


def _toml(text: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise _unusable(file, "nested too deeply") from None
    except ValueError as error:  # mostly TOMLDecodeError; plain for an integer of thousands of digits
        match = _TOML_POSITION.fullmatch(str(error))
        what, where = (match["what"], match["where"]) if match else ("a value can't be read", "")
        if where == "end of document":
            lines = text.split("\n")
            where = f"line {len(lines)}, column {len(lines[-1]) + 1}"
        message = f"not valid TOML: {what[:1].lower()}{what[1:]}"
        raise _unusable(file, message, _TOML_HINTS.get(what, ""), where) from None


def _unusable(file: str, message: str, hint: str = "", key: str = "") -> ConfigError:
    return ConfigError((Fault(file, key, message, hint),))
