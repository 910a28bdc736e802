"""Adding a stream up: its texts joined, everything else passed on as it came, and no more kept than allowed.

That the sum is llama.cpp's own answer is tests/engines/test_gathered.py's to show.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count, pairwise, repeat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.profiles.gathered import CHAT, COMPLETIONS, EXTRA_FIELDS, MOST_BYTES, Gathered, GatheredError
from gateway.profiles.gathered import can_gather as can_gather_raw

HEAD = {"created": 7, "id": "chatcmpl-x", "model": "tiny", "system_fingerprint": "b1-x"}
USAGE = '{"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":1}}'
TIMINGS = (
    '{"prompt_ms":1.0910,"predicted_per_second":8264.4628099173553719,"big":123456789012345678901234567890}'
)
DONE = b"data: [DONE]\n\n"


def event(choices: list[Any], more: str = "") -> bytes:
    text = json.dumps({"choices": choices, **HEAD}, ensure_ascii=False)
    return b"data: %b\n\n" % (text[:-1] + more + "}").encode()


def delta(index: int = 0, finish: str | None = None, **fields: Any) -> bytes:
    return event([{"finish_reason": finish, "index": index, "delta": fields}])


def text(
    words: str, index: int = 0, finish: str | None = None, more: str = "", logprobs: Any = None
) -> bytes:
    return event([{"text": words, "index": index, "logprobs": logprobs, "finish_reason": finish}], more)


def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
    name = {"name": more.pop("name")} if "name" in more else {}
    return {"index": index, "function": {**name, "arguments": arguments}, **more}


def ends(usage: str = USAGE, timings: str = TIMINGS) -> str:
    return f',"usage":{usage},"timings":{timings}'


PROGRESS = event(
    [{"finish_reason": None, "index": 0, "delta": {"role": "assistant", "content": None}}],
    ',"prompt_progress":{"total":25,"cache":24,"processed":24,"time_ms":0}',
)
ROLE = delta(role="assistant", content=None)
CALLS = [
    PROGRESS,
    event([{"index": 5, "delta": {"content": "x"}}], ',"prompt_progress":{}'),
    ROLE,
    b": ping\n\n",
    delta(reasoning_content="hm "),
    delta(reasoning_content="é€\u2028"),
    delta(content="I "),
    delta(content='will 😀 "\\\n'),
    delta(tool_calls=[call(0, "{", id="one", type="function", name="add")]),
    delta(tool_calls=[call(0, '"a": "é\\ud83d\\ude00"}')]),
    delta(tool_calls=[call(1, "{}", id="two", type="function", name="go")]),
    delta(finish="tool_calls"),
    event([], ends()),
    DONE,
]
WHOLE_CALLS = {
    "choices": [
        {
            "finish_reason": "tool_calls",
            "index": 0,
            "message": {
                "role": "assistant",
                "content": 'I will 😀 "\\\n',
                "reasoning_content": "hm é€\u2028",
                "tool_calls": [
                    {
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"a": "é\\ud83d\\ude00"}'},
                        "id": "one",
                    },
                    {"type": "function", "function": {"name": "go", "arguments": "{}"}, "id": "two"},
                ],
            },
        }
    ],
    "created": 7,
    "model": "tiny",
    "system_fingerprint": "b1-x",
    "object": "chat.completion",
    "usage": json.loads(USAGE),
    "id": "chatcmpl-x",
    "timings": json.loads(TIMINGS),
}


def fed(path: str, *pieces: bytes) -> Gathered:
    gathered = Gathered(path)
    for piece in pieces:
        gathered.feed(piece)
    return gathered


def whole(path: str, *pieces: bytes) -> Any:
    status, body = fed(path, *pieces).result()
    assert status == 200
    return json.loads(body)


# ------------------------------------------------------------------------------------- what is added up


def test_a_chat() -> None:
    answer = whole(CHAT, *CALLS)
    assert answer == WHOLE_CALLS
    assert json.dumps(answer) == json.dumps(WHOLE_CALLS), "fields are in llama.cpp's order"


def test_a_chat_that_said_nothing_has_an_empty_text() -> None:
    message = whole(CHAT, ROLE, delta(finish="stop"), DONE)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": ""}


def test_a_completion() -> None:
    answer = whole(
        COMPLETIONS, text("a €"), text(""), text("b"), text("", finish="length", more=ends()), DONE
    )
    assert answer == {
        **{key: value for key, value in WHOLE_CALLS.items() if key != "choices"},
        "object": "text_completion",
        "choices": [{"text": "a €b", "index": 0, "logprobs": None, "finish_reason": "length"}],
    }


def test_numbers_are_passed_on_digit_by_digit() -> None:
    for path, chunk in [(CHAT, event([], ends())), (COMPLETIONS, text("", finish="stop", more=ends()))]:
        _, body = fed(path, delta(finish="stop"), chunk, DONE).result()
        assert f'"timings":{TIMINGS}'.encode() in body


def test_candidates_are_passed_on() -> None:
    answer = fed(
        COMPLETIONS,
        text("a", logprobs={"content": [{"token": "a", "logprob": -0.1}, {"token": "é"}]}),
        text("", logprobs={"content": [{"token": ""}]}),
        text("", finish="stop"),
        DONE,
    )
    _, body = answer.result()
    wanted = '"logprobs":{"content":[{"token": "a", "logprob": -0.1},{"token": "é"},{"token": ""}]}'
    assert wanted.encode() in body


def test_the_last_timings_count() -> None:
    timed = text("a", more=',"timings":{"predicted_n":1}')
    answer = whole(COMPLETIONS, timed, text("", finish="stop", more=ends(timings='{"predicted_n":2}')), DONE)
    assert answer["timings"] == {"predicted_n": 2}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_several_choices_the_first_one_s_usage_counts(order: tuple[int, int]) -> None:
    usages = ends('{"a":0}'), ends('{"a":1}')
    ended = [delta(i, content="!") + delta(i, finish="stop") + event([], usages[i]) for i in order]
    answer = whole(CHAT, delta(1, content="b"), delta(0, content="a"), delta(1, content="c"), *ended, DONE)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["a!", "bc!"]
    assert answer["usage"] == {"a": 0}

    ended = [text("!", i) + text("", i, finish="stop", more=usages[i]) for i in order]
    answer = whole(COMPLETIONS, text("b", 1), text("a", 0), text("c", 1), *ended, DONE)
    assert [choice["text"] for choice in answer["choices"]] == ["a!", "bc!"]
    assert answer["usage"] == {"a": 0}


def test_fields_that_an_older_engine_lacks_are_left_out() -> None:
    bare = b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\r\n\r\ndata:[DONE]\r\n\r\n'
    assert whole(COMPLETIONS, bare) == {
        "choices": [{"text": "a", "index": 0, "logprobs": None, "finish_reason": "stop"}],
        "object": "text_completion",
    }


@given(cuts=st.lists(st.integers(0, len(b"".join(CALLS))), max_size=40))
def test_any_cutting_of_the_stream_gives_the_same(cuts: list[int]) -> None:
    stream = b"".join(CALLS)
    bounds = [0, *sorted(cuts), len(stream)]
    assert whole(CHAT, *(stream[a:b] for a, b in pairwise(bounds))) == WHOLE_CALLS


# ------------------------------------------------------------------------------------- its beginning and end


@pytest.mark.parametrize(
    ("path", "pieces", "started"),
    [
        (CHAT, [PROGRESS, ROLE], False),
        (CHAT, [PROGRESS, ROLE, delta(content="a")], True),
        (CHAT, [delta(reasoning_content="a")], True),
        (CHAT, [CALLS[8]], True),
        (CHAT, [delta(finish="stop")], True),
        (COMPLETIONS, [PROGRESS, text("")], False),
        (COMPLETIONS, [text(""), text("a")], True),
    ],
)
def test_it_starts_with_the_first_of_what_was_generated(
    path: str, pieces: list[bytes], started: bool
) -> None:
    assert fed(path, *pieces).started is started


def test_it_is_done_with_the_marker_only() -> None:
    gathered = fed(CHAT, *CALLS[:-1], b"data: [DONE]")
    with pytest.raises(GatheredError, match="before it was complete"):
        gathered.result()
    was = gathered.done
    gathered.feed(b"\n")
    assert (was, gathered.done) == (False, True)
    gathered.feed(b"data: whatever\n\n")
    assert gathered.result()[0] == 200


@pytest.mark.parametrize(
    "pieces", [[], [DONE], [ROLE, DONE], [delta(0, finish="stop"), delta(1, content="a"), DONE]]
)
def test_an_answer_without_an_end_is_none(pieces: list[bytes]) -> None:
    with pytest.raises(GatheredError, match="before it was complete"):
        fed(CHAT, *pieces).result()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ('{"code":400,"message":"é","type":"invalid_request_error","n_ctx":1.0}', 400),
        ('{"code":503,"message":"m"}', 503),
        ('{"code":599}', 599),
        ('{"code":200}', 500),
        ('{"code":600}', 500),
        ('{"code":"x"}', 500),
        ('{"message":"m"}', 500),
        ('"broken"', 500),
    ],
)
def test_an_error_within_the_stream_is_the_answer(error: str, status: int) -> None:
    gathered = fed(CHAT, ROLE, delta(content="a"), f'data: {{"error":{error}}}\n\n'.encode())
    gathered.feed(b'data: {"error":{"code":401}}\n\n' + DONE)
    assert gathered.result() == (status, f'{{"error":{error}}}'.encode())


# ------------------------------------------------------------------------------------- what isn't kept


@pytest.mark.parametrize(
    "bad",
    [
        b"data: x\n",
        b"data: {\n",
        b"data: []\n",
        b'data: {"choices":{}}\n',
        b'data: {"choices":[{"index":"0"}]}\n',
        b'data: {"choices":[{"text":"\xff"}]}\n',
        b'data: {"choices":[{"text":"\\ud83d"}]}\n',
        b'data: {"choices":[{"delta":{"tool_calls":[{"id":"no index"}]}}]}\n',
        b"data: " + b"[" * 100_000 + b"\n",
    ],
)
def test_what_is_no_event_of_llama_cpp_is_refused(bad: bytes) -> None:
    with pytest.raises(GatheredError, match="can't be understood"):
        fed(CHAT, ROLE, bad)


def until_full(pieces: Iterator[bytes]) -> int:
    """How many bytes of an endless stream it takes."""
    taken = [0]

    def take() -> None:
        gathered = Gathered(CHAT)
        for piece in pieces:
            taken[0] += len(piece)
            gathered.feed(piece)
            if taken[0] > 2 * MOST_BYTES:
                return

    with pytest.raises(GatheredError, match="longer than"):
        take()
    return taken[0]


@pytest.mark.parametrize(
    "piece",
    [
        delta(content="€" * 30_000),
        delta(reasoning_content="a" * 90_000),
        delta(tool_calls=[call(0, "a" * 90_000)]),
        text("a" * 90_000),
        text("", logprobs={"content": ["a" * 90_000]}),
        b"x" * 90_000,
    ],
)
def test_no_more_than_so_much_is_kept(piece: bytes) -> None:
    assert until_full(repeat(piece)) > MOST_BYTES - 2 * len(piece), "what is kept is counted as it is"


def test_choices_and_calls_count_too() -> None:
    assert until_full(delta(tool_calls=[call(i, "")]) for i in count())
    assert until_full(event([{"index": i}]) for i in count())


def test_what_is_only_looked_at_is_not_kept() -> None:
    gathered = Gathered(CHAT)
    for _ in range(2 * MOST_BYTES // len(PROGRESS)):
        gathered.feed(PROGRESS)
    gathered.feed(b"".join(CALLS))
    assert json.loads(gathered.result()[1]) == WHOLE_CALLS


# ------------------------------------------------------------------------------------- what can be added up


def can_gather(path: str, **fields: Any) -> bool:
    return can_gather_raw(path, {name: json.dumps(value).encode() for name, value in fields.items()})


USER, ASSISTANT = {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}
BOTH: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"stream": False}, True),
    ({"stream": None, "stop": None, "logprobs": None, "n_probs": None, "verbose": None}, True),
    ({"stream": True}, False),
    ({"stream": 0}, False),
    ({"stream_options": {"include_usage": False}, "return_progress": True}, True),
    ({"stream_options": {"include_usage": 1}}, False),
    ({"stream_options": 5}, False),
    ({"return_progress": "x"}, False),
    ({"verbose": False, "n_indent": 0}, True),
    ({"verbose": True}, False),
    ({"n_indent": 2}, False),
    ({"reasoning_format": "auto"}, True),
    ({"reasoning_format": "deepseek-legacy"}, False),
    ({"stop": "\n"}, True),
    ({"stop": ["€", "😀"]}, True),
    ({"stop": []}, True),
    ({"stop": "\n\n"}, False),
    ({"stop": ["a", "bc"]}, False),
    ({"stop": ""}, False),
    ({"stop": 7}, False),
    ({"n": 4, "max_tokens": 5, "seed": 1, "unknown": {}, "timings_per_token": True, "tools": [{}]}, True),
    ({"logprobs": False, "n_probs": 0}, True),
    ({"logprobs": True}, False),
    ({"logprobs": 6}, False),
    ({"n_probs": -1}, False),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("fields", "can"), BOTH)
def test_what_can_be_added_up(path: str, fields: dict[str, Any], can: bool) -> None:
    assert can_gather(path, **fields) is can


@pytest.mark.parametrize(
    ("path", "fields", "can"),
    [
        (COMPLETIONS, {"logprobs": 5}, True),
        (COMPLETIONS, {"n_probs": 1, "stop": []}, True),
        (COMPLETIONS, {"logprobs": 1, "stop": "a"}, False),
        (CHAT, {"logprobs": 1}, False),
        (CHAT, {"n_probs": 1}, False),
        (CHAT, {"messages": [USER, ASSISTANT, USER]}, True),
        (CHAT, {"messages": [USER, ASSISTANT]}, False),
        (CHAT, {"messages": [{"content": "no role"}]}, False),
        (CHAT, {"messages": "x"}, False),
        ("/v1/embeddings", {}, False),
        ("/completion", {}, False),
        ("", {}, False),
    ],
)
def test_what_differs_between_the_two(path: str, fields: dict[str, Any], can: bool) -> None:
    assert can_gather(path, **fields) is can


def test_a_value_that_is_no_json_is_the_engine_s_to_refuse() -> None:
    assert not can_gather_raw(CHAT, {"stop": b"x"})
    assert not can_gather_raw(CHAT, {"messages": b"[" * 100_000})
    assert can_gather_raw(CHAT, {"user": b"x"})


def test_the_extra_fields_are_json() -> None:
    assert {name: json.loads(value) for name, value in EXTRA_FIELDS.items()} == {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
    }
