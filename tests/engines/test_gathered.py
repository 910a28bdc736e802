"""llama.cpp asked twice, streaming and not: the stream added up is the whole answer, field by field.

And why the rest goes up as it came: each kind of request that can't be added up shows how it differs.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.profiles.gathered import CHAT, COMPLETIONS, EXTRA_FIELDS, Gathered, can_gather
from tests.support.http1 import http1
from tests.support.real_engine import MAKE_MODEL, RealEngine, real_engine, serving

pytestmark = pytest.mark.engine

CALL_TOKEN = 551  # the last of the thinker's
TEMPLATE = """\
{%- if tools %}<|system|><tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
{%- endif %}
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' }}
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    with real_engine(tmp_path_factory.mktemp("plain"), layers=2, dim=64) as engine:
        yield engine


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """A model whose template knows thoughts and tools, with a token that begins a call."""
    spec = importlib.util.spec_from_file_location("make_thinker", MAKE_MODEL)
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # its dataclasses look themselves up there
    spec.loader.exec_module(script)
    script.WORDS = [*script.WORDS, "<tool_call>\n"]
    script.CHAT_TEMPLATE = TEMPLATE
    assert len(list(script._vocabulary())) == CALL_TOKEN + 1
    model = script.build(tmp_path_factory.mktemp("thinker") / "thinker.gguf")
    with serving(model) as engine:
        yield engine


async def ask(engine: RealEngine, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    async with http1(engine.url) as client:
        answer = await client.ask(path, body)
    return answer.status, answer.body


async def both(engine: RealEngine, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """The whole answer, and the streamed one added up."""
    body = {"temperature": 0, "seed": 1, **body}
    await ask(engine, path, body)  # so that the prompt is as well known to the engine both times
    status, whole = await ask(engine, path, body)
    extra = {name: json.loads(value) for name, value in EXTRA_FIELDS.items()}
    streamed_status, stream = await ask(engine, path, {**body, **extra})
    summed = stream
    if streamed_status == 200:
        gathered = Gathered(path)
        gathered.feed(stream)
        streamed_status, summed = gathered.result()
    return comparable((status, json.loads(whole))), comparable((streamed_status, json.loads(summed)))


def comparable(value: Any, name: str = "") -> Any:
    """Without what can't be the same twice: the types of times and random names, and everything's order."""
    if isinstance(value, dict):
        return [(key, comparable(item, f"{name}/{key}")) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [comparable(item, name) for item in value]
    changes = name in ("/created", "/id", "/choices/message/tool_calls/id")
    times = name.startswith("/timings/") and not name.endswith("_n")
    return type(value).__name__ if changes or times else value


def raw(body: dict[str, Any]) -> dict[str, bytes]:
    return {name: json.dumps(value).encode() for name, value in body.items()}


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9, **more}


def completion(**more: Any) -> dict[str, Any]:
    return {"prompt": "hello", "max_tokens": 9, **more}


def says(text: str) -> dict[str, Any]:
    """A grammar that admits nothing else."""
    return {"grammar": "root ::= " + json.dumps(text, ensure_ascii=False), "max_tokens": 99}


ON_BOTH_PATHS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 300},
    {"max_tokens": 1},
    {"max_tokens": 0},
    {"n_predict": 0},
    {"n": 2, "cache_prompt": False},
    {"stop": "n"},
    {"stop": ["€", "g"], "max_tokens": 60},
    says(""),
    says("ab"),
    says('a€😀\n"\\\u2028\t/'),
    {**says("a€"), "max_tokens": 4},
    {"response_format": {"type": "json_object"}, "max_tokens": 30},
    {"timings_per_token": True},
    {"return_tokens": True, "response_fields": ["content"]},
    {"stream_options": {"include_usage": False}, "return_progress": True, "stream": False},
    {"cache_prompt": False},
    {"id_slot": 1},
    {"echo": True, "best_of": 2, "suffix": "x", "user": "me"},
    {"logprobs": False},
    {"sse_ping_interval": 1, "t_max_predict_ms": 10_000},
    # What it refuses it refuses the same, before it streams.
    {"n": 99},
    {"temperature": "x"},
    {"grammar": "root"},
]
PREFILLED = chat(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "I am"}])
LONG = "x" * 9000


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("more", ON_BOTH_PATHS, ids=lambda more: json.dumps(more)[:60])
async def test_on_both_paths(plain: RealEngine, make: Any, more: dict[str, Any]) -> None:
    path, body = CHAT if make is chat else COMPLETIONS, make(**more)
    assert can_gather(path, raw(body))
    whole, gathered = await both(plain, path, body)
    assert gathered == whole


@pytest.mark.parametrize(
    "body",
    [
        # Which prompt finds which slot, and what is cached there, is chance.
        completion(prompt=["hello", "a longer one", "a"], cache_prompt=False),
        completion(prompt=["hello", "a longer one"], n=2, cache_prompt=False),
        completion(prompt=[[1, 2, 300], [300]], cache_prompt=False),
        completion(prompt=[1, 2, 300]),
        completion(prompt=""),
        completion(prompt=[]),
        completion(prompt=LONG),
        completion(logprobs=3),
        completion(n_probs=1, n=2, cache_prompt=False),
        completion(logprobs=2, post_sampling_probs=True),
        completion(logprobs=1, **says("a€b")),
        completion(logprobs=0),
    ],
    ids=lambda body: json.dumps(body)[:60],
)
async def test_completions(plain: RealEngine, body: dict[str, Any]) -> None:
    assert can_gather(COMPLETIONS, raw(body))
    whole, gathered = await both(plain, COMPLETIONS, body)
    assert gathered == whole


