"""What a request took: of whole answers, of errors, and the size of prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.usage import NOTHING, Meter, Source, Usage, prompt_size, usage_of
from tests.support.usage import (
    BODY,
    CHAT,
    COMPLETIONS,
    JSON,
    LONG,
    PROMPT,
    C,
    E,
    G,
    U,
    fields_of,
    measured,
    openai,
)

# Whole answers.

VECTORS = [{"embedding": [0.25] * 3000, "usage": "none"}]


@pytest.mark.parametrize(
    ("path", "answer", "expected"),
    [
        (CHAT, {"choices": [], "usage": openai(9, 2)}, Usage(9, 2, E, E)),
        (CHAT, {"choices": [{"message": {"content": LONG}}], "usage": openai(9, 2)}, Usage(9, 2, E, E)),
        (CHAT, {"usage": openai(9, 2), "choices": [{"message": {"content": LONG * 9}}]}, Usage(9, 2, E, E)),
        (CHAT, {"choices": []}, Usage(PROMPT, None, G, U)),
        (CHAT, {"choices": [LONG * 9]}, Usage(PROMPT, None, G, U)),
        (CHAT, {"choices": [], "usage": {"prompt_tokens": -1}}, Usage(PROMPT, None, G, U)),
        (CHAT, {"choices": [], "usage": {"prompt_tokens": 2**70}}, Usage(PROMPT, None, G, U)),
        ("/v1/messages", {"usage": {"input_tokens": 9, "output_tokens": 2}}, Usage(9, 2, E, E)),
        ("/v1/responses", {"usage": {"input_tokens": 9, "output_tokens": 2}}, Usage(9, 2, E, E)),
        ("/v1/embeddings", {"data": VECTORS, "usage": {"prompt_tokens": 9}}, Usage(9, 0, E, E)),
        ("/v1/embeddings", {"usage": {"prompt_tokens": 9}, "data": VECTORS}, Usage(9, 0, E, E)),
        ("/v1/embeddings", {"data": VECTORS}, Usage(PROMPT, 0, G, C)),
        # A document of the client's own, repeated.
        ("/v1/rerank", {"results": [{"document": {"usage": openai(1, 1)}}]}, Usage(PROMPT, 0, G, C)),
        (
            "/v1/rerank",
            {"results": [LONG, {"document": {"usage": openai(1, 1)}}], "usage": {"total_tokens": 9}},
            Usage(9, 0, E, E),
        ),
        ("/v1/rerank", {"results": [{"document": {"usage": openai(1, 1)}}, LONG]}, Usage(PROMPT, 0, G, C)),
        ("/tokenize", {"tokens": [1, 2]}, Usage(PROMPT, 0, G, C)),
        ("/api/chat", {"message": {}, "prompt_eval_count": 9, "eval_count": 2}, Usage(9, 2, E, E)),
        (
            "/api/generate",
            {"response": LONG, "context": [1] * 9999, "prompt_eval_count": 9, "eval_count": 2},
            Usage(9, 2, E, E),
        ),
        ("/api/embed", {"embeddings": [[0.5] * 9999], "prompt_eval_count": 9}, Usage(9, 0, E, E)),
    ],
)
def test_whole_answers(path: str, answer: Any, expected: Usage) -> None:
    for indent in (None, 2):
        data = json.dumps(answer, indent=indent).encode()
        for size in (len(data), 1000, 7):
            pieces = [data[at : at + size] for at in range(0, len(data), size)]
            assert measured(path, pieces, media=JSON, stream=False) == expected


@pytest.mark.parametrize(
    ("status", "expected"), [(400, NOTHING), (429, NOTHING), (500, Usage(PROMPT, None, G, U))]
)
def test_errors_of_the_engine(status: int, expected: Usage) -> None:
    assert measured(CHAT, [b'{"error":{}}'], media=JSON, status=status) == expected


def test_bodies_that_cannot_be_read() -> None:
    assert measured(CHAT, [b"\xff" * 10_000], media="application/octet-stream") == Usage(PROMPT, None, G, U)


def test_before_there_is_an_answer() -> None:
    assert Meter(CHAT, "vllm", True, b"", fields_of(BODY)).usage() == Usage(PROMPT, 0, G, G)
    assert Meter(CHAT, "vllm", False, b"", fields_of(BODY)).usage() == Usage(PROMPT, None, G, U)
    assert usage_of(None) == NOTHING


# Prompts.


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (COMPLETIONS, {"prompt": "x" * 38}, (10, G)),
        (COMPLETIONS, {"prompt": [1, 22, 333]}, (3, C)),
        (COMPLETIONS, {"prompt": [[1, 22], [333]]}, (3, C)),
        (COMPLETIONS, {"prompt": [1, 22], "suffix": "x" * 6}, (4, G)),
        (COMPLETIONS, {"prompt": ["1", "2"]}, (3, G)),
        (COMPLETIONS, {"prompt": []}, (1, G)),
        ("/v1/embeddings", {"input": [1]}, (1, C)),
        ("/v1/rerank", {"query": "x" * 6, "documents": ["x" * 4]}, (4, G)),
        (CHAT, {"model": "m" * 100}, (0, G)),
        # Numbers where none belong take nothing away from the text.
        (CHAT, {"messages": "x" * 398, "prompt": [1]}, (101, G)),
        (CHAT, {"prompt": [1], "messages": "x" * 398}, (101, G)),
        (CHAT, {"messages": "x" * 398, "input": 1}, (101, G)),
    ],
)
def test_prompts_are_sized(path: str, body: Any, expected: tuple[int, Source]) -> None:
    assert prompt_size(path, json.dumps(body).encode(), fields_of(body)) == expected


PICTURE = "data:image/png;base64," + "A" * 1_000_000


@pytest.mark.parametrize(
    "picture",
    [
        {"type": "image_url", "image_url": {"url": PICTURE}},
        {"type": "input_image", "image_url": PICTURE},
        {"type": "file", "file": {"file_data": PICTURE}},
    ],
)
def test_pictures_are_no_text(picture: Any) -> None:
    body = {"messages": [{"role": "user", "content": [{"text": "x" * 400}, picture]}]}
    tokens, _ = prompt_size(CHAT, json.dumps(body).encode(), fields_of(body))
    assert 100 < tokens < 150


@pytest.mark.parametrize("text", [PICTURE, f'{{"url": "{PICTURE}"}}', "x;base64, " + "word " * 200_000])
def test_text_that_looks_like_a_picture_is_text(text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}]}
    tokens, _ = prompt_size(CHAT, json.dumps(body).encode(), fields_of(body))
    assert tokens > 200_000


def test_the_less_certain_of_the_two_is_the_source() -> None:
    assert Usage(1, 1, E, E).source is E
    assert Usage(1, 1, E, G).source is G
    assert Usage(1, 1, C, E).source is C
    assert Usage(1, None, G, U).source is U
