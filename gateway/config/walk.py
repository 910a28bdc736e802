"""Walks a parsed file along the schema's types, expands its strings, and collects every fault on the way.

msgspec's own conversion stops at the first fault and words it for programmers; the types read are the same.
What comes out is the same tree with expanded strings, defaults filled in, and the faulty values left out.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

import msgspec
import msgspec.inspect as ins

from gateway.config.expand import FILE_PREFIX, ExpansionError, expand, expand_secret, unreadable
from gateway.config.faults import Fault, got, key_path, kind_of, quote
from gateway.config.formats import Format, check_name, check_text
from gateway.config.hints import key_hint, nearest

FAULTY: Final = object()
"""In place of a value that had a fault: already told, so nothing else is said about it."""

_POSITION = re.compile(r'\[\d+\](?: "[^"]*")?')


@dataclass(frozen=True, slots=True)
class Walk:
    """One file's walk: where strings come from, and the faults so far."""

    file: str
    environ: Mapping[str, str]
    faults: list[Fault] = field(default_factory=list)

    def fault(self, at: str, message: str, hint: str = "") -> object:
        self.faults.append(Fault(self.file, at, message, hint))
        return FAULTY

    def struct(self, info: ins.StructType, table: object, at: str) -> Any:
        """A table. Its faulty keys are missing from the outcome, its absent ones have their defaults."""
        if not isinstance(table, dict):
            hint = "write it as a table of its own" if at else ""
            return self.fault(at, f"expected a table, got {kind_of(table)}", hint)
        known = {known.name: known for known in info.fields}
        for key in [key for key in table if key not in known]:
            self.fault(key_path(at, key), "unknown key", key_hint(key, _POSITION.sub("", at)))
        outcome: dict[str, Any] = {}
        for name, key in known.items():
            path = key_path(at, name)
            value = self.value(key.type, table[name], path) if name in table else self._absent(key, path)
            if value is not FAULTY:
                outcome[name] = value
        return outcome

    def _absent(self, key: ins.Field, at: str) -> Any:
        if isinstance(key.type, ins.StructType):
            return self.struct(key.type, {}, at)
        if key.default_factory is not msgspec.NODEFAULT:
            return key.default_factory()
        if key.default is not msgspec.NODEFAULT:
            return key.default
        return self._tables(key.type, [], at) if _holds_tables(key.type) else self.fault(at, "missing")

    def value(self, info: ins.Type, value: object, at: str) -> Any:
        """One value of a given type."""
        match info:
            case ins.UnionType():  # optional: TOML has no null, so what is there is of the other type
                return self.value(next(t for t in info.types if not isinstance(t, ins.NoneType)), value, at)
            case ins.Metadata(extra=extra):
                return self._text(value, at, (extra or {})["format"])
            case ins.StructType():
                return self.struct(info, value, at)
            case ins.VarTupleType():
                return self._tables(info, value, at) if _holds_tables(info) else self._array(info, value, at)
            case ins.DictType():
                return self._dict(info, value, at)
            case ins.LiteralType():
                return self._literal(info, value, at)
            case ins.IntType() | ins.FloatType():
                return self._number(info, value, at)
            case _:
                raise TypeError(f"the schema has a type that nothing checks: {info}")

    def _number(self, info: ins.IntType | ins.FloatType, value: object, at: str) -> Any:
        whole = isinstance(info, ins.IntType)
        noun = "an integer" if whole else "a number"
        right_type = type(value) is int or (not whole and isinstance(value, float))
        limit = f"above {info.gt}" if info.gt is not None else f"of at least {info.ge}"
        if isinstance(value, int | float) and right_type:
            # Compared before it is converted: an integer can be too large for a float. NaN fails each test.
            above = value > info.gt if info.gt is not None else value >= (info.ge or 0)
            below = value <= (info.le if info.le is not None else math.inf)
            if above and below:
                return value if whole else float(value)
            if isinstance(value, float) and not math.isfinite(value):
                noun = "a finite number"
            elif above:
                limit = f"of at most {info.le}"
        hint = "written without quotes and unit" if isinstance(value, str) and value[:1].isdigit() else ""
        return self.fault(at, f"expected {noun} {limit}, got {got(value)}", hint)

    def _literal(self, info: ins.LiteralType, value: object, at: str) -> Any:
        words = [str(word) for word in info.values]
        expected = f"expected one of {', '.join(map(quote, words))}"
        if not isinstance(value, str):
            return self.fault(at, f"{expected}, got {got(value)}")
        word = self._expanded(value, at, Format(check_text))
        if word in words or word is FAULTY:
            return word
        near = nearest(value, words)
        return self.fault(at, f"{expected}, got {got(value)}", f'did you mean "{near}"?' if near else "")

    def _array(self, info: ins.VarTupleType, value: object, at: str) -> Any:
        if not isinstance(value, list):
            hint = f"write [{got(value)}]" if isinstance(value, str) else ""
            return self.fault(at, f"expected an array of strings, got {got(value)}", hint)
        if len(value) < (info.min_length or 0):
            return self.fault(at, "expected at least one, got an empty array")
        items = [self.value(info.item_type, item, f"{at}[{index}]") for index, item in enumerate(value)]
        return FAULTY if FAULTY in items else items

    def _tables(self, info: ins.VarTupleType, value: object, at: str) -> Any:
        if not isinstance(value, list):
            hint = f"write [[{at}]], with two brackets" if isinstance(value, dict) else ""
            return self.fault(at, f"expected an array of tables, got {kind_of(value)}", hint)
        if len(value) < (info.min_length or 0):
            return self.fault(at, f"missing: at least one [[{at}]] is needed")
        tables = [
            self.value(info.item_type, item, item_at(at, index, item)) for index, item in enumerate(value)
        ]
        # Its place counts for the rules on several engines, so what isn't even a table stays as an empty one.
        return [{} if table is FAULTY else table for table in tables]

    def _dict(self, info: ins.DictType, value: object, at: str) -> Any:
        if not isinstance(value, dict):
            return self.fault(at, f"expected a table of strings, got {kind_of(value)}")
        assert isinstance(info.key_type, ins.Metadata)
        outcome = {}
        for key, item in value.items():
            if reason := (info.key_type.extra or {})["format"].check(key):
                self.fault(key_path(at, key), reason)
            outcome[key] = self.value(info.value_type, item, key_path(at, key))
        return FAULTY if FAULTY in outcome.values() else outcome

    def _text(self, value: object, at: str, wanted: Format) -> Any:
        if not isinstance(value, str):
            found = kind_of(value) if wanted.secret or wanted.quiet else got(value)
            return self.fault(at, f"expected a string, got {found}")
        text = self._expanded(value, at, wanted)
        if text is FAULTY:
            return FAULTY
        if not text:
            hint = "that is what it stands for" if value else ""
            return self.fault(at, "expected text, not an empty string", hint)
        if reason := wanted.check(text):
            shown = "" if wanted.secret or wanted.quiet else f", got {got(value)}"
            return self.fault(at, reason + shown)
        return self._readable(text, value, at, wanted.made) if wanted.path else text

    def _expanded(self, value: str, at: str, wanted: Format) -> Any:
        try:
            text = expand_secret(value, self.environ) if wanted.secret else expand(value, self.environ)
        except ExpansionError as error:
            return self.fault(at, error.message, error.hint)
        if text.startswith(FILE_PREFIX) and not wanted.secret:
            return self.fault(at, "file: is for api_key and the values of headers only")
        return text

    def _readable(self, path: str, raw: str, at: str, made: bool) -> Any:
        full = os.path.abspath(os.path.join(os.path.dirname(self.file), path))
        reason = "" if made else unreadable(full)
        # What came from a variable is not repeated: it may be the wrong one, and a secret.
        shown = full if path == raw else raw
        return self.fault(at, f"can't read {quote(shown)}", reason) if reason else full


def _holds_tables(info: ins.Type) -> TypeGuard[ins.VarTupleType]:
    return isinstance(info, ins.VarTupleType) and isinstance(info.item_type, ins.StructType)


def item_at(at: str, index: int, item: object) -> str:
    """`engine[0] "gpu0"`: by name as well, where it has a usable one, since nobody counts tables."""
    key, faulty = ("model", check_text) if at == "route" else ("name", check_name)
    name = item.get(key) if isinstance(item, dict) else None
    return f"{at}[{index}] {quote(name)}" if isinstance(name, str) and not faulty(name) else f"{at}[{index}]"
