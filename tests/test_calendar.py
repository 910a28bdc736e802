"""The wall clock jumps; nothing may depend on it but what is written down for people."""

from __future__ import annotations

import ast
from pathlib import Path

import gateway

_ASKED = {("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"), ("date", "today")}
_ASKED |= {("time", name) for name in ("time", "time_ns", "localtime", "gmtime", "ctime", "strftime")}
WRITERS = {
    "client.py",  # the Date of an answer
    "models.py",  # when the list of models was "created"
    "telemetry.py",  # when a request came: its record
    "tracing.py",  # when spans began and ended
    "usagereport.py",  # --since 3d
    "usagestore.py",  # the same, of a row
}


def test_only_what_is_written_down_asks_the_calendar() -> None:
    top = Path(gateway.__file__).parent
    asking = set()
    for path in top.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                assert not {name for _, name in _ASKED} & {alias.name for alias in node.names}, path
            whose = node.value if isinstance(node, ast.Attribute) else None
            if (
                isinstance(node, ast.Attribute)
                and isinstance(whose, ast.Name)
                and (whose.id, node.attr) in _ASKED
            ):
                asking.add(str(path.relative_to(top)))
    assert asking == WRITERS
