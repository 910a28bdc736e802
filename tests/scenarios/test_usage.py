"""The tokens of requests, through the whole gateway: records, metrics, the file, and what clients see."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import http1, request_bytes
from tests.support.routes import BY_PATH, CHAT, EMBEDDINGS, OLLAMA_CHAT, RESPONSES, ROUTES, Route
from tests.support.scripted import Call, ScriptedEngine
from tests.support.scripts import Ending, Sse, Status, Stream, Whole, honest, never_answers
from tests.support.usage import chat, event, openai
from tests.test_usagestore import stored, until_stored

DONE = b"data: [DONE]\n\n"
TALK = [chat(""), chat("a"), chat("b")]
USAGE = event({"id": "1", "choices": [], "usage": openai(9, 2)})


def told(record: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    return record["prompt_tokens"], record["completion_tokens"], record["usage_source"]


async def asked(
    gateway: Gateway, route: Route = CHAT, *, stream: bool = True, **more: Any
) -> tuple[bytes, Mapping[str, Any]]:
    """The answer's body, and the record of it."""
    async with http1(gateway.url) as client:
        answer = await client.ask(route.path, route.payload(stream=stream, **more))
    await gateway.recorded(1)
    return answer.body, gateway.records[-1]


class Vllm:
    """It tells its usage as vLLM does: where it was asked for it."""

    async def __call__(self, call: Call) -> None:
        options = call.json.get("stream_options") or {}
        each = options.get("include_usage") and options.get("continuous_usage_stats")
        pieces = [
            chat(text, **({"usage": openai(9, number)} if each else {}))
            for number, text in enumerate(["", "a", "b"])
        ]
        await Sse([*pieces, *([USAGE] if options.get("include_usage") else []), DONE])(call)


@pytest.mark.parametrize(
    ("kind", "ask", "options", "numbers"),
    [
        ("vllm", "no", None, (2, "estimated")),
        ("vllm", "end", None, (2, "engine")),
        ("vllm", "each", None, (2, "engine")),
        ("sglang", "each", None, (2, "engine")),
        ("openai", "each", None, (2, "estimated")),
        ("vllm", "no", {"include_usage": True}, (2, "engine")),
        ("vllm", "each", {"include_usage": True}, (2, "engine")),
        ("vllm", "end", {"include_usage": True, "continuous_usage_stats": True}, (2, "engine")),
        ("vllm", "each", {"include_usage": False}, (2, "engine")),
    ],
)
async def test_who_did_not_ask_does_not_see_it(
    kind: str, ask: str, options: dict[str, bool] | None, numbers: tuple[int, str]
) -> None:
    engine = ScriptedEngine(Vllm(), kind=kind)
    async with running_gateway(engine, usage={"ask_engine": ask}) as gateway:
        more: dict[str, Any] = {} if options is None else {"stream_options": options}
        body, record = await asked(gateway, **more)
    sent = engine.calls[0].json.get("stream_options")
    if options and options.get("include_usage"):
        assert sent == options
        each = options.get("continuous_usage_stats")
        assert body.count(b'"usage"') == (4 if each else 1)
    else:
        assert body == b"".join([*TALK, DONE])
        assert (sent == options) == (ask == "no" or kind == "openai")
    assert (record["completion_tokens"], record["usage_source"]) == numbers


async def test_an_answer_that_is_left_has_the_numbers_of_its_last_event() -> None:
    events = [chat(str(n), usage=openai(9, n)) for n in range(8)]
    engine = ScriptedEngine(Sse([*events, 1000.0]), kind="vllm")
    async with running_gateway(engine, usage={"ask_engine": "each"}, engine={"reclaim": "off"}) as gateway:
        async with http1(gateway.url) as client:
            await client.post(CHAT.path, CHAT.payload(stream=True))
            await client.head()
            assert await client.until(b"\n\n", 8) == b"".join(chat(str(n)) for n in range(8))
        record = await gateway.record(outcome="client_gone")
        assert told(record) == (9, 7, "engine")


@pytest.mark.parametrize("kind", ["vllm", "llamacpp", "openai"])
async def test_without_numbers_events_are_counted(kind: str) -> None:
    engine = ScriptedEngine(Stream(tokens=5, ending=Ending.SILENT), kind=kind)
    async with running_gateway(engine, engine={"reclaim": "off"}) as gateway:
        async with http1(gateway.url) as client:
            await client.post(CHAT.path, CHAT.payload(stream=True))
            await client.head()
            await client.until(b"\n\n", 6)
        # The opening event is no token.
        assert told(await gateway.record(outcome="client_gone")) == (10, 5, "estimated")


