"""What a request took, read off its answer: every dialect, every cut, answers cut short."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.counts import KEPT_BYTES
from gateway.dialect import ROUTES, tail_for
from gateway.usage import Meter, Usage
from tests.support.usage import (
    CHAT,
    COMPLETIONS,
    DONE,
    JSON,
    LONG,
    NDJSON,
    PROMPT,
    SSE,
    E,
    G,
    chat,
    cut,
    event,
    line,
    measured,
    openai,
    typed,
)

PLAIN = settings(deadline=None, derandomize=True, max_examples=150)
RESPONSE = {"id": "r", "output": [], "tools": [{"usage": openai(7, 7)}]}
STREAMS: dict[str, tuple[str, str, str, list[bytes], Usage]] = {
    "usage at the end": (
        CHAT,
        "vllm",
        SSE,
        [
            chat(""),
            chat("usage"),
            chat('"usage": {"prompt_tokens": 1}'),
            event({"choices": [], "usage": openai(9, 2)}),
            DONE,
        ],
        Usage(9, 2, E, E),
    ),
    "usage in each": (
        CHAT,
        "vllm",
        SSE,
        [chat("a", usage=openai(9, n)) for n in range(1, 6)] + [DONE],
        Usage(9, 5, E, E),
    ),
    "usage with details, and null before": (
        CHAT,
        "openai",
        SSE,
        [
            chat("a", usage=None),
            event({"choices": [], "usage": openai(9, 2, prompt_tokens_details={"cached_tokens": 3})}),
            DONE,
        ],
        Usage(9, 2, E, E),
    ),
    "completions of llama.cpp": (
        COMPLETIONS,
        "llamacpp",
        SSE,
        [
            event({"prompt_progress": {"total": 50, "processed": 20}}),
            event({"choices": [{"text": "timings"}]}),
            event({"choices": [{}], "timings": {"cache_n": 10, "prompt_n": 41, "predicted_n": 3}}),
            DONE,
        ],
        Usage(51, 3, E, E),
    ),
    "usage and timings in one": (
        CHAT,
        "llamacpp",
        SSE,
        [
            chat("a"),
            event({"choices": [], "usage": openai(9, 2), "timings": {"prompt_n": 1, "predicted_n": 2}}),
            DONE,
        ],
        Usage(9, 2, E, E),
    ),
    "responses": (
        "/v1/responses",
        "vllm",
        SSE,
        [
            typed(
                "response.created", response={**RESPONSE, "usage": {"input_tokens": 0, "output_tokens": 0}}
            ),
            typed("response.output_text.delta", delta=" usage"),
            typed(
                "response.completed", response={**RESPONSE, "usage": {"input_tokens": 9, "output_tokens": 4}}
            ),
        ],
        Usage(9, 4, E, E),
    ),
    "a response that is longer than what is kept": (
        "/v1/responses",
        "vllm",
        SSE,
        [
            typed(
                "response.completed",
                response={
                    **RESPONSE,
                    "output": [LONG],
                    "usage": {
                        "input_tokens": 9,
                        "output_tokens": 4,
                        "input_tokens_details": {"cached_tokens": 1},
                    },
                    "user": None,
                },
            )
        ],
        Usage(9, 4, E, E),
    ),
    "messages": (
        "/v1/messages",
        "vllm",
        SSE,
        [
            typed("message_start", message={"usage": {"input_tokens": 9, "output_tokens": 1}}),
            typed("content_block_delta", delta={"text": "usage"}),
            typed("message_delta", usage={"output_tokens": 5}),
            typed("message_stop"),
        ],
        Usage(9, 5, E, E),
    ),
    "messages with a cache": (
        "/v1/messages",
        "openai",
        SSE,
        [
            typed("message_start", message={"usage": {"input_tokens": 9, "cache_read_input_tokens": 20}}),
            typed("message_delta", usage={"input_tokens": 0, "output_tokens": 5}),
            typed("message_stop"),
        ],
        Usage(29, 5, E, E),
    ),
    "ollama's chat": (
        "/api/chat",
        "ollama",
        NDJSON,
        [
            line(message={"content": "eval_count"}, done=False),
            line(message={"content": ""}, done=True, prompt_eval_count=9, eval_count=1),
        ],
        Usage(9, 1, E, E),
    ),
    "ollama with a long context": (
        "/api/generate",
        "ollama",
        NDJSON,
        [
            line(response="a", done=False),
            line(response="", done=True, context=list(range(3000)), prompt_eval_count=9, eval_count=1),
        ],
        Usage(9, 1, E, E),
    ),
}


@pytest.mark.parametrize("case", STREAMS)
def test_streams_tell_it(case: str) -> None:
    path, kind, media, pieces, expected = STREAMS[case]
    assert measured(path, pieces, kind=kind, media=media) == expected
    assert measured(path, [b"".join(pieces)], kind=kind, media=media) == expected
    assert measured(path, [bytes([each]) for each in b"".join(pieces)], kind=kind, media=media) == expected


@PLAIN
@given(st.sampled_from(sorted(STREAMS)), st.lists(st.integers(0, 12_000), max_size=12))
def test_however_it_is_cut(case: str, places: list[int]) -> None:
    path, kind, media, pieces, expected = STREAMS[case]
    assert measured(path, cut(b"".join(pieces), places), kind=kind, media=media) == expected


@PLAIN
@given(st.sampled_from(sorted(STREAMS)), st.integers(0, 12_000), st.lists(st.integers(0, 12_000), max_size=6))
def test_of_an_answer_cut_short_what_came_counts(case: str, end: int, places: list[int]) -> None:
    """At any byte: never more than the engine would have said in the end, and never a fault."""
    path, kind, media, pieces, whole = STREAMS[case]
    got = measured(path, cut(b"".join(pieces)[:end], places), kind=kind, media=media)
    assert got.prompt is not None
    assert whole.prompt is not None
    assert got.prompt == PROMPT if got.prompt_source is G else got.prompt <= whole.prompt
    assert got.completion is not None
    if got.completion_source is E:
        assert got.completion <= (whole.completion or 0)


@PLAIN
@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5), st.sampled_from(sorted(ROUTES)))
def test_any_bytes_are_taken(data: bytes, places: list[int], path: str) -> None:
    for media in (SSE, NDJSON, JSON):
        measured(path, cut(b'{"usage":' + data, places), media=media)


# Cut short.


@pytest.mark.parametrize(
    ("path", "pieces", "media", "expected"),
    [
        # The role comes first, and is no token.
        (CHAT, [chat(""), chat("a"), chat("b")], SSE, Usage(PROMPT, 2, G, G)),
        (CHAT, [chat(""), chat("a"), DONE], SSE, Usage(PROMPT, 1, G, G)),
        (COMPLETIONS, [chat("a"), chat("b")], SSE, Usage(PROMPT, 2, G, G)),
        (CHAT, [], SSE, Usage(PROMPT, 0, G, G)),
        (
            "/v1/messages",
            [typed("message_start", message={"usage": {"input_tokens": 9, "output_tokens": 1}})]
            + [typed("content_block_start")]
            + [typed("content_block_delta")] * 3,
            SSE,
            Usage(9, 3, E, G),
        ),
        ("/api/chat", [line(done=False)] * 3, NDJSON, Usage(PROMPT, 3, G, G)),
        # The last event that came whole counts.
        (
            CHAT,
            [
                chat("a", usage=openai(9, 1)),
                chat("b", usage=openai(9, 2)),
                chat("c", usage=openai(9, 3))[:-9],
            ],
            SSE,
            Usage(9, 2, E, E),
        ),
        # What a client had repeated is no usage of the engine's.
        ("/v1/responses", [typed("response.created", response=RESPONSE)], SSE, Usage(PROMPT, 0, G, G)),
        (
            "/v1/responses",
            [
                typed(
                    "response.created",
                    response={**RESPONSE, "instructions": LONG, "tools": RESPONSE["tools"]},
                )
            ],
            SSE,
            Usage(PROMPT, 0, G, G),
        ),
    ],
)
def test_what_the_engine_did_not_say_is_estimated(
    path: str, pieces: list[bytes], media: str, expected: Usage
) -> None:
    assert measured(path, pieces, media=media) == expected


def test_llamacpp_tells_the_prompt_while_it_reads_it() -> None:
    progress = [event({"choices": [{}], "prompt_progress": {"total": 50, "processed": n}}) for n in (20, 40)]
    assert measured(CHAT, progress, kind="llamacpp") == Usage(50, 1, E, G)


# Memory.


@pytest.mark.parametrize(
    "piece", [b'data: {"usage":' + b"x" * 50_000 + b"\n\n", b'{"usage"' * 9000, b"x" * 65536]
)
@pytest.mark.parametrize("media", [SSE, NDJSON, JSON])
def test_what_is_kept_is_bounded(piece: bytes, media: str) -> None:
    meter = Meter("/api/chat", "llamacpp", True, b"", [])
    meter.answered(200, tail_for(ROUTES["/api/chat"], [(b"Content-Type", media.encode())], 200))
    for _ in range(20):
        meter.feed(piece)
    kept = [getattr(meter, name) for name in Meter.__slots__]
    assert sum(len(each) for each in kept if isinstance(each, bytes)) <= 3 * KEPT_BYTES
    meter.usage()
