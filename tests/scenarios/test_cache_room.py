"""Room in an engine's KV cache: reserved by an estimate, until the engine has counted the prompt."""

from __future__ import annotations

import json

import trio

from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import http1
from tests.support.routes import CHAT, DONE
from tests.support.scripted import Call, ScriptedEngine

LONG = "x" * 4000
"""Taken for a thousand tokens."""


class Counting:
    """Streams; says in the first event how long the prompt is, and ends when it may."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.may_end = trio.Event()

    async def __call__(self, call: Call) -> None:
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": 0}
        delta = {"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": usage}
        await call.head(200, [("Content-Type", "text/event-stream")])
        await call.send(b"data: " + json.dumps(delta).encode() + b"\n\n")
        call.token()
        await self.may_end.wait()
        await call.send(DONE)
        await call.end()


async def ask(gateway: Gateway, text: str) -> None:
    async with http1(gateway.url) as client:
        messages = [{"role": "user", "content": text}]
        answer = await client.ask(CHAT.path, CHAT.payload(stream=True, messages=messages, max_tokens=10))
        assert answer.status == 200


async def test_what_was_reserved_too_much_goes_to_the_next() -> None:
    first, second = Counting(100), Counting(100)
    engine = ScriptedEngine(first, slots=4)
    engine.plan = [first, second]
    async with running_gateway(engine, engine={"kv_tokens": 1200}) as gateway, trio.open_nursery() as nursery:
        nursery.start_soon(ask, gateway, LONG)
        nursery.start_soon(ask, gateway, LONG)
        await (await engine.call(1)).made(1)
        first.may_end.set()
        second.may_end.set()


async def test_where_it_was_too_little_nobody_is_let_in_until_it_fits() -> None:
    first, second = Counting(1190), Counting(5)
    engine = ScriptedEngine(second, slots=4)
    engine.plan = [first, second]
    second.may_end.set()
    async with running_gateway(engine, engine={"kv_tokens": 1200}) as gateway, trio.open_nursery() as nursery:
        nursery.start_soon(ask, gateway, "short")
        await (await engine.call(0)).made(1)
        await gateway.in_phase("streaming")
        nursery.start_soon(ask, gateway, "short")
        await gateway.queued(1)
        first.may_end.set()
