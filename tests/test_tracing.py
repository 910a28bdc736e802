"""Traces as a collector gets them, by what happens to the request."""

from __future__ import annotations

import pytest
import trio

from gateway.tracecontext import read_traceparent
from tests.support.collector import Collector, Span, collector, straight, to
from tests.support.gateway import running_gateway
from tests.support.http1 import http1
from tests.support.routes import CHAT, EMBEDDINGS
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Ending, Status, Stream, Whole, honest

__all__ = ["straight"]

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
SERVER = "POST /v1/chat/completions"
TRY = "chat model"
PHASES = ["connect", "prefill", "stream"]
SECRET = "xyzzy-is-nobodys-business"


def assert_whole(collector: Collector, root: Span) -> None:
    """One trace: nobody without a parent but its root, all within their parents but what is reclaimed."""
    by_id = {span.span_id: span for span in collector.spans}
    assert len(by_id) == len(collector.spans)
    assert {span.trace_id for span in collector.spans} == {root.trace_id}
    for span in collector.spans:
        assert span.start <= span.end
        if span is root:
            continue
        parent = by_id[span.parent_id]
        assert not span.remote_parent
        if span.name == "reclaim":
            assert span.start == parent.end
        else:
            assert span.within(parent), (span, parent)


async def test_completed() -> None:
    engine = ScriptedEngine(Stream(tokens=3, prefill=0.05), kind="vllm")
    async with (
        collector() as seen,
        running_gateway(engine, traces=to(seen, service_name="llm-gateway")) as gateway,
        http1(gateway.url) as client,
    ):
        payload = CHAT.payload(stream=True, messages=[{"role": "user", "content": SECRET}])
        assert (await client.ask(CHAT.path + f"?key={SECRET}", payload)).status == 200
        record = await gateway.record(outcome="completed")
    root, one = seen.one(SERVER), seen.one(TRY)
    assert_whole(seen, root)
    assert seen.below(root) == ["queue", TRY]
    assert seen.below(one) == PHASES
    assert (root.kind, one.kind, seen.one("stream").kind) == ("server", "client", "internal")
    assert not any(span.error for span in seen.spans)
    assert root.parent_id == ""
    assert root.told == {
        "http.request.method": "POST",
        "http.route": CHAT.path,
        "http.response.status_code": 200,
        "url.path": CHAT.path,
        "url.scheme": "http",
        "client.address": "127.0.0.1",
        "gateway.request_id": record["id"],
        "gateway.outcome": "completed",
        "gateway.phase": "draining",
        "gateway.engine": engine.name,
        "gateway.attempts": 1,
    }
    host, _, port = engine.url.removeprefix("http://").partition(":")
    assert one.told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "model",
        "gen_ai.usage.input_tokens": record["prompt_tokens"],
        "gen_ai.usage.output_tokens": record["completion_tokens"],
        "gateway.usage_source": record["usage_source"],
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "server.address": host,
        "server.port": int(port),
        "gateway.engine": engine.name,
        "gateway.attempt": 1,
        "gateway.stream": True,
    }
    prefill = seen.one("prefill")
    assert 40e6 < prefill.end - prefill.start < 1e9
    assert abs((root.end - root.start) / 1e6 - record["duration_ms"]) < 0.01
    assert set(seen.paths) == {"/v1/traces"}
    assert seen.resources[0]["service.name"] == "llm-gateway"
    assert not any(SECRET.encode() in body or b"tk" in body for body in seen.bodies)


async def test_the_engine_is_told_the_span_of_its_call() -> None:
    engine = ScriptedEngine(honest)
    async with (
        collector() as seen,
        running_gateway(engine, traces=to(seen)) as gateway,
        http1(gateway.url) as client,
    ):
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1, b=2"}
        await client.ask(CHAT.path, CHAT.payload(stream=True), headers=headers)
    (call,) = engine.calls
    root, one = seen.one(SERVER), seen.one(TRY)
    assert_whole(seen, root)
    assert (root.trace_id, root.parent_id, root.remote_parent) == (TRACE, SPAN, True)
    assert call.header("traceparent") == f"00-{TRACE}-{one.span_id}-01"
    assert call.header("tracestate") == "a=1,b=2"
    assert {span.state for span in seen.spans} == {"a=1,b=2"}


