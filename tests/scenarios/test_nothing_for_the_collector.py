"""Requests are freed when they end, by their reference counts: the collector looks seldom."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import pytest
import trio

from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import http1
from tests.support.http2 import http2
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Ending, Stream

TIMES = 3
Visit = Callable[[Gateway], Awaitable[None]]


async def streamed(gateway: Gateway) -> None:
    async with http1(gateway.url) as client:
        for _ in range(2):
            assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).status == 200


async def over_http2(gateway: Gateway) -> None:
    async with http2(gateway.url) as connection:
        for _ in range(2):
            stream = await connection.post(CHAT.path, CHAT.payload(stream=True))
            await stream.rest()


async def leaving(gateway: Gateway) -> None:
    async with http1(gateway.url) as client:
        await client.post(CHAT.path, CHAT.payload(stream=True, user="long"))
        await client.head()
    async with http2(gateway.url) as connection:
        stream = await connection.post(CHAT.path, CHAT.payload(stream=True, user="long"))
        await stream.head()
        await stream.reset()


async def refused(gateway: Gateway) -> None:
    async with http1(gateway.url) as client:
        assert (await client.ask("/nowhere", {})).status == 404
    async with http1(gateway.url) as client:
        await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{]")
        assert (await client.answer()).status == 400
    async with http1(gateway.url) as client:
        await client.send(b"GET / HTTP/1.1\r\nnonsense\r\n\r\n")
        assert (await client.head()).status == 400


async def failing(gateway: Gateway) -> None:
    async with http2(gateway.url) as connection:
        stream = await connection.post(CHAT.path, CHAT.payload(stream=True, user="broken"))
        await connection.until(lambda: stream.over)


VISITS: dict[str, Visit] = {
    visit.__name__: visit for visit in (streamed, over_http2, leaving, refused, failing)
}


async def answers(call: object) -> None:
    user = getattr(call, "json", {}).get("user")
    script = Stream(
        tokens=1000 if user == "long" else 3,
        gap=0.01 if user == "long" else 0.0,
        ending=Ending.RST if user == "broken" else Ending.CLEAN,
    )
    await script(call)  # type: ignore[arg-type]


@pytest.fixture
def unseen() -> Iterator[Callable[[], Counter[str]]]:
    """What of the gateway's a collector would have to free, by class."""

    def found() -> Counter[str]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
        gc.set_debug(0)
        gc.garbage.clear()
        return Counter({kind: count for kind, count in kinds.items() if kind.startswith("gateway.")})

    gc.disable()
    yield found
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize("visit", VISITS)
async def test_requests_leave_nothing_to_the_collector(
    visit: str, unseen: Callable[[], Counter[str]]
) -> None:
    async with running_gateway(ScriptedEngine(answers, slots=4)) as gateway:
        await VISITS[visit](gateway)
        await gateway.idle()
        await trio.testing.wait_all_tasks_blocked(0.05)
        gc.collect()
        for _ in range(TIMES):
            await VISITS[visit](gateway)
        await gateway.idle()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert unseen() == Counter()