@pytest.mark.parametrize(
    "body",
    [
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}]),
        chat(messages=[{"role": "user", "content": LONG}]),
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        chat(top_logprobs=2),
        chat(messages="x"),
    ],
    ids=lambda body: json.dumps(body)[:60],
)
async def test_chats(plain: RealEngine, body: dict[str, Any]) -> None:
    if body["messages"] != "x":
        assert can_gather(CHAT, raw(body))
    whole, gathered = await both(plain, CHAT, body)
    assert gathered == whole


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "boolean"}, "b": {"enum": ["aé€😀", '\\"\n']}},
                "required": ["a", "b"],
            },
        },
    }
]


def calls(**more: Any) -> dict[str, Any]:
    return chat(tools=TOOLS, tool_choice="required", logit_bias=[[CALL_TOKEN, 300]], **more)


@pytest.mark.parametrize("most", [*range(22, 62), 150])
async def test_tool_calls(thinker: RealEngine, most: int) -> None:
    body = calls(max_tokens=most)
    assert can_gather(CHAT, raw(body))
    whole, gathered = await both(thinker, CHAT, body)
    assert gathered == whole
    message = dict(dict(gathered[1])["choices"][0])["message"]
    assert "tool_calls" in dict(message), message


@pytest.mark.parametrize("form", ["auto", "none", "deepseek"])
@pytest.mark.parametrize("most", [9, 10, 16, 18, 24, 27, 28, 29, 99])
async def test_thoughts(thinker: RealEngine, form: str, most: int) -> None:
    body = chat(
        **{**says("<think>\nhm ho é\n</think>\n\nyes €"), "max_tokens": most, "reasoning_format": form}
    )
    assert can_gather(CHAT, raw(body))
    whole, gathered = await both(thinker, CHAT, body)
    assert gathered == whole
    if form != "none":
        assert "reasoning_content" in dict(dict(dict(gathered[1])["choices"][0])["message"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, PREFILLED),
        (CHAT, chat(logprobs=True)),
        (CHAT, chat(n_probs=2, **says("ab"))),
        (CHAT, chat(verbose=True)),
        (COMPLETIONS, completion(verbose=True)),
        (COMPLETIONS, completion(logprobs=1, stop="n")),
        *[
            (path, make(**{**says("ab"), "max_tokens": 2, "stop": ["bc"]}))
            for path, make in ((CHAT, chat), (COMPLETIONS, completion))
        ],
        *[
            (path, make(n_indent=2, **says("  a\n  b\nc\nd")))
            for path, make in ((CHAT, chat), (COMPLETIONS, completion))
        ],
        (CHAT, chat(return_progress="x")),
        (CHAT, chat(stream_options={"include_usage": 1})),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
async def test_what_cannot_be_added_up(plain: RealEngine, path: str, body: dict[str, Any]) -> None:
    assert not can_gather(path, raw(body))
    whole, gathered = await both(plain, path, body)
    assert gathered != whole, "it can, now"


async def test_a_completion_that_is_cut_within_a_character_lacks_its_last_token(plain: RealEngine) -> None:
    """The one flaw of a completion, that no request tells beforehand."""
    whole, gathered = await both(plain, COMPLETIONS, completion(**{**says("a€"), "max_tokens": 3}))
    texts = [dict(dict(answer[1])["choices"][0])["text"] for answer in (whole, gathered)]
    assert texts == ["a\ufffd", "a"]


async def test_a_chat_that_yields_nothing_is_empty(thinker: RealEngine) -> None:
    """And that of a chat."""
    cut = chat(**{**says("<think>\nhm"), "max_tokens": 7})
    for body, said in [(cut, "<think>"), (chat(**says("<think>\n\n</think>")), "<think>\n\n</think>")]:
        whole, gathered = await both(thinker, CHAT, body)
        messages = [dict(dict(dict(answer[1])["choices"][0])["message"]) for answer in (whole, gathered)]
        assert [message["content"] for message in messages] == [said, ""]


@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (COMPLETIONS, completion)])
async def test_progress_comes_first_and_is_not_the_start(plain: RealEngine, path: str, make: Any) -> None:
    extra = {name: json.loads(value) for name, value in EXTRA_FIELDS.items()}
    _, stream = await ask(plain, path, {**make(cache_prompt=False), **extra})
    events = stream.split(b"\n\n")
    progress = [b"prompt_progress" in event for event in events]
    assert progress[0]
    assert progress == sorted(progress, reverse=True)
    gathered = Gathered(path)
    started = []
    for event in events:
        gathered.feed(event + b"\n\n")
        started.append(gathered.started)
    bare = sum(progress) + (path == CHAT)  # a chat's role has a chunk of its own
    assert started.index(True) == bare