@pytest.mark.parametrize("share", [0, 1])
async def test_a_malformed_parent_is_as_good_as_none(share: int) -> None:
    engine = ScriptedEngine(honest)
    async with collector() as seen:
        traces = to(seen, sample=share)
        async with running_gateway(engine, traces=traces) as gateway, http1(gateway.url) as client:
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-1", "tracestate": "a=1"}
            await client.ask(CHAT.path, CHAT.payload(stream=True), headers=headers)
    (call,) = engine.calls
    parent = read_traceparent((call.header("traceparent") or "").encode())
    assert parent is not None
    assert parent.sampled == bool(share)
    assert call.header("tracestate") is None
    if share:
        root = seen.one(SERVER)
        assert (root.parent_id, root.trace_id) == ("", parent.trace_id)
        assert root.trace_id != TRACE
    assert bool(seen.spans) == bool(share)


async def test_a_caller_who_isn_t_sampled_gets_no_spans_and_is_handed_on() -> None:
    engine = ScriptedEngine(honest)
    async with (
        collector() as seen,
        running_gateway(engine, traces=to(seen)) as gateway,
        http1(gateway.url) as client,
    ):
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-00", "tracestate": "a=1"}
        assert (await client.ask(CHAT.path, CHAT.payload(stream=True), headers=headers)).status == 200
    assert not seen.paths
    assert engine.calls[0].header("traceparent") == f"00-{TRACE}-{SPAN}-00"
    assert engine.calls[0].header("tracestate") == "a=1"


async def test_a_caller_who_is_sampled_is_traced_whatever_the_share() -> None:
    async with (
        collector() as seen,
        running_gateway(ScriptedEngine(honest), traces=to(seen, sample=0)) as gateway,
        http1(gateway.url) as client,
    ):
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        await client.ask(CHAT.path, CHAT.payload(stream=True), headers=headers)
    assert seen.one(SERVER).trace_id == TRACE


@pytest.mark.parametrize("value", [f"00-{TRACE}-{SPAN}-01", "whatever"])
async def test_without_traces_a_client_s_field_passes_as_it_is(value: str) -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine) as gateway, http1(gateway.url) as client:
        headers = {"traceparent": value, "tracestate": "odd one"}
        await client.ask(CHAT.path, CHAT.payload(stream=True), headers=headers)
    assert engine.calls[0].header("traceparent") == value
    assert engine.calls[0].header("tracestate") == "odd one"


async def test_a_client_that_leaves_is_no_error_and_its_reclaim_is_seen() -> None:
    engine = ScriptedEngine(Stream(tokens=100, pause_after=3, until=trio.Event()), slots=1, kind="vllm")
    async with collector() as seen, running_gateway(engine, traces=to(seen)) as gateway:
        async with http1(gateway.url) as client:
            await client.post(CHAT.path, CHAT.payload(stream=True))
            await client.head()
        record = await gateway.record(outcome="client_gone")
    root, one = seen.one(SERVER), seen.one(TRY)
    assert_whole(seen, root)
    assert seen.below(one) == [*PHASES, "reclaim"]
    reclaim = seen.one("reclaim")
    assert abs((reclaim.end - reclaim.start) / 1e6 - record["reclaim_ms"]) < 0.01
    assert reclaim.told == {"gateway.engine": engine.name, "gateway.reclaimed_by": "engine_idle"}
    assert not any(span.error for span in seen.spans)
    assert root.told["gateway.outcome"] == "client_gone"
    assert root.told["gateway.reclaimed_by"] == "engine_idle"
    assert root.told["http.response.status_code"] == 200
    assert "error.type" not in {**root.told, **one.told}


