"""What is different between two configurations, for operators: one line for each key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import msgspec.inspect as ins

from gateway.config.formats import check_digest
from gateway.config.schema import Config
from gateway.config.values import MASK

_NAMED_BY = {"engine": "name", "tenant": "name", "route": "model"}

NEEDS_RESTART = frozenset(
    {
        "server.listen",
        "server.admin",
        "server.handover",
        "traces.endpoint",
        "traces.sample",
        "traces.service_name",
        "server.tls",
        "stream.stall_seconds",
        "usage.path",
        "usage.flush_seconds",
        "usage.keep_days",
    }
)
"""Keys that a reload can't change: sockets and files stay open. Of `server.tls` it is whether there is one;
its files are read again."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is different. `key` is its path, without an item's name."""

    key: str
    text: str

    @property
    def needs_restart(self) -> bool:
        """Whether a reload can't do it."""
        return self.key in NEEDS_RESTART


def changes(old: Config, new: Config) -> list[Change]:
    """List the differences, in the order of the schema. Secrets aren't shown."""
    found: list[Change] = []
    for section in Config.__struct_fields__:
        before, after = getattr(old, section), getattr(new, section)
        if section in _NAMED_BY:
            found += _of_items(section, before, after)
        else:
            found += _of_table(section, section, before, after)
    return found


def _of_items(section: str, before: Any, after: Any) -> Iterator[Change]:
    key = _NAMED_BY[section]
    old, new = ({getattr(each, key): each for each in items} for items in (before, after))
    for name in old.keys() - new.keys():
        yield Change(section, f'{section} "{name}": removed')
    for name, item in new.items():
        if name not in old:
            yield Change(section, f'{section} "{name}": added')
        else:
            yield from _of_table(section, f'{section} "{name}"', old[name], item)
    if old.keys() == new.keys() and list(old) != list(new):
        yield Change(section, f"{section}: another order")


@cache
def _secrets(table: type[msgspec.Struct]) -> frozenset[str]:
    """Return the keys of a table whose values aren't shown, by their types; a digest isn't shown either."""
    info = ins.type_info(table)
    assert isinstance(info, ins.StructType)
    return frozenset(field.name for field in info.fields if _is_secret(field.type))


def _is_secret(info: ins.Type) -> bool:
    match info:
        case ins.UnionType(types=types):
            return any(map(_is_secret, types))
        case ins.VarTupleType(item_type=item) | ins.DictType(value_type=item):
            return _is_secret(item)
        case ins.Metadata(extra=extra):
            form = (extra or {})["format"]
            return form.secret or form.check is check_digest
        case _:
            return False


def _of_table(path: str, shown: str, before: msgspec.Struct, after: msgspec.Struct) -> Iterator[Change]:
    secrets = _secrets(type(before))
    for name in before.__struct_fields__:
        old, new = getattr(before, name), getattr(after, name)
        if old == new:
            continue
        key = f"{path}.{name}"
        if isinstance(old, msgspec.Struct) and isinstance(new, msgspec.Struct):
            yield from _of_table(key, f"{shown}.{name}", old, new)
        elif name in secrets:
            yield Change(key, f"{shown}.{name}: changed ({MASK})")
        else:
            yield Change(key, f"{shown}.{name}: {_shown(old)} -> {_shown(new)}")


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return msgspec.json.encode(value).decode()
