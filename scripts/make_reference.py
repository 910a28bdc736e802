#!/usr/bin/env python3
"""Writes docs/configuration.md from the configuration's types; a test says when it has to be run again.

.venv/bin/python scripts/make_reference.py          writes it
.venv/bin/python scripts/make_reference.py --print  only prints it
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect as ins

from gateway.config import Config, schema, sections
from gateway.config.values import PER_KIND, RECLAIM_SECONDS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration reference

Every key of `config.toml`, made from the types that the gateway itself reads it by
(`scripts/make_reference.py`); a test holds the two equal. [`config.toml`](../config.toml) has the same
keys with their defaults and longer comments, and starts the demonstration.

It is read strictly: an unknown key, a wrong type, a value out of range, a name given twice or one that
nothing has stops the start with exit status 2 and a line for each fault. `gateway check` says the same
without starting anything, and a [reload](reload.md) changes nothing then. Keys ending in `_seconds` are
seconds, fractions allowed, keys ending in `_bytes` bytes. A string may hold `${NAME}` or
`${NAME:-default}` from the environment, `$$` is a dollar; secrets may be `file:/path`. Relative paths
start at the file's folder; those behind `file:` and `unix:` are absolute.
"""

NAMES = {
    "server.tls": "[server.tls]",
    "engine": "[[engine]]",
    "route": "[[route]]",
    "route.to": "`to` of [[route]]",
    "tenant": "[[tenant]]",
}


def source_of(struct: type) -> str:
    """The text of a table's class."""
    for module in (sections, schema):
        text = Path(str(module.__file__)).read_text()
        if f"class {struct.__name__}(" in text:
            return text.split(f"class {struct.__name__}(")[1].split("\nclass ")[0]
    raise LookupError(struct)


def meaning(body: str, name: str) -> str:
    """What stands below a key, in one line, as Markdown."""
    found = re.search(rf'\n    {name}: .*\n    """((?:.|\n)*?)"""', body)
    assert found is not None, name
    text = " ".join(found[1].split()).replace("|", "\\|")
    return re.sub(r'(?<!`)"([^"` ]+)"', r'`"\1"`', text)


def kind(info: ins.Type) -> str:
    """A type and its range, for people."""
    match info:
        case ins.UnionType(types=types):
            return kind(next(each for each in types if not isinstance(each, ins.NoneType)))
        case ins.Metadata(type=inner, extra=extra):
            form = (extra or {})["format"]
            word = "secret" if form.secret else "path" if form.path else "text"
            return word if isinstance(inner, ins.StrType) else kind(inner)
        case ins.LiteralType(values=values):
            return " or ".join(f'`"{value}"`' for value in values)
        case ins.IntType() | ins.FloatType():
            low = (
                f" above {info.gt}"
                if info.gt is not None
                else f" from {info.ge}"
                if info.ge is not None
                else ""
            )
            high = f" to {info.le:,}" if info.le is not None else ""
            return f"{'integer' if isinstance(info, ins.IntType) else 'number'}{low}{high}"
        case ins.VarTupleType(item_type=item):
            return f"list of {kind(item)}"
        case ins.DictType(value_type=value):
            return f"table of {kind(value)}"
        case _:
            return "table"


def default(field: msgspec.structs.FieldInfo, path: str) -> str:
    """A key's default, as the file would have it."""
    if path == "engine.reclaim_seconds":
        assert field.default == PER_KIND
        return ", ".join(f"{name} {each.default:g}" for name, each in RECLAIM_SECONDS.items())
    if field.default is msgspec.NODEFAULT:
        return "**required**" if field.default_factory is msgspec.NODEFAULT else "none"
    value: Any = field.default
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple):
        return "`[" + ", ".join(f'"{each}"' for each in value) + "]`"
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def table(struct: type, path: str) -> list[str]:
    """One table of the file, and those within it."""
    body = source_of(struct)
    said = " ".join(re.findall(r'"""((?:.|\n)*?)"""', body)[0].split())
    said = said.partition(": ")[2] or said
    lines = ["", f"## {NAMES.get(path, f'[{path}]')}", "", said[:1].upper() + said[1:], ""]
    lines += ["| key | what it may be | default | meaning |", "|---|---|---|---|"]
    within = []
    infos = {each.name: each.type for each in ins.type_info(struct).fields}  # type: ignore[attr-defined]
    for field in msgspec.structs.fields(struct):
        inner = struct_in(infos[field.name])
        if inner is not None:
            within.append((inner, f"{path}.{field.name}"))
        lines.append(
            f"| `{field.name}` | {kind(infos[field.name])} | {default(field, f'{path}.{field.name}')} |"
            f" {meaning(body, field.name)} |"
        )
    for inner, at in within:
        lines += table(inner, at)
    return lines


def struct_in(info: ins.Type) -> type | None:
    """The table that a key holds, or holds a list of."""
    match info:
        case ins.UnionType(types=types):
            return next((found for each in types if (found := struct_in(each)) is not None), None)
        case ins.VarTupleType(item_type=item):
            return struct_in(item)
        case ins.StructType(cls=cls):
            return cls
        case _:
            return None


def reference() -> str:
    """The whole page."""
    lines = [HEAD.rstrip()]
    for field in ins.type_info(Config).fields:  # type: ignore[attr-defined]
        struct = struct_in(field.type)
        assert struct is not None
        lines += table(struct, field.name)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(reference(), end="")
    else:
        PAGE.write_text(reference())
