"""The dashboard in a real browser: its numbers, what can be clicked, keys, the login, 1,000 requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from tests.support.browser import MISSING, Browser, browser
from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import Http1, connect, http1
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Status, Stream, honest

pytestmark = [
    pytest.mark.skipif(
        MISSING, reason="needs Chromium and its driver: apt-get install chromium chromium-driver"
    ),
    pytest.mark.slow,
]
SECONDS = 90
NUMBER = "return document.querySelector(arguments[0])?.textContent === arguments[1]"
LIVE = "return document.querySelector('#link')?.textContent === 'live'"


def paused() -> Stream:
    """It sends one token, and then waits for its client to leave."""
    return Stream(pause_after=1, until=trio.Event())


@asynccontextmanager
async def looking_at(gateway: Gateway) -> AsyncIterator[Browser]:
    async with browser() as page:
        await page.open(gateway.service.admin)
        await page.until(LIVE)
        yield page
        assert await page.complaints() == []


@asynccontextmanager
async def streaming(gateway: Gateway, count: int, **more: Any) -> AsyncIterator[list[Http1]]:
    clients = [Http1(await connect(gateway.url)) for _ in range(count)]
    try:
        for client in clients:
            await client.post(CHAT.path, {**CHAT.payload(stream=True), **more})
        yield clients
    finally:
        for client in clients:
            await client.close()


async def test_its_numbers_are_the_metrics_at_rest_and_under_load() -> None:
    engine = ScriptedEngine(honest, slots=3)
    async with running_gateway(engine, seconds=SECONDS) as gateway, looking_at(gateway) as page:
        async with http1(gateway.url) as client:
            for _ in range(4):
                await client.ask(CHAT.path, CHAT.payload(stream=True))
        ended = "return document.querySelector('#chart-outcomes').ariaLabel.includes(arguments[0])"
        await page.until(ended, "completed 4")
        engine.script = paused()
        async with streaming(gateway, 5):
            await page.until(NUMBER, "#waiting", "2")
            await page.until(NUMBER, "#running", "3")
            await page.until(NUMBER, "#live", "5")
            ledger = (await gateway.ledger())["engines"]["engine"]
            assert await page.text(".engine .counts") == "3 running, 0 reclaiming, 0 ghosts, 0 free of 3"
            assert (ledger["running"], ledger["free"]) == (3, 0)
            metrics = await gateway.metrics()
            assert metrics["gateway_queue_depth"] == 2
            assert await page.run("return document.querySelectorAll('.cells .cell.running').length") == 3
        await page.until(ended, "client_gone 5")
        await page.until(NUMBER, "#running", "0")
        metrics = await gateway.metrics()
        told = await page.run("return document.querySelector('#chart-teardown').ariaLabel")
        assert told.endswith(f"{metrics['gateway_teardown_seconds_count']:g} in all")


async def test_what_ends_an_answer_takes_two_clicks() -> None:
    engine = ScriptedEngine(paused(), slots=1)
    async with running_gateway(engine, seconds=SECONDS) as gateway, looking_at(gateway) as page:
        async with streaming(gateway, 1):
            await page.until(NUMBER, "#live", "1")
            await page.click("#requests button")
            await page.until(NUMBER, "#requests button", "Sure?")
            assert len(await gateway.requests()) == 1
            await page.click("#requests button")
            await gateway.record(outcome="cancelled")
        await page.until(NUMBER, "#live", "0")
        for wanted, word in ((True, "kept free"), (False, "healthy")):
            await page.click(".engine button")
            await page.click(".engine button")
            await gateway.engine("engine", lambda each: each["drained"] is wanted)  # noqa: B023
            await page.until(NUMBER, ".engine .pill", word)


async def test_a_sick_engine_is_seen_at_a_glance() -> None:
    engine = ScriptedEngine(Status(503))
    async with (
        running_gateway(engine, seconds=SECONDS, health={"failures": 1}) as gateway,
        looking_at(gateway) as page,
        http1(gateway.url) as client,
    ):
        await client.ask(CHAT.path, CHAT.payload(stream=True))
        await page.until("return !document.querySelector('#notice').hidden")
        assert (await page.text("#notice")).startswith("engine is ")
        assert await page.text(".engine .pill") in ("ejected", "probation")


async def test_a_client_s_words_are_shown_and_not_run() -> None:
    engine = ScriptedEngine(paused(), models=("*",))
    evil = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>"
    async with (
        running_gateway(engine, seconds=SECONDS) as gateway,
        looking_at(gateway) as page,
        streaming(gateway, 1, model=evil),
    ):
        await page.until(NUMBER, "#live", "1")
        assert await page.text("#requests tbody tr[data-id] td:nth-child(3)") == evil
        assert await page.run("return document.querySelector('#requests img, #requests script')") is None
        assert await page.run("return document.title") == "Gateway"


async def test_keys_themes_and_narrow_screens() -> None:
    async with (
        running_gateway(ScriptedEngine(honest), seconds=SECONDS) as gateway,
        looking_at(gateway) as page,
    ):
        ground = "return getComputedStyle(document.body).backgroundColor"
        seen = []
        for _ in range(3):
            await page.keys("t")
            seen.append((await page.text("#theme"), await page.run(ground)))
        assert [name for name, _ in seen] == ["Theme: light", "Theme: dark", "Theme: system"]
        assert seen[0][1] != seen[1][1]
        await page.keys("/")
        assert await page.run("return document.activeElement.id") == "filter"
        await page.keys("tt")
        assert await page.run("return document.activeElement.value") == "tt"
        await page.keys("\ue00c")  # Escape
        assert await page.run("return document.querySelector('#filter').value") == ""
        await page.size(360, 800)
        wide = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"
        assert not await page.run(wide), "it scrolls sideways"


async def test_the_login() -> None:
    token = "correct-horse-battery"
    engine, server = ScriptedEngine(honest), {"admin_token": token}
    async with (
        running_gateway(engine, server=server, seconds=SECONDS, check=False) as gateway,
        browser() as page,
    ):
        await page.open(gateway.service.admin)
        await page.until("return location.pathname === '/login'")
        await page.click("input")
        await page.keys("wrong-horse-battery\ue007")  # Enter
        await page.until("return location.search === '?wrong'")
        await page.click("input")
        await page.keys(token + "\ue007")
        await page.until(LIVE)
        assert await page.run("return document.cookie") == "", "scripts don't see it"
        await page.click("#leave button")
        await page.until("return location.pathname === '/login'")


async def test_a_thousand_requests_do_not_make_it_sluggish() -> None:
    """Only what is in sight is drawn."""
    engine = ScriptedEngine(paused(), slots=1)
    async with (
        running_gateway(engine, seconds=SECONDS, admission={"queue": 2000}) as gateway,
        looking_at(gateway) as page,
        streaming(gateway, 1000),
    ):
        await page.until(NUMBER, "#live", "1000")
        rows = "return document.querySelectorAll('#requests tr').length"
        assert await page.run(rows) < 60
        await page.run("document.querySelector('#window').scrollTop = 20000")
        shown = "return [...document.querySelectorAll('#requests tr[data-id]')]"
        await page.until(shown + ".some((row) => row.offsetTop > 20000)")
        assert await page.run(rows) < 60
        await page.click("#filter")
        await page.keys("queued")
        await page.until(NUMBER, "#live", "999 of 1000")
