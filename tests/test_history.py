"""What the dashboard remembers: samples, spans, and what leavers didn't cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from gateway.history import SAMPLES, SPANS, History, Savings, Spans
from tests.fakes import END, EVENT, LAST, OPENING, FakeClient, Rig, make_rig


def remembered(*scripts: Any, **settings: Any) -> tuple[Rig, History]:
    history = History()
    return make_rig(*scripts, **settings, ended=history.ended), history


def looking(rig: Rig, history: History) -> Callable[[], Any]:
    gateway = rig.gateway
    return lambda: history.look(
        trio.current_time(), gateway.requests, gateway.known_engines, gateway.admission.waiting
    )


async def test_a_sample_is_of_its_second(autojump_clock: MockClock) -> None:
    rig, history = remembered([*OPENING, EVENT, EVENT, 10.0, EVENT, LAST, END], slots=1)
    look = looking(rig, history)
    async with trio.open_nursery() as nursery:
        await rig.come(nursery)
        waiting = await rig.come(nursery)
        await trio.sleep(0.5)
        sample = look()
        assert (sample.tokens, sample.waiting, sample.running, sample.ended) == (2.0, 1, 1, {})
        await trio.sleep(1)
        assert look().tokens == 0.0
        waiting.leave()
        await trio.sleep(1)
        sample = look()
        assert (sample.waiting, sample.ended) == (0, {"client_gone": 1})
        await trio.sleep(20)
        sample = look()
        assert (sample.running, sample.ended) == (0, {"completed": 1})
        assert sample.tokens * 20 == pytest.approx(history.tokens["completion"] - 2)
    assert history.outcomes == {"client_gone": 1, "completed": 1}


async def test_samples_and_spans_are_bounded(autojump_clock: MockClock) -> None:
    rig, history = remembered([*OPENING, EVENT, LAST, END])
    look = looking(rig, history)
    for _ in range(SAMPLES + 5):
        await trio.sleep(1)
        look()
    assert len(history.samples) == SAMPLES
    for _ in range(SPANS + 5):
        history.ttft.kept.append(1.0)
    assert len(history.ttft.kept) == SPANS
    await rig.serve(FakeClient())
    assert history.ttft.kept[-1] == 0.0


async def test_samples_are_taken_each_second(autojump_clock: MockClock) -> None:
    rig, history = remembered()
    seen = []
    with trio.move_on_after(3.5):
        await history.run(rig.gateway, lambda: seen.append(history.samples[-1].at - trio.current_time()))
    assert seen == [0.0, 0.0, 0.0]


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0, 1))
def test_a_quantile_is_one_of_them_and_in_order(values: list[float], share: float) -> None:
    spans = Spans()
    spans.kept.extend(values)
    low, found, high = spans.quantiles(0, share, 1)
    assert found in values
    assert (low, high) == (min(values), max(values))
    assert low is not None
    assert found is not None
    assert high is not None
    assert low <= found <= high


def test_of_nothing_there_are_no_quantiles() -> None:
    assert Spans().quantiles(0.5) == [None]


def test_savings_are_worked_out_as_the_documentation_says() -> None:
    savings = Savings()
    savings.cut_short(10, 1000)
    assert savings.unmade == 0, "no answer has been whole: nobody knows how long they are"
    savings.completed(100)
    savings.busy_seconds = 11.0
    savings.cut_short(40, 1000)
    assert savings.unmade == 60
    savings.cut_short(40, 50)
    assert savings.unmade == 70, "it had asked for 50 at most"
    savings.cut_short(400, 1000)
    assert savings.unmade == 70, "it had made more than most"
    assert savings.tokens == 590
    assert savings.seconds == pytest.approx(60 * 11 / 150 + 10 * 11 / 190)
    before = savings.seconds
    savings.completed(10_000)
    assert savings.seconds == before, "a counter never falls"


def test_an_engine_that_made_nothing_has_saved_nothing() -> None:
    assert Savings(busy_seconds=5).seconds == 0


async def test_leavers_save_what_completed_answers_would_have_taken(autojump_clock: MockClock) -> None:
    whole = [*OPENING, *[EVENT, 1.0] * 10, LAST, END]
    rig, history = remembered(whole, [*OPENING, EVENT, EVENT, 100.0], slots=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(history.run, rig.gateway, lambda: None)
        await rig.serve(FakeClient(b'{"model":"m","stream":true,"max_tokens":50}'))
        async with trio.open_nursery() as clients:
            leaver = await rig.come(clients)
            await trio.sleep(5)
            leaver.leave()
        nursery.cancel_scope.cancel()
    (savings,) = history.savings.values()
    made = history.tokens["completion"]
    assert savings.tokens == made
    assert savings.unmade > 0
    assert savings.busy_seconds == pytest.approx(15, abs=1.5)
