"""The kinds of engines: what is asked of them, how they are understood, what is kept from clients."""

from __future__ import annotations

import itertools
import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import Kind
from gateway.profiles import PROFILES, Load, Rewrite, Work
from gateway.profiles.progress import WithoutProgress

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PLAIN = settings(deadline=None, derandomize=True, max_examples=200)


def test_every_kind_has_one() -> None:
    assert set(PROFILES) == set(get_args(Kind))
    assert all(profile.kind == kind for kind, profile in PROFILES.items())


@pytest.mark.parametrize("kind", get_args(Kind))
def test_no_id_is_the_beginning_of_another(kind: Kind) -> None:
    ids = [
        PROFILES[kind].upstream_id(one, attempt) for one in ("a" * 24, "b" * 24) for attempt in range(1, 13)
    ]
    assert not any(a != b and b.startswith(a) for a in ids for b in ids)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_who_can_be_asked_says_when_and_where(kind: Kind) -> None:
    profile = PROFILES[kind]
    assert (profile.looks is None) == (not profile.load_paths)
    assert bool(profile.hint) == bool(profile.load_paths)
    assert profile.health_path.startswith("/")


VLLM_PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m {x}"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 1.0
vllm:generation_tokens_total{engine="0"} 4.2e+02
vllm:generation_tokens_created{engine="0"} 1.7e+09
process_start_time_seconds 1.796e+09
"""


@pytest.mark.parametrize(
    ("kind", "path", "page", "load"),
    [
        ("vllm", "/metrics", VLLM_PAGE, Load(5, 1, tokens=420.0, started=1.796e9)),
        ("vllm", "/metrics", VLLM_PAGE.replace(b"\n", b"\r\n"), Load(5, 1, tokens=420.0, started=1.796e9)),
        ("vllm", "/metrics", b"vllm:num_requests_running 1\n", None),
        ("vllm", "/metrics", b"vllm:num_requests_running NaN\nvllm:num_requests_waiting 0\n", None),
        ("vllm", "/metrics", b"vllm:num_requests_running +Inf\nvllm:num_requests_waiting 0\n", None),
        ("vllm", "/metrics", b"vllm:num_requests_running -1\nvllm:num_requests_waiting 0\n", None),
        ("vllm", "/metrics", b"", None),
        ("sglang", "/metrics", b"sglang:num_running_reqs 2\nsglang:num_queue_reqs 4\n", Load(2, 4)),
        (
            "llamacpp",
            "/metrics",
            b"llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\nllamacpp:n_decode_total 9\n",
            Load(1, 2, tokens=9.0),
        ),
        ("llamacpp", "/slots", b'[{"id":0,"is_processing":true},{"is_processing":false}]', Load(1, 0)),
        ("llamacpp", "/slots", b'{"error":{"code":501}}', None),
        ("llamacpp", "/slots", b'[{"is_processing":1}]', None),
        ("llamacpp", "/slots", b"\xff", None),
        ("ollama", "/metrics", VLLM_PAGE, None),
        ("openai", "/metrics", VLLM_PAGE, None),
    ],
)
def test_load_is_read(kind: Kind, path: str, page: bytes, load: Load | None) -> None:
    assert PROFILES[kind].load(path, page) == load


@PLAIN
@given(st.binary(max_size=200), st.sampled_from(get_args(Kind)), st.sampled_from(["/metrics", "/slots"]))
def test_any_page_is_understood_or_not(page: bytes, kind: Kind, path: str) -> None:
    PROFILES[kind].load(path, page)


@pytest.mark.parametrize(
    ("before", "after", "anew"),
    [
        (Load(1, 0, tokens=5), Load(1, 0, tokens=5), False),
        (Load(1, 0, tokens=5), Load(1, 0, tokens=4), True),
        (Load(1, 0, started=5), Load(1, 0, started=6), True),
        (Load(1, 0, tokens=5, started=5), Load(0, 0, tokens=6, started=5), False),
        (Load(1, 0), Load(0, 0), False),
        (Load(1, 0, tokens=5), Load(0, 0), False),
    ],
)
def test_a_restart_is_seen(before: Load, after: Load, anew: bool) -> None:
    assert after.is_after_restart(before) is anew


# Aborts.


def told(kind: Kind, page: str, *works: Work) -> list[tuple[str, Any]]:
    return [(one.method, json.loads(one.body)) for one in PROFILES[kind].aborts(page, works)]


def test_vllm_is_told_its_own_ids() -> None:
    works = [
        Work(CHAT, "a"),
        Work(COMPLETIONS, "b", 3),
        Work("/v1/messages", "c"),
        Work("/v1/responses", "d"),
    ]
    assert told("vllm", "/abort_requests", *works) == [
        ("POST", {"request_ids": ["chatcmpl-a", "cmpl-b-0", "cmpl-b-1", "cmpl-b-2", "chatcmpl-c", "d_0"]})
    ]


def test_vllm_is_never_told_an_empty_list() -> None:
    """It would abort everything."""
    assert told("vllm", "/abort_requests", Work("/v1/embeddings", "d")) == []
    assert told("vllm", "/abort_requests") == []


def test_sglang_is_told_one_by_one() -> None:
    works = [Work(CHAT, "a"), Work("/v1/embeddings", "b"), Work("/v1/responses", "c")]
    assert told("sglang", "/abort_request", *works) == [("POST", {"rid": each}) for each in "abc"]
    assert told("sglang", "/abort_request", Work("/v1/messages", "d")) == []


@pytest.mark.parametrize(
    ("body", "capacity"),
    [
        (b'{"default_generation_settings":{},"total_slots":4}', 4),
        (b'{"total_slots":"4"}', None),
        (b"{}", None),
        (b"\xff", None),
    ],
)
def test_llamacpp_says_how_many_slots_it_has(body: bytes, capacity: int | None) -> None:
    profile = PROFILES["llamacpp"]
    assert (profile.capacity_path, profile.capacity(body)) == ("/props", capacity)


@pytest.mark.parametrize("kind", ["llamacpp", "ollama", "openai"])
def test_others_are_told_nothing(kind: Kind) -> None:
    assert not PROFILES[kind].abort_paths
    assert told(kind, "/abort", Work(CHAT, "a")) == []


# What is added.


def test_sglang_runs_it_under_our_id() -> None:
    assert PROFILES["sglang"].rewrite(CHAT, True, {"rid": b'"x"'}, "ours").fields == {"rid": b'"ours"'}
    assert PROFILES["sglang"].rewrite("/v1/rerank", False, {}, "ours") == Rewrite()
    assert PROFILES["sglang"].rewrite("/v1/rerank", False, {"rid": b"1"}, "ours").fields == {"rid": b'"ours"'}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_response_runs_under_our_id(kind: Kind) -> None:
    profile = PROFILES[kind]
    assert "/v1/responses" in profile.rewrites
    fields = {"request_id": b'"theirs"'}
    assert profile.rewrite("/v1/responses", True, fields, "ours").fields == {"request_id": b'"ours"'}


@pytest.mark.parametrize(
    ("path", "stream", "fields", "expected"),
    [
        (CHAT, True, {}, Rewrite({"return_progress": b"true"}, without_progress=True)),
        (CHAT, True, {"return_progress": b"true"}, Rewrite()),
        (CHAT, True, {"n": b"2"}, Rewrite({"return_progress": b"true"}, True, throughout=True)),
        (
            COMPLETIONS,
            True,
            {"prompt": b'["a"]'},
            Rewrite({"return_progress": b"true"}, True, throughout=True),
        ),
        (CHAT, False, {"logprobs": b"true"}, Rewrite(as_it_is=True)),
        ("/v1/messages", False, {}, Rewrite(as_it_is=True)),
        ("/v1/messages", True, {}, Rewrite()),
        ("/v1/embeddings", False, {}, Rewrite()),
        ("/tokenize", False, {}, Rewrite()),
    ],
)
def test_llamacpp_streams(path: str, stream: bool, fields: dict[str, bytes], expected: Rewrite) -> None:
    assert PROFILES["llamacpp"].rewrite(path, stream, fields, "id") == expected


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_llamacpp_streams_also_for_who_does_not(path: str) -> None:
    rewrite = PROFILES["llamacpp"].rewrite(path, False, {}, "id")
    assert rewrite.gathered
    assert rewrite.without_progress
    assert rewrite.fields["stream"] == b"true"


# Progress.

PROGRESS = (
    b'data: {"choices":[{"delta":{"role":"assistant"}}],"prompt_progress":{"total":9,"processed":4}}\n\n'
)
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":null}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"the \\"prompt_progress\\" of it"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def sifted(data: bytes, places: list[int], *, throughout: bool = False) -> bytes:
    sieve = WithoutProgress(throughout=throughout)
    return b"".join(sieve.feed(piece) for piece in cut(data, places)) + sieve.rest()


@PLAIN
@given(
    st.lists(st.sampled_from([PROGRESS, b": ping\n\n"]), max_size=3),
    st.lists(st.integers(0, 600), max_size=12),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
)
def test_progress_goes_and_the_rest_stays(prefill: list[bytes], places: list[int], end: bytes) -> None:
    rest = [ROLE, TOKEN, TOKEN, DONE]
    everything = b"".join([PROGRESS, *prefill, *rest]).replace(b"\n", end)
    prefill = [event for event in prefill if event != PROGRESS]  # Comments pass.
    assert sifted(everything, places) == b"".join([*prefill, *rest]).replace(b"\n", end)


@PLAIN
@given(st.lists(st.integers(0, 900), max_size=12))
def test_of_several_sequences_one_may_tell_it_late(places: list[int]) -> None:
    everything = PROGRESS + ROLE + TOKEN + PROGRESS + DONE
    assert sifted(everything, places, throughout=True) == ROLE + TOKEN + DONE


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"model":"prompt_progress","choices":[]}\n\n',
        b'data: {"choices":[{"delta":{"content":"\\"prompt_progress\\": 1"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"prompt_progress"}}]}\n\n',
    ],
)
def test_what_only_speaks_of_progress_stays(event: bytes) -> None:
    for throughout in (False, True):
        assert sifted(event + PROGRESS, [], throughout=throughout).startswith(event)


def test_an_event_that_does_not_end_is_not_kept_for_ever() -> None:
    sieve = WithoutProgress()
    passed = sum(len(sieve.feed(b"x" * 10_000)) for _ in range(10))
    assert passed == 100_000
    assert sieve.over
    assert sieve.rest() == b""
