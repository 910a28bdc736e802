"""The overload engine in the test's own loop: a simulated GPU that dies of one KV block too many.

    async with (
        overload_engine(blocks=48, step_seconds=0.002, linger_seconds=0.2) as engine,
        running_gateway(overload_entry(engine, slots=4, reclaim="enforce")) as gateway,
    ):
        await storm(gateway.url, plan, seconds=2)

That fails as soon as the engine dies. With ``dies=True`` it fails if the engine lives; `engine.dead` is the
event to wait for. Who holds how much is in `engine.gpu`: `running`, `left_behind`, `used`, `counters`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from overload.answers import MODEL
from overload.engine import OverloadEngine
from overload.gpu import Settings
from overload.storm import Plan, Storm, Tally

ENGINE_SECONDS = 20.0


@asynccontextmanager
async def overload_engine(
    settings: Settings | None = None,
    *,
    dies: bool = False,
    seconds: float = ENGINE_SECONDS,
    **changes: Any,
) -> AsyncIterator[OverloadEngine]:
    """A running one. `changes` are fields of `Settings`."""
    engine = OverloadEngine(settings or Settings(**changes))

    async def alarm() -> None:
        await engine.dead.wait()
        assert engine.death is not None
        raise engine.death

    with trio.fail_after(seconds):
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.serve)
            if not dies:
                nursery.start_soon(alarm)
            yield engine
            if dies:
                await engine.dead.wait()
            nursery.cancel_scope.cancel()


def overload_entry(engine: OverloadEngine, *, slots: int, **more: Any) -> dict[str, Any]:
    """As `[[engine]]` has it; `running_gateway` takes it in place of a scripted engine."""
    return {
        "name": "overload",
        "kind": "vllm",
        "url": engine.url,
        "slots": slots,
        "models": [MODEL],
        **more,
    }


async def storm(url: str, plan: Plan, *, seconds: float, until: trio.Event | None = None) -> Tally:
    """All of a plan's clients for so long, or until something happens. What became of their requests."""
    one = Storm(url, plan)
    async with trio.open_nursery() as nursery:

        async def stop() -> None:
            if until is not None:
                await until.wait()
                nursery.cancel_scope.cancel()

        nursery.start_soon(stop)
        await one.run(seconds)
        nursery.cancel_scope.cancel()
    return one.tally
