"""The words: which of several ends of a request counts."""

from __future__ import annotations

from itertools import permutations

import pytest

from gateway.words import CLIENT_CLOSED_REQUEST, Outcome, Phase, first_outcome

IN_ORDER = (
    "completed",
    "client_gone",
    "client_stalled",
    "cancelled",
    "drained",
    "engine_timeout",
    "engine_failed",
)


def test_of_several_ends_the_first_in_the_order_of_the_contract_counts() -> None:
    for first, then in permutations(IN_ORDER, 2):
        expected = min(first, then, key=IN_ORDER.index)
        assert first_outcome({Outcome(first), Outcome(then)}) == expected
    for start in range(len(IN_ORDER)):
        assert first_outcome(map(Outcome, reversed(IN_ORDER[start:]))) == IN_ORDER[start]


@pytest.mark.parametrize("refused", [Outcome.SHED, Outcome.REJECTED])
@pytest.mark.parametrize("end", IN_ORDER)
def test_a_refusal_is_the_weakest_of_all_ends(refused: Outcome, end: str) -> None:
    assert first_outcome([refused, Outcome(end)]) == end
    assert first_outcome([refused]) is refused


def test_the_words_are_those_of_the_contract() -> None:
    assert {*Outcome} == {*IN_ORDER, "shed", "rejected"}
    assert [*Phase] == [
        "receiving",
        "queued",
        "connecting",
        "prefill",
        "streaming",
        "draining",
        "reclaiming",
    ]
    assert CLIENT_CLOSED_REQUEST == 499
