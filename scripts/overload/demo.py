"""The demonstration of overload: one abort storm, through a naive proxy and through the gateway.

scripts/demo-overload calls this. The engine is simulated, and has room for exactly as many answers as there
are clients, so a calm load never hurts it. But it goes on for a while with what its clients have left. The
naive proxy passes the next request on regardless, and the engine dies; the gateway keeps the slot of a
request that was cut short until the engine has stopped with it.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import trio

from gateway.demo.children import Child
from overload.answers import MODEL
from overload.display import Display, Reading, Result, table
from overload.gpu import Settings, blocks_of
from overload.storm import Plan, Storm

START_SECONDS = 30.0
STOP_SECONDS = 5.0  # from SIGTERM to SIGKILL
LOOK_SECONDS = 0.1
RECLAIM = ("off", "observe", "enforce")

USAGE = """
scripts/demo-overload                 an abort storm, through a naive proxy and through the gateway
scripts/demo-overload --seconds N     how long each of the two lasts, if its engine does (default 12)
scripts/demo-overload --seed N        other clients, leaving at other moments
scripts/demo-overload --reclaim WORD  what the gateway does with the slot of a request cut short: off,
                                      observe or enforce (the default)
scripts/demo-overload --plain         without moving the cursor; so it is anyway when stdout is no terminal
scripts/demo-overload --help

The engine is simulated: a fixed number of KV blocks, and death when it is asked for one more. It goes on for
a while with what its clients have left. Exit status: 0 when the engine behind the naive proxy has died, and
the gateway's has not and all answers it gave to the end were whole; 1 otherwise; 130 after Ctrl-C, which ends
all that was started.
""".strip()


class Failed(Exception):
    """It can't go on, and why."""


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    seconds: float
    reclaim: str
    plain: bool
    storm: Plan
    gpu: Settings


class Processes:
    """What was started for one part, and its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: list[Child] = []

    def start(self, name: str, *command: str) -> Child:
        """Start one."""
        child = Child(name, [sys.executable, "-m", *command], self._folder / f"{name}.log", signal.SIGKILL)
        self._children.append(child)
        return child

    async def ready(self, child: Child, url: str) -> None:
        """Wait until it answers."""
        with trio.move_on_after(START_SECONDS):
            async with httpx.AsyncClient(trust_env=False) as client:
                while child.poll() is None:
                    with contextlib.suppress(httpx.HTTPError):
                        if (await client.get(url)).status_code == 200:
                            return
                    await trio.sleep(0.05)
        raise Failed("\n".join([f"The {child.name} doesn't start.", *child.last_words()]))

    async def end(self) -> None:
        """End them all, the last one first."""
        with trio.CancelScope(shield=True):
            for child in reversed(self._children):
                child.signal(signal.SIGTERM)
                with trio.move_on_after(STOP_SECONDS):
                    while child.poll() is None:  # noqa: ASYNC110 - a process wakes nobody
                        await trio.sleep(0.02)
                child.signal(signal.SIGKILL)
                while child.poll() is None:  # noqa: ASYNC110
                    await trio.sleep(0.02)


@contextlib.asynccontextmanager
async def processes() -> AsyncIterator[tuple[Processes, Path]]:
    """Whatever is started in here is ended with it."""
    with tempfile.TemporaryDirectory(prefix="demo-overload-") as name:
        started = Processes(Path(name))
        try:
            yield started, Path(name)
        finally:
            await started.end()


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on at the moment."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in probes]


def gateway_config(port: int, admin: int, engine: str, options: Options) -> str:
    """The gateway's configuration: as many slots as the engine has room for."""
    slots = options.gpu.blocks // blocks_of(options.storm.prompt_tokens + options.storm.answer_tokens)
    return f"""
[server]
listen = ["127.0.0.1:{port}"]
admin = "127.0.0.1:{admin}"
drain_seconds = 1

[[engine]]
name = "overload"
kind = "vllm"
url = "{engine}"
slots = {slots}
models = ["{MODEL}"]
reclaim = "{options.reclaim}"
reclaim_seconds = 10
"""


async def naive_part(options: Options) -> Result:
    """The storm through the naive proxy."""
    engine, front = free_ports(2)
    async with processes() as (started, _):
        child = await start_engine(started, engine, options)
        proxy = started.start("proxy", "overload.naive", str(front), f"http://127.0.0.1:{engine}")
        await started.ready(proxy, f"http://127.0.0.1:{front}/v1/models")
        return await part("naive proxy", options, child, proxy, (engine, front))


async def gateway_part(options: Options) -> Result:
    """The storm through the gateway."""
    engine, front, admin = free_ports(3)
    async with processes() as (started, folder):
        child = await start_engine(started, engine, options)
        config = folder / "gateway.toml"
        config.write_text(gateway_config(front, admin, f"http://127.0.0.1:{engine}", options))
        gateway = started.start("gateway", "gateway", "serve", "--config", str(config))
        await started.ready(gateway, f"http://127.0.0.1:{admin}/readyz")
        return await part(f"gateway ({options.reclaim})", options, child, gateway, (engine, front))


