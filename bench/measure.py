"""One load on one target: run it, and read the CPU times around it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import replace

from bench import processes
from bench.figures import Result
from bench.plan import Plan, to_json
from bench.targets import ROOT, BenchError, Engine, Target
from bench.watch import NOTHING, Look, Watch

patience = processes.Patience(120)
LOAD_START_SECONDS = 1.5  # for its process to be there, where the start has to be known beforehand
WARM = Plan(url="", name="warm", streams=8, requests=40, tokens=20, tps=400)


def run_load(target: Target, plan: Plan, look: Look = NOTHING) -> Result:
    """Run the clients in a process of their own, when the machine is quiet.

    Adds `target_cpu_seconds`, of them `target_system_seconds`, and how much of the cores others used
    meanwhile, `others_on_gateway_core` and `others_on_rest_core`: latencies are only worth something where
    these are near 0. `pace_ns` is what the gateway's core was worth before and behind it. What `look` asks
    for, and the CPU time in the plan's window, are read off meanwhile.
    """
    patience.wait()
    plan = replace(plan, url=plan.url or target.url())
    paces = [processes.pace(processes.gateway_cpu())]
    if plan.window:
        plan = replace(plan, begin_at=time.monotonic() + LOAD_START_SECONDS)
    before = _Reading(target)
    watch = Watch(target, look, plan)
    command = [sys.executable, "-m", "bench.load"]
    cpu, pipe = processes.rest_cpu(), subprocess.PIPE
    process = processes.start(command, cpu=cpu, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        with watch:
            out, err = process.communicate(to_json(plan), timeout=plan.max_seconds + 30)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        raise BenchError(f"the load generator failed: {err.decode(errors='replace')[-500:]}")
    result: Result = json.loads(out)
    result.update(_Reading(target).since(before), **watch.seen())
    result["pace_ns"] = [*paces, processes.pace(processes.gateway_cpu())]
    return result


class _Reading:
    """Who has used how much CPU so far."""

    def __init__(self, target: Target) -> None:
        self.instant = time.monotonic()
        self.cores = [processes.busy(cpu) for cpu in (processes.gateway_cpu(), processes.rest_cpu())]
        self.gateway = target.tree.cpu() if target.tree else None
        self.engine = target.engine.tree.cpu()
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.own = children.ru_utime + children.ru_stime + time.process_time()

    def since(self, earlier: _Reading) -> dict[str, float]:
        seconds = self.instant - earlier.instant
        gateway = system = 0.0
        if self.gateway and earlier.gateway:
            gateway = self.gateway.since(earlier.gateway)
            system = self.gateway.system - earlier.gateway.system
        rest = self.engine.since(earlier.engine) + self.own - earlier.own
        pinned = processes.gateway_cpu() is not None  # if not, both "cores" are the whole machine
        known = (gateway, rest) if pinned else (gateway + rest, gateway + rest)
        others = [
            max(0.0, now - then - ours) / seconds
            for now, then, ours in zip(self.cores, earlier.cores, known, strict=True)
        ]
        return {
            "target_cpu_seconds": gateway,
            "target_system_seconds": system,
            "others_on_gateway_core": others[0],
            "others_on_rest_core": others[1],
        }


def warm(target: Target, engine: Engine) -> None:
    """Imports, connection pools, first-time code paths: not part of any figure."""
    result = run_load(target, WARM)
    if result["outcomes"] != {"completed": WARM.requests}:
        raise BenchError(f"{target.name} doesn't stream: {result['outcomes']} {result['refusals']}")
    engine.reset()