async def test_each_try_is_seen() -> None:
    bad = ScriptedEngine(Status(503), name="bad")
    good = ScriptedEngine(honest, name="good")
    async with (
        collector() as seen,
        running_gateway(bad, good, traces=to(seen)) as gateway,
        http1(gateway.url) as client,
    ):
        assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).status == 200
    root = seen.one(SERVER)
    assert_whole(seen, root)
    assert seen.below(root) == ["queue", TRY, TRY]
    first, second = sorted(seen.named(TRY), key=lambda span: span.start)
    assert first.end <= second.start
    assert (first.told["gateway.engine"], second.told["gateway.engine"]) == ("bad", "good")
    assert (first.told["gateway.attempt"], second.told["gateway.attempt"]) == (1, 2)
    assert (first.error, first.told["error.type"]) == (True, "503")
    assert not second.error
    assert not root.error
    assert root.told["gateway.attempts"] == 2
    assert "gen_ai.usage.input_tokens" not in first.told
    assert "gen_ai.usage.input_tokens" in second.told
    for engine, one in ((bad, first), (good, second)):
        assert engine.calls[0].header("traceparent") == f"00-{root.trace_id}-{one.span_id}-01"


async def test_an_engine_that_breaks_off_is_an_error_of_both() -> None:
    engine = ScriptedEngine(Stream(tokens=3, ending=Ending.RST))
    async with (
        collector() as seen,
        running_gateway(engine, traces=to(seen)) as gateway,
        http1(gateway.url) as client,
    ):
        await client.post(CHAT.path, CHAT.payload(stream=True))
        await client.head()
        await gateway.record(outcome="engine_failed")
    root, one = seen.one(SERVER), seen.one(TRY)
    assert (root.error, root.told["error.type"], root.told["http.response.status_code"]) == (
        True,
        "engine_failed",
        200,
    )
    assert (one.error, one.told["error.type"]) == (True, "engine_failed")


async def test_who_waits_in_vain_has_waited() -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(honest, slots=1)
    engine.plan = [Whole(takes=go_on)]
    async with (
        collector() as seen,
        running_gateway(engine, admission={"queue_seconds": 0.2}, traces=to(seen)) as gateway,
        http1(gateway.url) as first,
    ):
        await first.post(EMBEDDINGS.path, EMBEDDINGS.payload(stream=False))
        await engine.call()
        async with http1(gateway.url) as second:
            assert (await second.ask(CHAT.path, CHAT.payload(stream=True))).status == 503
        go_on.set()
        assert (await first.answer()).status == 200
    root = seen.one(SERVER)
    assert (root.error, root.told["error.type"], root.told["gateway.outcome"]) == (
        True,
        "queue_timeout",
        "shed",
    )
    assert root.told["gateway.attempts"] == 0
    assert seen.below(root) == ["queue"]
    (queue,) = [span for span in seen.named("queue") if span.parent_id == root.span_id]
    assert queue.end - queue.start > 0.19e9
    assert queue.within(root)
    assert seen.one("embeddings model").kind == "client"


async def test_what_is_rejected_is_one_span_and_no_error() -> None:
    async with (
        collector() as seen,
        running_gateway(ScriptedEngine(honest), traces=to(seen)) as gateway,
        http1(gateway.url) as client,
    ):
        assert (await client.ask("/made/up", {})).status == 404
    root = seen.one("POST")
    assert seen.spans == [root]
    assert not root.error
    assert root.told["url.path"] == "/made/up"
    assert "http.route" not in root.told
    assert (root.told["gateway.outcome"], root.told["gateway.code"]) == ("rejected", "not_found")


async def test_a_reclaim_that_ends_after_the_record_completes_the_trace() -> None:
    engine = ScriptedEngine(
        Stream(tokens=100, pause_after=3, until=trio.Event(), goes_on_for=0.4), slots=1, kind="vllm"
    )
    async with collector() as seen, running_gateway(engine, traces=to(seen)) as gateway:
        async with http1(gateway.url) as client:
            await client.post(CHAT.path, CHAT.payload(stream=True))
            await client.head()
        await gateway.record(outcome="client_gone")
        assert not seen.spans, "it isn't known yet when the engine stops"
    reclaim, one = seen.one("reclaim"), seen.one(TRY)
    assert reclaim.end - one.end > 0.3e9
