"""What a string of the configuration may hold: `${NAME}`, `${NAME:-default}`, for secrets `file:/path`."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping

FILE_PREFIX = "file:"
SECRET_FILE_BYTES = 65_536
"""No header is this long; a larger file is the wrong one."""

# In this order: "$$", "${NAME}" with or without a default, and any other "$", which is a mistake.
_REFERENCE = re.compile(
    r"\$(?:(?P<dollar>\$)|\{(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}|)", re.ASCII
)


class ExpansionError(Exception):
    """A string that can't be expanded. Never holds the string, which may be a secret."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def expand(text: str, environ: Mapping[str, str]) -> str:
    """Replace the references to environment variables; as in a shell, `:-` counts for an empty one too."""

    def replacement(reference: re.Match[str]) -> str:
        name, default = reference["name"], reference["default"]
        if reference["dollar"]:
            return "$"
        if name is None:
            raise ExpansionError('a "$" that begins no ${NAME} or ${NAME:-default}', "write $$ for a dollar")
        value = environ.get(name)
        if default is not None:
            return value or default
        if value is None:
            hint = f"set it, or give a default: ${{{name}:-default}}"
            raise ExpansionError(f"the environment variable {name} is not set", hint)
        return value

    return _REFERENCE.sub(replacement, text)


def expand_secret(text: str, environ: Mapping[str, str]) -> str:
    """As `expand`; and `file:/path` is what that file holds, without the line's end.

    Only the file's own text may begin with `file:`: a variable's value is never taken for a path.
    """
    expanded = expand(text, environ)
    return _read_secret(expanded.removeprefix(FILE_PREFIX)) if text.startswith(FILE_PREFIX) else expanded


def escape(text: str) -> str:
    """The text that `expand` turns into this one."""
    return text.replace("$", "$$")


def unreadable(path: str) -> str | None:
    """Why a file can't be read, or None. Only regular files count: a pipe could be read once, or for ever."""
    try:
        # stat first: opening a pipe nobody writes to would block.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return "not a regular file"
        with open(path, "rb"):
            return None
    except OSError as error:
        return os.strerror(error.errno) if error.errno else "unusable path"
    except ValueError:  # a zero byte in the path
        return "unusable path"


def _read_secret(path: str) -> str:
    if not path.startswith("/"):
        raise ExpansionError("expected file:/path with an absolute path")
    if reason := unreadable(path):
        raise ExpansionError("the file this secret is in can't be read", reason)
    with open(path, "rb") as file:
        data = file.read(SECRET_FILE_BYTES + 1)
    if len(data) > SECRET_FILE_BYTES:
        raise ExpansionError("the file this secret is in is too large", f"at most {SECRET_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise ExpansionError("the file this secret is in is not UTF-8 text") from None
