"""`deploy/grafana.json` and `deploy/alerts.yml`: what they ask for is what the gateway tells."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.test_docs import METRICS, table, words_in

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
ALERTS = (DEPLOY / "alerts.yml").read_text()
GRAFANA: Any = json.loads((DEPLOY / "grafana.json").read_text())
PROMTOOL = shutil.which("promtool")
PROMETHEUS_S = {"instance", "job", "le", "__name__"}


def told() -> dict[str, tuple[str, set[str]]]:
    """Every metric, with its type and labels; a test of the documentation holds that table."""
    return {
        words_in(name)[0]: (kind, set(words_in(labels)))
        for name, kind, labels, *_ in table(METRICS, "metric", "type", "labels")
    }


def expressions() -> Iterator[str]:
    for found in re.finditer(r"^ +expr: (.*)$", ALERTS, re.MULTILINE):
        yield found[1]
    for panel in GRAFANA["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in GRAFANA["templating"]["list"]:
        yield variable.get("definition", "")
    for annotation in GRAFANA["annotations"]["list"]:
        yield annotation["expr"]


@pytest.mark.parametrize("expression", sorted({each for each in expressions() if each}))
def test_it_asks_for_what_there_is(expression: str) -> None:
    metrics = told()
    names = re.findall(r"\b(gateway_\w+|process_\w+|up)\b", re.sub(r'"[^"]*"', '""', expression))
    assert names
    for name in names:
        if name == "up" or name.startswith("process_"):
            continue
        base = re.sub(r"_bucket$", "", name)
        assert base in metrics, name
        assert (name != base) == (metrics[base][0] == "histogram"), f"{name} is a {metrics[base][0]}"
        for inside in re.findall(re.escape(name) + r"\{([^}]*)\}", expression):
            used = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", inside))
            assert used <= metrics[base][1] | PROMETHEUS_S, f"{name} has no {used}"
    for inside in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        asked = {label.strip() for label in inside.split(",")}
        known = set().union(
            *(metrics[re.sub("_bucket$", "", n)][1] for n in names if n in metrics or "_bucket" in n)
        )
        assert asked <= known | PROMETHEUS_S


def test_counters_are_asked_for_their_growth() -> None:
    counters = {name for name, (kind, _) in told().items() if kind == "counter"}
    for expression in expressions():
        for name in counters & set(re.findall(r"\w+", expression)):
            grown = re.search(rf"(?:rate|increase|changes)\({name}\b|{name} - ", expression)
            assert grown or "_released_total" in name, expression


def test_panels_lie_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in GRAFANA["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in GRAFANA["panels"]}) == len(GRAFANA["panels"])


def test_each_alert_says_what_it_means_and_where_to_look() -> None:
    alerts = re.split(r"^ +- alert: ", ALERTS, flags=re.MULTILINE)[1:]
    assert len(alerts) > 10
    for alert in alerts:
        for key in ("expr:", "severity:", "summary:", "description:"):
            assert key in alert, alert.splitlines()[0]


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Debian's package prometheus")
async def test_prometheus_takes_the_rules() -> None:
    assert PROMTOOL is not None
    command = [PROMTOOL, "check", "rules", str(DEPLOY / "alerts.yml")]
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
