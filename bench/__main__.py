"""`scripts/bench [NAME ...] [--rounds N | --quick] [--json FILE] [--charts DIR]`: scenarios, and their table.

Exit code 0 when everything that must hold does, 1 when something doesn't, 2 for a wrong call, 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import time
from typing import Any

from bench import baselines, measure, processes
from bench.charts import draw
from bench.compare import UNFIT
from bench.report import Outcome, as_report, machine, print_table, write_json
from bench.scenarios import SCENARIOS
from bench.targets import BenchError

FILES = 65_536  # descriptors: each stream takes one in the clients, one in the engine and two in a proxy


def parse(arguments: list[str]) -> argparse.Namespace:
    listing = "\n".join(f"  {name:15} {it.what} ({it.rounds} rounds)" for name, it in SCENARIOS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure the gateway between a simulated (or real) engine and many clients, on loopback.",
        epilog=f"scenarios (default: all):\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", metavar="NAME", nargs="*")
    parser.add_argument("--rounds", type=int, default=0, help="repetitions (default: each scenario's own)")
    parser.add_argument("--quick", action="store_true", help="one round each, and only the pooled baseline")
    parser.add_argument(
        "--patience",
        metavar="SECONDS",
        type=float,
        help="how long to wait, in all, for an idle machine (default: 120)",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures there as well")
    parser.add_argument("--charts", metavar="DIR", help="draw what was measured, as SVG files")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in SCENARIOS]
    if unknown:
        parser.error(f"there is no scenario {unknown[0]!r}; there are {', '.join(SCENARIOS)}")
    if options.quick:
        options.rounds = options.rounds or 1
        baselines.only("pooled")
    if options.rounds < 0:
        parser.error("--rounds can't be negative")
    return options


def raise_limit() -> None:
    """As many descriptors as may be had; the processes started inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def run_one(name: str, rounds: int) -> Outcome:
    scenario = SCENARIOS[name]
    started = time.monotonic()
    print(f"{name}: {scenario.what} ...", end="", flush=True, file=sys.stderr)
    try:
        outcome = scenario.run(rounds or scenario.rounds)
    except BenchError as error:
        outcome = Outcome(name, scenario.what, failed=str(error))
    except UNFIT as error:
        outcome = Outcome(name, scenario.what, failed=f"{type(error).__name__}: {error}")
    print(f" {time.monotonic() - started:.0f} s", file=sys.stderr)
    return outcome


def conclude(outcomes: list[Outcome], about: dict[str, Any], options: argparse.Namespace) -> None:
    """The table, what failed and why, the machine; the report and its charts where they are wanted."""
    print_table(outcomes)
    for outcome in outcomes:
        if outcome.failed:
            print(f"\n{outcome.name} failed: {outcome.failed}")
    gateway, rest = about["gateway_on_cpu"], about["rest_on_cpu"]
    pinned = "not pinned" if gateway is None else f"gateway on CPU {gateway}, the rest on CPU {rest}"
    print(f"\n{about['cpu']}, {about['cores']} cores, {about['python']}, {about['bench_loop']}; {pinned}")
    report = as_report(outcomes, about)
    if options.json:
        write_json(options.json, report)
    if options.charts:
        draw(report, options.charts)


def main() -> int:
    options = parse(sys.argv[1:])
    # Both unwind, so that whatever was started is ended. (SIGINT comes ignored to a shell's background job.)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    raise_limit()
    if options.patience is not None:
        measure.patience.left = options.patience
    about = machine()
    rest = processes.rest_cpu()
    about["gateway_on_cpu"], about["rest_on_cpu"] = processes.gateway_cpu(), rest
    if rest is not None:
        os.sched_setaffinity(0, {rest})
    outcomes: list[Outcome] = []
    interrupted = False
    try:
        for name in options.names or SCENARIOS:
            outcome = run_one(name, options.rounds)
            outcomes.append(outcome)
    except KeyboardInterrupt:
        print("\ninterrupted; what was started has been ended", file=sys.stderr)
        interrupted = True
    about["load_average_after"] = os.getloadavg()[0]
    if outcomes:
        conclude(outcomes, about, options)
    if interrupted:
        return 130
    return 0 if all(outcome.holds() for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
