"""What is wrong with a configuration, as data: one `Fault` a line, all of them in one `ConfigError`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

QUOTE_CHARACTERS = 60
"""A value longer than this is cut when a fault repeats it: a line must stay a line."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SHORT_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing to put right."""

    file: str
    """Empty where it isn't known; see `ConfigError.of`."""
    key: str
    """A key path, or a position in what isn't TOML; "" means the whole file."""
    message: str
    hint: str = ""

    def __str__(self) -> str:
        line = ": ".join(part for part in (self.file, self.key, self.message) if part)
        return f"{line}; {self.hint}" if self.hint else line


class ConfigError(Exception):
    """The configuration can't be used. Holds every fault found, in the order of the schema."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        super().__init__(faults)
        self.faults = faults

    def __str__(self) -> str:
        return "\n".join(map(str, self.faults))

    def of(self, file: str) -> ConfigError:
        """The same, with `file` at fault where none is named."""
        return ConfigError(tuple(replace(fault, file=fault.file or file) for fault in self.faults))


def quote(text: str) -> str:
    """A TOML basic string: the same text again when parsed, whatever it holds (but for lone surrogates)."""
    return f'"{"".join(map(_escape, text))}"'


def _escape(character: str) -> str:
    if character in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[character]
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def key_path(table: str, key: str) -> str:
    """`server` and `listen` make `server.listen`; a key that needs quotes in TOML has them here too."""
    bare = key if _BARE_KEY.fullmatch(key) else quote(_cut(key))
    return f"{table}.{bare}" if table else bare


def got(value: object) -> str:
    """A value as the operator wrote it, short."""
    match value:
        case str():
            return quote(_cut(value))
        case bool():
            return "true" if value else "false"
        # Python refuses to print an integer of more than 4,300 digits, and nobody wants to read one of 30.
        case int() if abs(value) >= 10**30:
            return "a huge integer"
        case int() | float():
            return str(value)
        case _:
            return kind_of(value)


def kind_of(value: object) -> str:
    """Only the type of a value, in TOML's words: all that may be said about a secret."""
    match value:
        case str():
            return "a string"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a float"
        case list():
            return "an array"
        case dict():
            return "a table"
        case _:
            return "a date or time"


def _cut(text: str) -> str:
    return text if len(text) <= QUOTE_CHARACTERS else text[: QUOTE_CHARACTERS - 1] + "…"
