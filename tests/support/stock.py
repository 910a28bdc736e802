"""Stock clients: curl and the openai package, as people use them.

The openai clients run in worker threads, the asynchronous one with an event loop of its own there.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - only the openai client's thread runs it
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import openai
import trio
from openai.types.chat import ChatCompletionUserMessageParam

T = TypeVar("T")

HELLO: ChatCompletionUserMessageParam = {"role": "user", "content": "hello"}


class Curl:
    """A running curl that shows what it gets as it comes."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.got = bytearray()

    async def until(self, mark: bytes, count: int = 1) -> bytes:
        assert self.process.stdout is not None
        while self.got.count(mark) < count:
            data = await self.process.stdout.receive_some(65536)
            assert data, f"curl ended without {mark!r}: {bytes(self.got)!r}"
            self.got += data
        return bytes(self.got)

    async def rest(self) -> bytes:
        assert self.process.stdout is not None
        async for data in self.process.stdout:
            self.got += data
        await self.process.wait()
        return bytes(self.got)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)


@asynccontextmanager
async def curl(*arguments: str) -> AsyncIterator[Curl]:
    command = ["curl", "--silent", "--no-buffer", "--max-time", "20", *arguments]
    process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        yield Curl(process)
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                await trio.aclose_forcefully(pipe)


def json_arguments(url: str, payload: str) -> list[str]:
    return [url, "-H", "Content-Type: application/json", "-d", payload]


def _options(url: str) -> dict[str, Any]:
    return {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 15}


async def openai_sync(url: str, use: Callable[[openai.OpenAI], T]) -> T:
    """Use the synchronous client, in a thread."""

    def work() -> T:
        with openai.OpenAI(**_options(url)) as client:
            return use(client)

    return await trio.to_thread.run_sync(work)


async def openai_async(url: str, use: Callable[[openai.AsyncOpenAI], Awaitable[T]]) -> T:
    """Use the asynchronous client, in a thread with a loop of its own."""

    async def work() -> T:
        async with openai.AsyncOpenAI(**_options(url)) as client:
            return await use(client)

    return await trio.to_thread.run_sync(lambda: asyncio.run(work()))


def read_and_leave(client: openai.OpenAI, events: int) -> int:
    """Stream a chat, and close the stream after so many events."""
    stream = client.chat.completions.create(model="model", messages=[HELLO], stream=True)
    seen = 0
    for _ in stream:
        seen += 1
        if seen == events:
            stream.close()
            break
    return seen


async def read_and_leave_async(client: openai.AsyncOpenAI, events: int) -> int:
    stream = await client.chat.completions.create(model="model", messages=[HELLO], stream=True)
    seen = 0
    async for _ in stream:
        seen += 1
        if seen == events:
            await stream.close()
            break
    return seen
