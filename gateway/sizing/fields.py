"""Reading a model's `config.json` field by field, believing none of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_LARGEST = 100_000_000
"""More than any number of a model's shape: vocabularies have hundreds of thousands, contexts ten millions."""


class SizingError(ValueError):
    """What was asked for can't be sized. The message says which field or option told, and what to do."""


class Fields:
    """The fields of one JSON object, whose values are checked as they are asked for.

    A field that is null counts as absent, as it does in Transformers. Messages name a field with
    ``prefix`` before it (``text_config.``). Every method raises :class:`SizingError` for a value
    of another type or out of range.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def get(self, name: str) -> Any:
        """Return the value as it is, None if there is none."""
        return self.values.get(name)

    def number(self, *names: str, default: int | None = None) -> int:
        """Return a whole number of at least 1: that of the first of ``names`` which is there."""
        found = self.maybe_number(*names)
        if found is not None:
            return found
        if default is not None:
            return default
        raise SizingError(
            f"{self.prefix}{names[0]}: missing, and what the library takes then isn't known here; write it in"
        )

    def maybe_number(self, *names: str) -> int | None:
        """Return it as :meth:`number` does, None if it's absent."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
                raise SizingError(
                    f"{self.prefix}{name}: expected a whole number from 1 to {_LARGEST:,}, "
                    f"got {shown(value)}; compare the file with the model's own"
                )
            return value
        return None

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise SizingError(f"{self.prefix}{name}: expected true or false, got {shown(value)}")
        return value

    def text(self, name: str) -> str | None:
        """Return a string, None if it's absent."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise SizingError(f"{self.prefix}{name}: expected a string, got {shown(value)}")
        return value

    def inner(self, name: str) -> Fields | None:
        """Return the object in a field, None if it's absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise SizingError(f"{self.prefix}{name}: expected an object, got {shown(value)}")
        return Fields(value, f"{self.prefix}{named(name)}.")


def named(name: str) -> str:
    """Return a field's name as a message has it: as it is, if it looks like one."""
    return name if re.fullmatch(r"[A-Za-z0-9_]{1,64}", name) else shown(name)


def shown(value: object) -> str:
    """Return a value as a message has it: on one line, and short."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) > _LARGEST:
        return "a larger one" if value > 0 else "a negative one"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
