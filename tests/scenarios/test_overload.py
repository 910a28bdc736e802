"""An engine that dies when it is asked for more than it can hold, and goes on for who has left."""

from __future__ import annotations

from overload.gpu import Settings
from overload.storm import Plan

from tests.support.gateway import running_gateway
from tests.support.overload import overload_engine, overload_entry, storm

GPU = Settings(blocks=48, step_seconds=0.002, linger_seconds=0.3)  # room for 8 answers of 6 blocks
SLOTS = 8
PLAN = Plan(
    leavers=6,
    patient=2,
    prompt_tokens=64,
    answer_tokens=32,
    leave_after=(0.0, 0.03),
    ramp_seconds=0.02,
)


async def test_a_storm_of_leavers_does_not_kill_it() -> None:
    async with (
        overload_engine(GPU) as engine,
        running_gateway(overload_entry(engine, slots=SLOTS, reclaim="enforce")) as gateway,
    ):
        tally = await storm(gateway.url, PLAN, seconds=2)
        assert tally.aborted > 20
        assert tally.whole
        assert not tally.cut
        assert engine.gpu.counters.peak_blocks <= GPU.blocks
        await gateway.idle()
        reclaimed = {record["reclaimed_by"] for record in gateway.matching(outcome="client_gone")}
        assert "engine_idle" in reclaimed
        assert not reclaimed & {"bound", "none"}


async def test_the_same_storm_kills_it_where_slots_are_free_at_the_close() -> None:
    async with (
        overload_engine(GPU, dies=True) as engine,
        running_gateway(overload_entry(engine, slots=SLOTS, reclaim="off"), check=False) as gateway,
    ):
        await storm(gateway.url, PLAN, seconds=5, until=engine.dead)
        assert engine.death is not None
