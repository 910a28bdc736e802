"""The bench's pure parts: percentiles, both ends' records joined, the table, the charts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import baselines
from bench.charts import CHARTS, draw
from bench.figures import costs, drained_ms, median_of, median_rate, percentiles, teardowns
from bench.plan import Plan, Probe, from_json, to_json
from bench.report import Outcome, as_report, print_table
from bench.svg import across, number, upward
from bench.watch import socket_bytes


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles([float(value) for value in range(100, 0, -1)]) == {
        "p50": 50.0,
        "p95": 95.0,
        "p99": 99.0,
        "max": 100.0,
    }
    assert set(percentiles([]).values()) == {None}
    assert set(percentiles([7.0]).values()) == {7.0}


def test_the_median_over_rounds_passes_over_rounds_without_a_value() -> None:
    rounds = [{"ms": {"p50": value}} for value in (3.0, None, 1.0, 2.0)]
    assert median_of(rounds, "ms") == {"p50": 2.0}
    assert median_rate([{"events": 10, "seconds": 2}, {"events": 30, "seconds": 2}]) == 10.0
    assert costs([{"target_cpu_seconds": 0.5, "events": 1000}], "events") == [500.0]


def test_a_teardown_is_the_span_between_both_ends_records() -> None:
    result = {
        "leavers": [
            {"user": "a", "left": 10.0, "events": 3},
            {"user": "b", "left": 10.0, "events": 3},
            {"user": "c", "left": 10.0, "events": 3},
        ]
    }
    ended = [
        {"user": "a", "outcome": "aborted", "ended": 10.002, "tokens": 5, "recent": [9.9, 10.001]},
        {"user": "b", "outcome": "done", "ended": 10.5, "tokens": 9, "recent": [10.4]},
    ]
    joined = teardowns(result, {"ended": ended, "most_held": 3, "running": 1, "waiting": 0})
    assert joined["left"] == 3
    assert joined["torn_down"] == 1
    assert joined["teardown_ms"] == pytest.approx([2.0])
    assert joined["tokens_after_close"] == joined["tokens_after_close_max"] == 1
    assert joined["tokens_unread"] == 2
    assert joined["still_running"] == 1


def test_draining_is_counted_from_the_engines_last_write() -> None:
    stats = {"ended": [{"user": "a", "outcome": "done", "ended": 2.0}]}
    result = {"finished": [{"user": "a", "last": 2.5}, {"user": "unknown", "last": 9.0}]}
    assert drained_ms(result, stats) == pytest.approx([500.0])


def test_the_kernel_s_share_is_what_is_received_queued_and_in_the_backlog() -> None:
    listing = "ESTAB 0 9 127.0.0.1:1 127.0.0.1:2\n\t skmem:(r1,rb9,t9,tb9,f4294967290,w20,o9,bl300,d9)\n"
    assert socket_bytes(listing * 2) == 642


def test_a_plan_survives_its_way_to_the_load() -> None:
    plan = Plan("http://127.0.0.1:1/x", "n", 1, 2, 3, window=(1.0, 2.0), probes=[Probe("p", "u")])
    again = from_json(to_json(plan).decode())
    assert again.probes == plan.probes
    assert again.reading == plan.reading
    assert tuple(again.window or ()) == plan.window


def test_the_table_has_a_column_for_each_target_and_says_what_was_missed() -> None:
    outcome = Outcome("steady", "what")
    outcome.add("cost", {"gateway": "1 us", "pooled": "2 us"})
    outcome.require("latency", "3 ms", False, "<= 2 ms")
    outcome.notes.append("nginx (not installed)")
    out = io.StringIO()
    print_table([outcome, Outcome("bulk", "what", failed="it broke")], out)
    head, _, *lines = out.getvalue().splitlines()
    assert head.split() == ["scenario", "measure", "gateway", "direct", "pooled", "must", "hold"]
    assert lines[0].split() == ["steady", "cost", "1", "us", "2", "us"]
    assert lines[1].endswith("MISSED")
    assert any(line.startswith("bulk") and line.endswith("FAILED") for line in lines)
    assert "left out: nginx (not installed)" in lines
    assert not outcome.holds()


def test_what_is_not_installed_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "nginx", lambda: None)
    monkeypatch.setattr(baselines, "PACKAGES", ("no_such_package",))
    chosen, notes = baselines.choose(("pooled", "nginx"))
    assert chosen == []
    assert notes == ["pooled (not installed: no_such_package)", "nginx (not installed)"]


def everything() -> list[Outcome]:
    """A report with what each chart needs."""
    first = {"p50": 1.5, "p95": 2.0, "p99": 3000.0, "max": 4000.0}
    rounds: list[dict[str, Any]] = [{"ttft_ms": first, "teardown_ms": [0.2, 0.4, 7.0]}]
    us = {"gateway": [50.0, 60.0], "naive <&>": [1.0], "pooled": [120.0]}
    return [
        Outcome("steady", "", figures={"us_per_event": us, "gateway": rounds, "direct": rounds}),
        Outcome("leavers-500", "", figures={"rounds": rounds, "direct": rounds[0]}),
        Outcome("article-a", "", figures={"naive": rounds, "gateway": rounds}),
        Outcome("growth", "", figures={"us_per_event_by_streams": {50: [40.0], 500: [42.0], 2000: [50.0]}}),
    ]


def test_the_charts_are_well_formed_and_named_with_units(tmp_path: Path) -> None:
    written = draw(as_report(everything(), {}), str(tmp_path))
    assert len(written) == len(CHARTS)
    for path in written:
        text = " ".join(ElementTree.parse(path).getroot().itertext())
        assert "(ms" in text or "(us)" in text


def test_a_report_without_a_chart_s_scenario_draws_the_others(tmp_path: Path) -> None:
    assert draw(as_report(everything()[:1], {}), str(tmp_path))
    assert draw(as_report([Outcome("steady", "", failed="it broke")], {}), str(tmp_path)) == []


def test_scales_put_their_ends_where_they_belong() -> None:
    log, linear = across(0.1, 1000, log=True), upward(0, 87)
    assert log(0.1) < log(1) < log(1000)
    assert log.ticks() == pytest.approx([0.1, 1, 10, 100, 1000])
    assert linear(0) > linear(87)
    assert linear.ticks() == [0, 20, 40, 60, 80]
    assert number(1234.5) == "1,234"
    assert number(0.4337) == "0.434"
