"""What an operator who wrote an unknown key probably meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache

import msgspec.inspect as ins

from gateway.config.faults import key_path
from gateway.config.schema import described

SIMILARITY = 0.7
"""Of difflib's ratio: one slip in four letters counts; `slots` and `models` don't resemble each other."""

SURELY = 0.85
"""So much alike that it is meant although another table has a key of just this name: `model` for `models`."""

SYNONYMS = {
    "baseurl": "url",
    "address": "url",
    "endpoint": "url",
    "type": "kind",
    "backend": "kind",
    "parallel": "slots",
    "concurrency": "slots",
    "maxnumseqs": "slots",
    "maxrunningrequests": "slots",
    "host": "listen",
    "port": "listen",
    "bind": "listen",
}
"""What others call it, as it is compared: vLLM, SGLang, llama.cpp, and common sense."""

UNITS = ("_seconds", "_bytes")
CONFIG_TABLE = ""


def key_hint(key: str, table: str) -> str:
    """For a key that `table` (`server`, `server.tls`, `engine`, or "" for the top) doesn't have."""
    tables = _tables()
    here = tables.get(table, ())
    if near := _spelled_otherwise(key, here) or nearest(key, here, SURELY):
        return f'did you mean "{near}"?'
    if (ours := SYNONYMS.get(_plain(key))) in here:
        return f'did you mean "{ours}"?'
    for other, keys in tables.items():
        if other != table and key in keys and key.rstrip("s") not in here:
            return f"it belongs to {_place(other)}"
    if near := nearest(key, here):
        return f'did you mean "{near}"?'
    for other, keys in tables.items():
        if other != table and (near := nearest(key, keys)):
            return f'did you mean "{near}" of {_place(other)}?'
    return ""


def nearest(word: str, candidates: Iterable[str], similarity: float = SIMILARITY) -> str | None:
    """The candidate a typo away from the word, if there is one."""
    by_plain = {_plain(candidate): candidate for candidate in candidates}
    close = get_close_matches(_plain(word), by_plain, n=1, cutoff=similarity)
    return by_plain[close[0]] if close else None


def _spelled_otherwise(key: str, candidates: Iterable[str]) -> str | None:
    """Right but for case, `-` or `_`, or the unit at its end."""
    plain = _plain(key)
    for candidate in candidates:
        if plain in {_plain(candidate), *(_plain(candidate.removesuffix(unit)) for unit in UNITS)}:
            return candidate
    return None


def _plain(word: str) -> str:
    # A key may be of any length, and difflib takes quadratic time.
    return word[:64].lower().replace("-", "").replace("_", "")


def _place(table: str) -> str:
    if table == CONFIG_TABLE:
        return "the top of the file"
    head, _, inner = table.partition(".")
    if head not in ("engine", "tenant", "route"):
        return f"[{table}]"
    return f'"{inner}" of [[{head}]]' if inner else f"[[{head}]]"


@cache
def _tables() -> dict[str, tuple[str, ...]]:
    """Every table's keys, from the schema."""
    return dict(_walk(described(), CONFIG_TABLE))


def _walk(info: ins.StructType, table: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield table, tuple(field.name for field in info.fields)
    for field in info.fields:
        kind = field.type
        options = kind.types if isinstance(kind, ins.UnionType) else (kind,)
        for option in options:
            inner = option.item_type if isinstance(option, ins.VarTupleType) else option
            if isinstance(inner, ins.StructType):
                yield from _walk(inner, key_path(table, field.name))
