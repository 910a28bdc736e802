"""Debian's Chromium, driven over WebDriver (W3C): just what the dashboard's tests need of it."""

from __future__ import annotations

import base64
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import trio

from tests.support.process import free_ports

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = CHROMIUM is None or DRIVER is None

_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # it runs as root in containers, and shows pages of this machine only
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver, 12.1


class Browser:
    """One window."""

    def __init__(self, client: httpx.AsyncClient, session: str) -> None:
        self._client = client
        self._session = f"/session/{session}"

    async def _do(self, path: str, **body: Any) -> Any:
        answer = await self._client.post(self._session + path, json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    async def open(self, url: str) -> None:
        await self._do("/url", url=url)

    async def run(self, script: str, *arguments: Any) -> Any:
        """What `return …` says in the page."""
        return await self._do("/execute/sync", script=script, args=list(arguments))

    async def text(self, selector: str) -> str:
        text: str = await self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        return text

    async def until(self, script: str, *arguments: Any) -> Any:
        """Until the page says something true, and what."""
        while not (value := await self.run(script, *arguments)):  # noqa: ASYNC110 - it is another process's event
            await trio.sleep(0.05)
        return value

    async def click(self, selector: str) -> None:
        found = await self._do("/element", using="css selector", value=selector)
        await self._do(f"/element/{found[_ELEMENT]}/click")

    async def keys(self, text: str) -> None:
        """Press keys, wherever the focus is."""
        actions = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        await self._do("/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    async def size(self, width: int, height: int) -> None:
        await self._do("/window/rect", width=width, height=height)

    async def screenshot(self, file: Path) -> None:
        answer = await self._client.get(self._session + "/screenshot")
        await trio.Path(file).write_bytes(base64.b64decode(answer.json()["value"]))

    async def complaints(self) -> list[str]:
        """What the page wrote to the console that isn't chatter."""
        entries = await self._do("/se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A window of a browser of its own."""
    (port,) = free_ports(1)
    assert DRIVER is not None
    with tempfile.TemporaryDirectory(prefix="chromium-") as folder:
        driver = await trio.lowlevel.open_process(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False
            ) as client:
                session = await _session(client, folder)
                try:
                    yield Browser(client, session)
                finally:
                    # Also when the test has failed: the driver's end isn't the browser's.
                    with trio.move_on_after(10, shield=True), suppress(httpx.HTTPError):
                        await client.delete(f"/session/{session}")
        finally:
            driver.terminate()
            with trio.CancelScope(shield=True):
                await driver.wait()


async def _session(client: httpx.AsyncClient, folder: str) -> str:
    options = {"binary": CHROMIUM, "args": [*_ARGUMENTS, f"--user-data-dir={folder}"]}
    wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
    for _ in range(200):
        try:
            answer = await client.post("/session", json={"capabilities": wanted})
        except httpx.ConnectError:
            await trio.sleep(0.05)
            continue
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        session: str = value["sessionId"]
        return session
    raise AssertionError("the driver doesn't answer")
