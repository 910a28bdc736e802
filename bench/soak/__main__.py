"""`scripts/soak [--requests N | --seconds S] [--fuzz-seconds N]`: load until the end, then one table.

Exit code 0 when nothing was left over and nobody was wronged, 1 when something or somebody was, 2 for a wrong
call, 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from bench import processes
from bench.loop import loop_factory
from bench.report import as_report, machine, print_table, write_json
from bench.soak.clients import Round, Visit
from bench.soak.mix import Plan, plan
from bench.soak.target import SLOTS, Engine, Gateway, started
from bench.soak.verdict import SHOWN, Seen, Soak
from bench.targets import HOST, ROOT, BenchError

AT_ONCE = 96
"""Clients at a time: with 16 slots most of them wait in the queue."""

ROUNDS = 10
LEAST_A_ROUND = 500
LEAST_ROUND_SECONDS = 2.0
WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Options:
    """What was asked for; 0 requests: for as many seconds."""

    requests: int
    seconds: float
    seed: int
    fuzz_seconds: float
    reload_seconds: float
    json: str


def parse(arguments: list[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="scripts/soak",
        description="Mixed load on the gateway, and whether anything is left over from it.",
    )
    parser.add_argument("--requests", type=int, default=0, help="so many requests (default: 20000)")
    parser.add_argument("--seconds", type=float, default=0.0, help="for so long, instead")
    parser.add_argument("--seed", type=int, default=1, help="another mix of the same kind (default: 1)")
    parser.add_argument("--fuzz-seconds", type=float, default=0.0, help="then hostile bytes for so long")
    parser.add_argument(
        "--reload-seconds", type=float, default=0.0, help="a reload so often, with other slots"
    )
    parser.add_argument("--json", metavar="FILE", default="", help="write all figures there as well")
    given = parser.parse_args(arguments)
    if min(given.requests, given.seconds, given.fuzz_seconds) < 0 or (given.requests and given.seconds):
        parser.error("give --requests or --seconds, a number above 0")
    requests = given.requests or (0 if given.seconds or given.fuzz_seconds else 20_000)
    return Options(requests, given.seconds, given.seed, given.fuzz_seconds, given.reload_seconds, given.json)


class Load:
    """Hands out the plans, round by round."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.given = 0
        self.until = time.monotonic() + options.seconds

    @property
    def over(self) -> bool:
        if self.options.requests:
            return self.given >= self.options.requests
        return time.monotonic() >= self.until

    def round(self) -> Iterator[Plan]:
        options, first = self.options, self.given
        most = max(LEAST_A_ROUND, options.requests // ROUNDS)
        until = time.monotonic() + max(LEAST_ROUND_SECONDS, options.seconds / ROUNDS)
        while not self.over:
            if self.given - first >= most if options.requests else time.monotonic() >= until:
                break
            yield plan(options.seed, self.given)
            self.given += 1


def soak(options: Options) -> Soak:
    result = Soak()
    with started() as (engine, gateway):
        _play(Load(options), result, engine, gateway)
        result.exit_code = gateway.end()
        result.records, result.other_lines = gateway.read_records()
        result.log = gateway.read_log()
    return result


def _play(load: Load, result: Soak, engine: Engine, gateway: Gateway) -> None:
    since, cpu = time.monotonic(), gateway.tree.cpu()
    with asyncio.Runner(loop_factory=loop_factory()[1]) as runner:
        while not load.over:
            one = Round(f"{HOST}:{gateway.port}", gateway.port, load.round(), AT_ONCE)
            visits = runner.run(_with_reloads(one, gateway, load.options.reload_seconds))
            result.seen.update(
                (visit.plan.name, Seen(visit.plan, visit.seen, visit.status > 0)) for visit in visits
            )
            gateway.check_alive()
            result.rounds.append(gateway.sample())
            result.peak = max(result.peak, engine.stats()["most_held"])
            if len(result.rounds) == WARM_UP_ROUNDS:
                result.first = gateway.sample(settled=True)
            rate = len(result.seen) / (time.monotonic() - since)
            print(
                f"\r{len(result.seen)} requests, {rate:.0f} a second  ", end="", flush=True, file=sys.stderr
            )
    print(file=sys.stderr)
    result.seconds, result.cpu_seconds = time.monotonic() - since, gateway.tree.cpu().since(cpu)
    if len(result.rounds) > WARM_UP_ROUNDS:
        result.last = gateway.sample(settled=True)


async def _with_reloads(one: Round, gateway: Gateway, seconds: float) -> list[Visit]:
    """Play a round, and reload meanwhile, to fewer slots and back."""

    async def reloads() -> None:
        for number in itertools.count(1):
            await asyncio.sleep(seconds)
            gateway.reload(SLOTS - 6 * (number % 2))

    task = asyncio.create_task(reloads()) if seconds else None
    try:
        return await one.run()
    finally:
        if task is not None:
            task.cancel()
            gateway.reload(SLOTS)


def fuzz(seconds: float) -> bool:
    """Whether nobody was harmed by hostile bytes."""
    command = [sys.executable, "-m", "tests.fuzz", "--seconds", str(seconds)]
    return subprocess.run(command, cwd=ROOT, timeout=seconds * 2 + 120, check=False).returncode == 0


def main() -> int:
    options = parse(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    rest = processes.rest_cpu()
    if rest is not None:
        os.sched_setaffinity(0, {rest})
    gc.set_threshold(100_000, 50, 50)
    holds = True
    try:
        if options.requests or options.seconds:
            holds = report(soak(options), options)
        if options.fuzz_seconds:
            os.sched_setaffinity(0, processes.CPUS)
            holds = fuzz(options.fuzz_seconds) and holds
    except BenchError as error:
        print(f"scripts/soak: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; what was started has been ended", file=sys.stderr)
        return 130
    return 0 if holds else 1


def report(result: Soak, options: Options) -> bool:
    outcome = result.outcome()
    print_table([outcome])
    for what, found in outcome.figures.items():
        for one in found[:SHOWN]:
            print(f"  {what}: {one}")
    if options.json:
        write_json(options.json, as_report([outcome], machine()))
    return outcome.holds()


if __name__ == "__main__":
    sys.exit(main())
