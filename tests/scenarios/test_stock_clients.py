"""curl and the openai client against the scripted engine: read on, and leave in the middle."""

from __future__ import annotations

import json

import openai
import pytest
import trio

from tests.conftest import Tls
from tests.support.gateway import running_gateway
from tests.support.routes import CHAT, EMBEDDINGS, STREAMING, Route
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Ending, Status, Stream, honest
from tests.support.stock import (
    HELLO,
    curl,
    json_arguments,
    openai_async,
    openai_sync,
    read_and_leave,
    read_and_leave_async,
)

VERSIONS = pytest.mark.parametrize("version", ["--http1.1", "--http2-prior-knowledge", "--http1.0"])


@VERSIONS
@pytest.mark.parametrize("route", STREAMING, ids=str)
async def test_curl_streams(version: str, route: Route) -> None:
    engine = ScriptedEngine(honest, kind=route.kind)
    async with running_gateway(engine) as gateway:
        arguments = json_arguments(gateway.url + route.path, json.dumps(route.payload(stream=True)))
        async with curl(version, *arguments) as client:
            assert route.parts is not None
            assert await client.rest() == route.parts.all(5)
            assert client.process.returncode == 0
        await gateway.record(outcome="completed")


@VERSIONS
async def test_ctrl_c_in_curl_stops_the_engine(version: str) -> None:
    engine = ScriptedEngine(Stream(tokens=1000, gap=0.02))
    async with running_gateway(engine) as gateway:
        arguments = json_arguments(gateway.url + CHAT.path, json.dumps(CHAT.payload(stream=True)))
        async with curl(version, *arguments) as client:
            await client.until(b" tk", 3)
            since = trio.current_time()
            client.interrupt()
            assert await engine.calls[0].closed() - since < 0.5
        await gateway.record(outcome="client_gone", status=499)


async def test_curl_over_tls_negotiates_http2(tls: Tls) -> None:
    engine = ScriptedEngine(honest)
    async with running_gateway(engine, server={"tls": tls.section}) as gateway:
        authority = str(tls.certificate.with_name("authority.pem"))
        arguments = json_arguments(gateway.url + CHAT.path, json.dumps(CHAT.payload(stream=True)))
        async with curl("--cacert", authority, "--http2", "-w", "%{http_version}", *arguments) as client:
            body = await client.rest()
            assert body.endswith(b"[DONE]\n\n2"), body[-50:]


@pytest.mark.parametrize(("version", "code"), [("--http1.1", 18), ("--http2-prior-knowledge", 92)])
async def test_curl_tells_a_broken_stream_from_a_whole_one(version: str, code: int) -> None:
    engine = ScriptedEngine(Stream(ending=Ending.RST))
    async with running_gateway(engine) as gateway:
        arguments = json_arguments(gateway.url + CHAT.path, json.dumps(CHAT.payload(stream=True)))
        async with curl(version, *arguments) as client:
            body = await client.rest()
            assert b"engine_failed" in body, "the in-band error was lost"
            assert client.process.returncode == code


async def test_openai_client_streams_and_asks() -> None:
    def use(client: openai.OpenAI) -> tuple[str, str, int]:
        stream = client.chat.completions.create(model="model", messages=[HELLO], stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        whole = client.chat.completions.create(model="model", messages=[HELLO])
        vectors = client.embeddings.create(model="model", input="hello", encoding_format="float")
        return streamed, whole.choices[0].message.content or "", len(vectors.data)

    async with running_gateway(ScriptedEngine(honest)) as gateway:
        assert await openai_sync(gateway.url, use) == (" tk0 tk1 tk2 tk3 tk4", " tk0 tk1", 1)
        await gateway.recorded(3, outcome="completed")


async def test_openai_client_leaves() -> None:
    engine = ScriptedEngine(Stream(tokens=1000, gap=0.02))
    async with running_gateway(engine) as gateway:
        assert await openai_sync(gateway.url, lambda client: read_and_leave(client, 4)) == 4
        assert await openai_async(gateway.url, lambda client: read_and_leave_async(client, 4)) == 4
        for call in engine.calls:
            await call.closed()
            assert call.tokens < 100
        await gateway.recorded(2, outcome="client_gone", status=499)


async def test_openai_async_client_is_cancelled_while_it_waits() -> None:
    import asyncio  # noqa: TID251 - in the client's own thread

    engine = ScriptedEngine(Stream(prefill=trio.Event()))

    async def use(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.chat.completions.create(model="model", messages=[HELLO]), 0.3)

    async with running_gateway(engine) as gateway:
        engine.script = Status(200, takes=trio.Event())
        await openai_async(gateway.url, use)
        await engine.calls[0].closed()
        await gateway.record(outcome="client_gone")


async def test_openai_client_understands_our_errors() -> None:
    def unknown(client: openai.OpenAI) -> str:
        with pytest.raises(openai.NotFoundError) as error:
            client.chat.completions.create(model="no-such", messages=[HELLO])
        return str(error.value.code)

    def broken(client: openai.OpenAI) -> str:
        with pytest.raises(openai.APIError) as error:
            for _ in client.chat.completions.create(model="model", messages=[HELLO], stream=True):
                pass
        return str(error.value.code)

    engine = ScriptedEngine(Stream(ending=Ending.FIN))
    async with running_gateway(engine) as gateway:
        assert await openai_sync(gateway.url, unknown) == "model_not_found"
        assert await openai_sync(gateway.url, broken) == "engine_failed"


async def test_openai_client_lists_models() -> None:
    async with running_gateway(ScriptedEngine(honest, models=("a", "b"))) as gateway:
        names = await openai_sync(
            gateway.url, lambda client: sorted(model.id for model in client.models.list())
        )
        assert names == ["a", "b"]


async def test_embeddings_in_many_threads() -> None:
    engine = ScriptedEngine(honest, slots=3)
    async with running_gateway(engine) as gateway:

        async def one() -> None:
            def use(client: openai.OpenAI) -> int:
                return len(client.embeddings.create(model="model", input="x", encoding_format="float").data)

            assert await openai_sync(gateway.url, use) == 1

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(one)
        await gateway.recorded(10, outcome="completed", route=EMBEDDINGS.path)
