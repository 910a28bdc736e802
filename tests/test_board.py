"""What open pages are told: the numbers of the metrics and the ledger, each second, however slowly read."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict
from typing import Any

import trio
from trio.testing import MockClock

from gateway.dashboard import Board
from gateway.telemetry import Telemetry
from tests.fakes import END, EVENT, LAST, OPENING, FakeClient, Rig, make_rig
from tests.test_telemetry import samples


def board(*scripts: Any, **settings: Any) -> tuple[Rig, Telemetry, Board]:
    told = Telemetry(sink=lambda _: None)
    rig = make_rig(*scripts, **settings, ended=told.ended)
    told.watch(rig.gateway)
    return rig, told, Board(rig.gateway, told)


def parsed(event: bytes) -> tuple[str, Any]:
    name, data = event.decode().removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_its_numbers_are_those_of_the_metrics_and_the_ledger(autojump_clock: MockClock) -> None:
    rig, told, page = board([*OPENING, EVENT, 30.0, LAST, END], slots=2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(page.run)
        leaver = await rig.come(nursery)
        for _ in range(4):
            await rig.come(nursery)
        await trio.sleep(2)
        leaver.leave()
        for _ in range(80):
            await trio.sleep(1)
            _, state = parsed(page.event("state", page.state()))
            metrics = samples(told.metrics())
            engine = state["engines"]["e0"]["slots"]
            assert engine == asdict(rig.engine.ledger.statement())
            for name, kind in (("running", "running"), ("reclaiming", "reclaiming"), ("ghosts", "ghost")):
                assert metrics[f'gateway_slots{{engine="e0",state="{kind}"}}'] == engine[name]
            assert metrics["gateway_queue_depth"] == state["queue"]["waiting"]
            assert metrics["gateway_streams"] == len(state["requests"])
            for outcome, count in state["outcomes"].items():
                assert count == sum(
                    value
                    for line, value in metrics.items()
                    if line.startswith("gateway_requests_total") and f'outcome="{outcome}"' in line
                )
            for name in ("ttft", "teardown"):
                assert state[name]["buckets"][-1][1] == metrics[f"gateway_{name}_seconds_count"]
            assert state["tokens"].get("completion", 0) == sum(
                value
                for line, value in metrics.items()
                if 'direction="completion"' in line and "_total" in line
            )
        nursery.cancel_scope.cancel()
    assert told.history.outcomes == {"completed": 4, "client_gone": 1}


async def test_a_page_is_sent_what_was_and_then_what_is(autojump_clock: MockClock) -> None:
    rig, _, page = board([*OPENING, EVENT, 30.0, LAST, END])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(page.run)
        await trio.sleep(3.5)
        async with aclosing(page.events()) as events:
            name, history = parsed(await anext(events))
            assert (name, [point[0] for point in history]) == ("history", [1, 2, 3])
            name, state = parsed(await anext(events))
            assert (name, state["requests"], page.pages) == ("state", [], 1)
            client = await rig.come(nursery)
            name, state = parsed(await anext(events))
            assert [row[0] for row in state["requests"]] == [client.request.id]
            assert dict(zip(state["columns"], state["requests"][0], strict=True))["phase"] == "streaming"
        assert page.pages == 0
        nursery.cancel_scope.cancel()


async def test_a_slow_page_skips_what_it_missed(autojump_clock: MockClock) -> None:
    _, _, page = board()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(page.run)
        async with aclosing(page.events()) as events:
            for _ in range(3):
                await anext(events)
            await trio.sleep(60)
            _, state = parsed(await anext(events))
            assert state["sample"][0] >= 60
        nursery.cancel_scope.cancel()


async def test_without_a_page_nothing_is_put_together(autojump_clock: MockClock, monkeypatch: Any) -> None:
    _, _, page = board()
    put_together: list[int] = []
    monkeypatch.setattr(page, "state", lambda: put_together.append(1))
    async with trio.open_nursery() as nursery, AsyncExitStack() as pages:
        nursery.start_soon(page.run)
        await trio.sleep(10.5)
        assert not put_together
        for _ in range(3):
            await anext(await pages.enter_async_context(aclosing(page.events())))
        await trio.sleep(10)
        assert len(put_together) == 10, "once a second, for all three"
        nursery.cancel_scope.cancel()


async def test_a_client_s_words_are_data(autojump_clock: MockClock) -> None:
    rig, _, page = board([*OPENING, EVENT, 30.0, LAST, END], models=("*",))
    model = "x\\n\\nevent: state\\ndata: {} </script>"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.serve, FakeClient(json.dumps({"model": model, "stream": True}).encode()))
        await trio.sleep(1)
        event = page.event("state", page.state())
        assert event.count(b"\n") == 3
        assert parsed(event)[1]["requests"][0][2] == model
        nursery.cancel_scope.cancel()