async def start_engine(started: Processes, port: int, options: Options) -> Child:
    """Start the engine, and wait for it."""
    gpu = options.gpu
    engine = started.start(
        "engine",
        *("overload.engine", "--port", str(port), "--blocks", str(gpu.blocks)),
        *("--step-seconds", str(gpu.step_seconds), "--linger-seconds", str(gpu.linger_seconds)),
    )
    await started.ready(engine, f"http://127.0.0.1:{port}/health")
    return engine


async def part(title: str, options: Options, engine: Child, front: Child, ports: tuple[int, int]) -> Result:
    """The storm, and what can be seen of it, until the time is over or the engine dead."""
    storm = Storm(f"http://127.0.0.1:{ports[1]}", options.storm)
    display, reading = Display(plain=options.plain), Reading()
    begun = trio.current_time()

    async def whole_storm() -> None:
        await storm.run(options.seconds)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery, httpx.AsyncClient(trust_env=False) as client:
        nursery.start_soon(whole_storm)
        while engine.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                reading = Reading.parse((await client.get(f"http://127.0.0.1:{ports[0]}/metrics")).text)
            if front.poll() is not None:
                raise Failed("\n".join([f"The {front.name} has ended.", *front.last_words()]))
            display.show(trio.current_time() - begun, reading, storm.tally)
            await trio.sleep(LOOK_SECONDS)
        nursery.cancel_scope.cancel()

    seconds, died = trio.current_time() - begun, engine.poll() is not None
    last_words = "".join(engine.last_words()[-1:]).strip() if died else ""
    if died:
        reading.died(last_words)
    display.show(seconds, reading, storm.tally, last=True)
    if died:
        display.say(f"The engine is dead: {engine.how_it_ended()}. Its last words:\n  {last_words}")
    return Result(title, seconds, reading, storm.tally, died)


async def run(options: Options) -> int:
    """Both parts and the table; the exit status."""
    display, plan, gpu = Display(plain=options.plain), options.storm, options.gpu
    display.say(
        f"The engine has {gpu.blocks} KV blocks, room for {gpu.blocks // plan_blocks(plan)} whole answers of "
        f"{plan_blocks(plan)}. It goes on for {gpu.linger_seconds:g} s when a client has left.\n"
        f"The storm has {plan.clients} clients: {plan.patient} stay to the end, {plan.leavers} leave after a "
        f"moment and ask again at once.\n{display.legend()}"
    )
    display.say("\n1. Through a naive proxy, which closes its connection to the engine when a client leaves:")
    naive = await naive_part(options)
    display.say(f'\n2. Through the gateway, reclaim = "{options.reclaim}":')
    gateway = await gateway_part(options)
    display.say(f"\n{table([naive, gateway])}\n")
    faults = list(complaints(naive, gateway))
    for fault in faults:
        display.say(fault)
    if not faults:
        display.say("The same storm killed the engine through the naive proxy, and not through the gateway.")
    return 1 if faults else 0


def plan_blocks(plan: Plan) -> int:
    """How many blocks one whole answer takes."""
    return blocks_of(plan.prompt_tokens + plan.answer_tokens)


def complaints(naive: Result, gateway: Result) -> Iterator[str]:
    """What didn't go as it should."""
    if not naive.died:
        yield "The engine behind the naive proxy has survived."
    if gateway.died:
        yield "The gateway's engine has died."
    elif not gateway.tally.whole or gateway.tally.cut:
        yield f"The gateway has not given whole answers: {gateway.tally.faults}"


async def run_until_stopped(options: Options) -> int:
    """The same, or 130 if Ctrl-C or a signal comes first."""
    status = 130
    async with trio.open_nursery() as nursery:

        async def stop_on_signal(*, task_status: trio.TaskStatus[None]) -> None:
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
                task_status.started()
                async for _ in signals:
                    nursery.cancel_scope.cancel()

        await nursery.start(stop_on_signal)
        status = await run(options)
        nursery.cancel_scope.cancel()
    return status


def parse_options() -> Options:
    """Read the command line."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(USAGE)
        sys.exit(0)
    parser = argparse.ArgumentParser(prog="scripts/demo-overload", add_help=False)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reclaim", choices=RECLAIM, default="enforce")
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    plain = given.plain or not sys.stdout.isatty()
    return Options(given.seconds, given.reclaim, plain, Plan(seed=given.seed), Settings())


def main() -> int:
    """The exit status."""
    options = parse_options()
    status = 1
    try:
        status = trio.run(run_until_stopped, options)
    except* Failed as failures:
        for failed in leaves(failures):
            print(f"\n{failed}", file=sys.stderr)
    return status


def leaves(failure: BaseException) -> Iterator[BaseException]:
    """What a group of exceptions is made of."""
    if isinstance(failure, BaseExceptionGroup):
        for part_of_it in failure.exceptions:
            yield from leaves(part_of_it)
    else:
        yield failure


if __name__ == "__main__":
    sys.exit(main())
