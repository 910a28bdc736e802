"""The effective configuration as TOML: defaults filled in, variables expanded, secrets masked."""

from __future__ import annotations

from typing import Any

import msgspec.inspect as ins

from gateway.config.expand import escape
from gateway.config.faults import quote
from gateway.config.schema import Config, described
from gateway.config.values import MASK

EXACT_INTEGERS = 2**53
"""Up to here a float that is whole can be written as an integer and read back the same."""


def show(config: Config) -> str:
    """Parses again to the same configuration, but for the masks."""
    lines: list[str] = []
    for field in described().fields:
        _field(lines, field.name, field.type, getattr(config, field.name))
    return "\n".join(lines).lstrip("\n") + "\n"


def _table(lines: list[str], header: str, path: str, info: ins.StructType, table: object) -> None:
    lines += ["", header]
    # A table's own keys come before its subtables, or they would belong to those.
    for field in sorted(info.fields, key=lambda field: _is_table(field.type)):
        _field(lines, field.name, field.type, getattr(table, field.name), path)


def _field(lines: list[str], name: str, info: ins.Type, value: Any, table: str = "") -> None:
    path = f"{table}.{name}" if table else name
    if value is None:
        return
    if struct := _struct(info):
        _table(lines, f"[{path}]", path, struct, value)
    elif isinstance(info, ins.VarTupleType) and (struct := _struct(info.item_type)):
        for item in value:
            _table(lines, f"[[{path}]]", path, struct, item)
    else:
        lines.append(f"{name} = {_value(info, value)}")


def _value(info: ins.Type, value: Any) -> str:
    match info:
        case ins.UnionType():
            return _value(next(t for t in info.types if not isinstance(t, ins.NoneType)), value)
        case ins.Metadata(extra=extra):
            return quote(MASK if (extra or {})["format"].secret else escape(value))
        case ins.VarTupleType():
            return f"[{', '.join(_value(info.item_type, item) for item in value)}]"
        case ins.DictType():
            pairs = [f"{quote(key)} = {_value(info.value_type, item)}" for key, item in value.items()]
            return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
        case ins.FloatType():
            return str(int(value)) if value.is_integer() and abs(value) < EXACT_INTEGERS else repr(value)
        case ins.LiteralType():
            return quote(value)
        case _:
            return str(value)


def _is_table(info: ins.Type) -> bool:
    return _struct(info.item_type if isinstance(info, ins.VarTupleType) else info) is not None


def _struct(info: ins.Type) -> ins.StructType | None:
    options = info.types if isinstance(info, ins.UnionType) else (info,)
    return next((option for option in options if isinstance(option, ins.StructType)), None)