async def test_llamacpp_is_metered_also_where_its_answer_is_added_up() -> None:
    finish = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    progress = event({"choices": [], "prompt_progress": {"total": 9, "processed": 4}})
    engine = ScriptedEngine(Sse([progress, *TALK, finish, USAGE, DONE]), kind="llamacpp")
    async with running_gateway(engine) as gateway:
        body, record = await asked(gateway, stream=False)
        assert json.loads(body)["usage"]["completion_tokens"] == 2
        assert told(record) == (9, 2, "engine")


async def test_ollama_tells_it_in_its_last_line() -> None:
    last = json.dumps({"done": True, "prompt_eval_count": 9, "eval_count": 2}).encode() + b"\n"
    engine = ScriptedEngine(Sse([b'{"done":false}\n' * 2, last], media="application/x-ndjson"), kind="ollama")
    async with running_gateway(engine) as gateway:
        _, record = await asked(gateway, OLLAMA_CHAT)
        assert told(record) == (9, 2, "engine")


@pytest.mark.parametrize("route", ROUTES, ids=str)
@pytest.mark.parametrize("stream", [True, False])
async def test_every_answer_has_numbers(route: Route, stream: bool) -> None:
    async with running_gateway(ScriptedEngine(honest, kind=route.kind)) as gateway:
        _, record = await asked(gateway, route, stream=stream)
        prompt, completion, source = told(record)
        assert source in {"engine", "counted", "estimated", "unknown"}
        assert (prompt is None or completion is None) == (source == "unknown")
        if not stream and route in (CHAT, EMBEDDINGS):
            assert source == "engine"
        metrics = await gateway.metrics()
        sums = [value for name, value in metrics.items() if name.startswith("gateway_tokens_total{")]
        assert sum(sums) == (prompt or 0) + (completion or 0)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (Status(400), (0, 0, "counted")),
        (Status(500), (10, None, "unknown")),
        (Whole(), (1, 5, "engine")),
        (Whole(body=b"[]"), (10, None, "unknown")),
    ],
)
async def test_whole_answers_and_errors(script: Any, expected: tuple[Any, ...]) -> None:
    async with running_gateway(ScriptedEngine(script)) as gateway:
        _, record = await asked(gateway, stream=False)
        assert told(record) == expected


async def test_what_reached_no_engine_took_nothing() -> None:
    engine = ScriptedEngine(never_answers, slots=1)
    async with running_gateway(engine, admission={"queue": 0}, engine={"reclaim": "off"}) as gateway:
        async with http1(gateway.url) as first:
            await first.post(CHAT.path, CHAT.payload(stream=True))
            await gateway.in_phase("prefill")
            _, record = await asked(gateway)
            assert (record["outcome"], *told(record)) == ("shed", 0, 0, "counted")
        assert told(await gateway.record(outcome="client_gone")) == (10, 0, "estimated")


# The file.


async def test_each_request_is_a_row(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    engine = ScriptedEngine(honest, kind="vllm")
    usage = {"path": str(path), "flush_seconds": 0.01}
    async with running_gateway(engine, usage=usage) as gateway:
        async with http1(gateway.url) as client:
            await client.ask(CHAT.path, CHAT.payload(stream=False))
            await client.ask(RESPONSES.path, RESPONSES.payload(stream=True))
            await client.ask(CHAT.path, {"model": "no such model"})
            await client.ask("/nowhere", {})
            await client.send(request_bytes("/v1/models", method="GET"))
            await client.answer()
        await until_stored(path, 3)
        await gateway.recorded(5)
        records = {record["id"]: record for record in gateway.records}
        for row in stored(path):
            with closing(sqlite3.connect(path)) as connection:
                names = [each[1] for each in connection.execute("PRAGMA table_info(usage)")]
            kept, record = dict(zip(names, row, strict=True)), records[row[-1]]
            same = ("model", "engine", "route", "outcome", "status", "prompt_tokens", "completion_tokens")
            assert {name: kept[name] for name in same} == {name: record[name] for name in same}
            assert kept["route"] in BY_PATH
        assert (await gateway.metrics())["gateway_usage_rows_dropped_total"] == 0


async def test_a_locked_file_stops_no_request(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    usage = {"path": str(path), "flush_seconds": 0.01}
    async with running_gateway(ScriptedEngine(honest, kind="vllm"), usage=usage) as gateway:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for _ in range(5):
                body, _ = await asked(gateway)
                assert body.endswith(DONE)
            other.execute("ROLLBACK")
        await until_stored(path, 5)
