"""What a service manager is told, by a real process and by the notifier alone."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
import trio
import trio.testing

from gateway.notify import Notifier
from tests.support.http1 import http1
from tests.support.process import gateway_process
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Stream, honest


class Manager:
    """The manager's end of the socket."""

    def __init__(self, address: str) -> None:
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        bound.bind("\0" + address[1:] if address.startswith("@") else address)
        self.raw = bound
        self.socket = trio.socket.from_stdlib_socket(bound)

    async def message(self) -> dict[str, str]:
        lines = (await self.socket.recv(65536)).decode().split("\n")
        return dict(line.split("=", 1) for line in lines)

    async def until(self, name: str) -> dict[str, str]:
        """The next message that says so, past those of the watchdog."""
        while name not in (message := await self.message()):
            assert "WATCHDOG" in message, message
        return message

    async def told(self, status: str) -> None:
        """Until a message of the watchdog has this status."""
        while (await self.until("WATCHDOG"))["STATUS"] != status:
            pass


@pytest.fixture(params=["path", "abstract"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "notify") if request.param == "path" else f"@gateway-{uuid4().hex}"


@pytest.fixture
async def manager(address: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Manager]:
    """One whose processes find it in their environment."""
    for name, value in {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "100000"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    manager = Manager(address)
    with manager.socket:
        yield manager


async def test_a_process_tells_when_it_is_ready_reloads_and_stops(tmp_path: Path, manager: Manager) -> None:
    go_on = trio.Event()
    engine = ScriptedEngine(Stream(pause_after=1, until=go_on), slots=1)
    with trio.fail_after(30):
        async with gateway_process(tmp_path, engine) as gateway, http1(gateway.url) as client:
            ready = await manager.message()
            assert ready["READY"] == "1"
            assert (await gateway.admin("/readyz")).status == 200
            await manager.told("0 live requests, 0 of them waiting for a slot")

            await client.post(CHAT.path, CHAT.payload(stream=True))
            await client.head()
            async with http1(gateway.url) as second:
                await second.post(CHAT.path, CHAT.payload(stream=True))
                await manager.told("2 live requests, 1 of them waiting for a slot")
            await manager.told("1 live requests, 0 of them waiting for a slot")

            before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            gateway.signal(signal.SIGHUP)
            reloading = await manager.until("RELOADING")
            assert (
                before
                <= int(reloading["MONOTONIC_USEC"])
                <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            )
            await manager.until("READY")

            config = tmp_path / "config.toml"
            config.write_text(config.read_text().replace("slots = 1", "slots = 0"))
            gateway.signal(signal.SIGHUP)
            await manager.until("RELOADING")
            assert (await manager.until("READY"))["STATUS"].endswith("; the last reload failed")

            gateway.signal(signal.SIGTERM)
            stopping = await manager.until("STOPPING")
            assert stopping["STATUS"].startswith("Draining: 1 live requests")
            # The watchdog goes on to the end of the drain.
            assert (await manager.until("WATCHDOG"))["STATUS"].startswith("Draining: ")
            go_on.set()
            await client.rest()
            await gateway.exited.wait()
            assert gateway.process.returncode == 0


async def test_a_watchdog_of_another_process_is_not_fed(
    tmp_path: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))  # The gateway is a child of this one.
    with trio.fail_after(30):
        async with gateway_process(tmp_path, ScriptedEngine(honest)) as gateway:
            assert "READY" in await manager.message()
            gateway.signal(signal.SIGTERM)
            assert "STOPPING" in await manager.message()
            await gateway.exited.wait()


async def test_the_end_of_the_last_of_several_reloads_is_told(address: str) -> None:
    manager = Manager(address)
    with manager.socket:
        notifier = Notifier(lambda: "well", {"NOTIFY_SOCKET": address})
        with notifier.reloading(), notifier.reloading():
            pass
        assert ["RELOADING" in await manager.message() for _ in range(3)] == [True, True, False]
        with notifier.reloading():
            notifier.stopping()
        notifier.ready()  # What comes next shows that the reload's end wasn't told: it stops.
        names = [next(iter(await manager.message())) for _ in range(3)]
        assert names == ["RELOADING", "STOPPING", "READY"]


async def test_the_watchdog_is_fed_twice_as_often_as_asked_for(
    address: str, autojump_clock: trio.testing.MockClock
) -> None:
    manager = Manager(address)
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}
    with manager.socket:
        with trio.move_on_after(100):
            await Notifier(lambda: "well", environ).watchdog()
        messages = 0
        with suppress(BlockingIOError):
            while manager.raw.recv(1000):
                messages += 1
        assert messages == 7  # at 0, 15, 30, … 90


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WATCHDOG_USEC": "1000"},
        {"NOTIFY_SOCKET": "vsock:2:1234", "WATCHDOG_USEC": "1000"},
        {"NOTIFY_SOCKET": "/nowhere"},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "soon"},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "0"},
    ],
)
async def test_nobody_to_tell_is_no_fault(environ: dict[str, str]) -> None:
    notifier = Notifier(lambda: "well", environ)
    notifier.ready()
    with notifier.reloading():
        notifier.stopping()
    with trio.fail_after(5):
        await notifier.watchdog()
