"""What looking costs where it matters most: an abort storm with the dashboard open, traces and JSON logs on.

The same storm on two gateways in turns, one of them as it comes and one with everything on.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from bench import processes
from bench.figures import Result, costs, percentiles
from bench.leaving import STORM, TEARDOWN, join_teardowns
from bench.measure import run_load, warm
from bench.report import Outcome, at_most, spread
from bench.reporting import report_books, report_others
from bench.targets import HOST, ROOT, Engine, Gateway, free_port, get

MOST_TIMES = 1.5
"""The p99 of the teardowns may be so many times what it is without."""


def observed(rounds: int) -> Outcome:
    """500 leavers over two seconds, with everything on that looks at them, and without."""
    plan = replace(STORM, name="observed")
    outcome = Outcome("observed", f"{plan.streams} leavers over 2 s, with everything on; {rounds} rounds")
    got: dict[str, list[Result]] = {"with": [], "without": []}
    with _onlooker() as onlooker, Engine() as engine:
        on = f'\n[traces]\nendpoint = "http://{HOST}:{onlooker.port}"\n\n[log]\nformat = "json"\n'
        with Gateway(engine, slots=500) as without, Gateway(engine, slots=500, more=on) as everything:
            gateways = {"with": everything, "without": without}
            for gateway in gateways.values():
                warm(gateway, engine)
            onlooker.look_at(everything)
            for number in range(rounds):
                for name, gateway in gateways.items():
                    engine.reset()
                    result = run_load(gateway, replace(plan, name=f"observed-{name}-{number}"))
                    result["ledger"], result["gauges"] = gateway.idle()
                    join_teardowns(result, engine.settled())
                    del result["finished"]
                    got[name].append(result)
            whole = "gateway_spans_dropped_total 0.0" in get(everything.admin or 0, "/metrics")[1]
            seen = onlooker.seen()
    outcome.figures = dict(got)
    late = {
        name: percentiles([value for result in results for value in result["teardown_ms"]])
        for name, results in got.items()
    }
    for name, figures in late.items():
        outcome.add(f"{TEARDOWN}, {name}", spread(figures, "p50", "p99", "max"))
    p99 = {
        name: statistics.median(percentiles(result["teardown_ms"])["p99"] or 0.0 for result in results)
        for name, results in got.items()
    }
    times = p99["with"] / p99["without"]
    outcome.require(
        "p99, median of the rounds: with / without",
        f"{p99['with']:.2f} / {p99['without']:.2f}: {times:.2f}",
        at_most(times, MOST_TIMES),
        f"<= {MOST_TIMES:g} times",
    )
    spent = {name: statistics.median(costs(results, "events")) for name, results in got.items()}
    outcome.add("CPU per event, with / without", f"{spent['with']:.1f} / {spent['without']:.1f} us")
    outcome.require(
        "batches of spans / events of the dashboard",
        f"{seen['batches']} / {seen['events']}" + ("" if whole else ", SPANS DROPPED"),
        whole and all(seen.values()),
        "some, all",
    )
    report_books(outcome, got["with"] + got["without"])
    report_others(outcome, got["with"] + got["without"])
    return outcome


@contextmanager
def _onlooker() -> Iterator[_Onlooker]:
    onlooker = _Onlooker()
    try:
        yield onlooker
    finally:
        onlooker.process.kill()
        onlooker.process.wait()


class _Onlooker:
    """See :mod:`bench.onlooker`; it has a process of its own."""

    def __init__(self) -> None:
        self.port, pipe = free_port(), subprocess.PIPE
        command = [sys.executable, "-m", "bench.onlooker", str(self.port)]
        self.process = processes.start(command, cpu=processes.rest_cpu(), cwd=ROOT, stdin=pipe, stdout=pipe)

    def look_at(self, gateway: Gateway) -> None:
        """Read its dashboard from now on."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"%d\n" % (gateway.admin or 0))
        self.process.stdin.flush()

    def seen(self) -> dict[str, int]:
        """Look no more; return what was seen."""
        out, _ = self.process.communicate(timeout=30)
        seen: dict[str, int] = json.loads(out)
        return seen
