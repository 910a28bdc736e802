"""Which engine is chosen: policies over a snapshot, and budgets for retries."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from gateway import config
from gateway.balance import LOAD_BOUND, View, least_loaded, sticky
from gateway.peek import peek
from gateway.prefixes import BLOCK_BYTES, Prefixes, blocks_of
from gateway.retries import Budget

NAMES = ["a", "b", "c", "d"]


def idle(*names: str, slots: int = 8) -> list[View]:
    return [View(name, slots, 0) for name in names]


@pytest.mark.parametrize(
    ("views", "chosen"),
    [
        ([View("a", 4, 2), View("b", 4, 1)], "b"),
        ([View("a", 4, 2), View("b", 16, 4)], "b"),
        ([View("a", 4, 1, waiting=3), View("b", 4, 1, waiting=1)], "b"),
        ([View("a", 4, 1, kv_use=0.9), View("b", 4, 1, kv_use=0.1)], "b"),
        ([View("a", 4, 0, last=7), View("b", 4, 0, last=6)], "b"),
    ],
)
def test_the_one_with_least_to_do(views: list[View], chosen: str) -> None:
    assert least_loaded(views).name == least_loaded(views[::-1]).name == chosen


def test_a_session_stays_where_it_is_and_sessions_spread() -> None:
    counts: Counter[str] = Counter()
    for number in range(400):
        pick = sticky(b"session %d" % number)
        chosen = pick(idle(*NAMES)).name
        assert pick(idle(*NAMES[::-1])).name == chosen
        counts[chosen] += 1
    assert min(counts[name] for name in NAMES) > 60


def test_an_engine_that_goes_takes_only_its_own_sessions_with_it() -> None:
    for number in range(200):
        pick = sticky(b"session %d" % number)
        before = pick(idle(*NAMES)).name
        after = pick(idle("a", "b", "c")).name
        assert after == before or before == "d"


def test_nothing_hot_drowns_an_engine() -> None:
    held = Counter(dict.fromkeys(NAMES, 0))
    for _ in range(100):
        views = [View(name, 32, held[name]) for name in NAMES]
        held[sticky(b"hot")(views).name] += 1
    assert max(held.values()) <= LOAD_BOUND * 100 / 4 + 1


def text(*turns: str) -> list[bytes]:
    body = {"model": "m", "messages": [{"role": "user", "content": turn} for turn in turns]}
    return blocks_of(peek(json.dumps(body).encode()).fields)


SYSTEM, FIRST, SECOND = "s" * 2 * BLOCK_BYTES, "f" * 3 * BLOCK_BYTES, "g" * 3 * BLOCK_BYTES


def test_blocks_of_a_conversation_begin_with_those_of_its_beginning() -> None:
    short, long = text(SYSTEM, FIRST), text(SYSTEM, FIRST, SECOND)
    assert long[: len(short)] == short
    assert len(long) > len(short) > 4
    assert text("x") == []


def test_a_conversation_goes_on_where_it_was_answered() -> None:
    prefixes = Prefixes()
    prefixes.learn(text(SYSTEM, FIRST), "c")
    prefixes.learn(text(SYSTEM, SECOND), "d")
    assert prefixes.pick(text(SYSTEM, FIRST, "more"))(idle(*NAMES)).name == "c"
    assert prefixes.pick(text(SYSTEM, SECOND, "more"))(idle(*NAMES)).name == "d"
    prefixes.forget("c")
    assert prefixes.pick(text(SYSTEM, FIRST, "more"))(idle(*NAMES)).name == "d", "it knows the system's part"


def test_what_nobody_has_seen_goes_to_the_same_engine_each_time() -> None:
    chosen = {Prefixes().pick(text(SYSTEM, FIRST))(idle(*NAMES)).name for _ in range(5)}
    assert len(chosen) == 1


def test_one_hot_beginning_is_spread_once_its_engine_is_busier_than_the_others() -> None:
    prefixes, held = Prefixes(), Counter(dict.fromkeys(NAMES, 0))
    for number in range(100):
        blocks = text(SYSTEM, f"{number}" * BLOCK_BYTES)
        chosen = prefixes.pick(blocks)([View(name, 32, held[name]) for name in NAMES]).name
        prefixes.learn(blocks, chosen)
        held[chosen] += 1
    assert max(held.values()) <= LOAD_BOUND * 100 / 4 + 1


def test_the_table_is_bounded() -> None:
    prefixes = Prefixes(most=10)
    for number in range(50):
        prefixes.learn(text(f"{number}" * BLOCK_BYTES), "a")
    assert len(prefixes) == 10


def test_retries_are_a_share_of_the_requests_with_a_floor() -> None:
    budget = Budget(config.Retry(budget=0.2, floor=5))
    for _ in range(100):
        budget.request(0.0)
    assert sum(budget.take(0.1) for _ in range(100)) == 20
    assert budget.refused == 80
    assert sum(budget.take(15) for _ in range(100)) == 5, "ten seconds later only the floor is left"
