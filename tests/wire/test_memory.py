"""Clients that ask for much and read nothing, or slowly: what they cost in memory, ours and the kernel's."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio

from gateway.spool import SLOW_SECONDS
from tests.support.http1 import Http1, http1
from tests.support.process import GatewayProcess, gateway_process
from tests.support.routes import CHAT
from tests.support.scripted import Call, ScriptedEngine
from tests.support.scripts import honest
from tests.wire import frames as f
from tests.wire.around import BODY
from tests.wire.raw2 import raw2

KB, MB = 1_000, 1_000_000
CLIENTS = 50
EACH = 10 * MB
FULL = 180 * KB
"""What a spool of the usual 256 KiB has when it is full: the rest is for a piece on its way."""
EACH_COSTS = 340 * KB
"""That spool, and what an open stream costs."""
WIDE = f.PREFACE + f.settings((4, 0x7FFFFFFF)) + f.window(0, 0x7FFF0000 - 65535)


async def plenty(call: Call) -> None:
    if call.json.get("user") == "bystander":
        await honest(call)
        return
    event = b"data: " + b"x" * 2_000 + b"\n\n"
    await call.head(200, [("Content-Type", CHAT.media)])
    for _ in range(EACH // len(event)):
        await call.send(event)


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def queued(port: int) -> list[int]:
    """Bytes that the kernel holds for each connection of a port's server and that its client hasn't taken."""
    sizes = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, state, queues = line.split()[1], line.split()[3], line.split()[4]
        if int(local.partition(":")[2], 16) == port and state != "0A":
            sizes.append(int(queues.partition(":")[0], 16))
    return sizes


async def stuck(gateway: GatewayProcess) -> None:
    """Until the spools of all the clients that ask for much are full."""
    while True:
        live = (await gateway.admin("/admin/requests")).json["requests"]
        if sum(request["spooled_bytes"] >= FULL for request in live) == CLIENTS:
            return
        await trio.sleep(0.05)


async def ask_for_much(number: int, url: str, stack: AsyncExitStack) -> None:
    if number % 2:
        client = await stack.enter_async_context(http1(url))
        await client.post(CHAT.path, CHAT.payload(stream=True))
        return
    connection = await stack.enter_async_context(raw2(url, opening=WIDE))
    await connection.answered()
    await connection.stop_reading()
    await connection.send(f.post(1, BODY))


async def take(client: Http1, size: int) -> None:
    while size > 0:
        size -= len(await client.stream.receive_some(size))


async def ask_for_little(url: str) -> None:
    async with http1(url) as client:
        answer = await client.ask(CHAT.path, CHAT.payload(stream=True, user="bystander"))
        assert answer.status == 200


@pytest.mark.slow
async def test_clients_that_never_read_cost_little(tmp_path: Path) -> None:
    engine = ScriptedEngine(plenty, slots=CLIENTS + 1)
    with trio.fail_after(100):
        async with (
            gateway_process(tmp_path, engine, server={"drain_seconds": 1}) as gateway,
            AsyncExitStack() as stack,
        ):
            await ask_for_little(gateway.url)
            idle = resident(gateway.process.pid)
            for number in range(CLIENTS):
                await ask_for_much(number, gateway.url, stack)
            await engine.call(CLIENTS)
            await stuck(gateway)
            each = (resident(gateway.process.pid) - idle) / CLIENTS
            assert each < EACH_COSTS, f"{each:.0f} bytes for each client"
            kernel = queued(int(gateway.url.rpartition(":")[2]))
            assert len(kernel) == CLIENTS
            assert max(kernel) < 100_000
            await ask_for_little(gateway.url)
            since = trio.current_time()
            gateway.signal(signal.SIGTERM)
            await gateway.exited.wait()
            assert trio.current_time() - since < 1 + 3
            assert gateway.process.returncode == 0
            assert [record["outcome"] for record in gateway.records].count("drained") == CLIENTS


@pytest.mark.slow
async def test_clients_that_read_slowly_cost_no_more(tmp_path: Path) -> None:
    """As they read, what came first goes and other comes: the heap must not be left full of holes."""
    engine = ScriptedEngine(plenty, slots=CLIENTS + 1)
    with trio.fail_after(100):
        async with gateway_process(tmp_path, engine) as gateway, AsyncExitStack() as stack:
            await ask_for_little(gateway.url)
            idle = resident(gateway.process.pid)
            clients = [await stack.enter_async_context(http1(gateway.url)) for _ in range(CLIENTS)]
            for client in clients:
                # Else the kernel would take all of it in.
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * KB)
                await client.post(CHAT.path, CHAT.payload(stream=True))
            for _ in range(20):
                await stuck(gateway)
                await trio.sleep(2 * SLOW_SECONDS)
                async with trio.open_nursery() as nursery:
                    for client in clients:
                        nursery.start_soon(take, client, 60 * KB)
            await stuck(gateway)
            each = (resident(gateway.process.pid) - idle) / CLIENTS
            assert each < EACH_COSTS, f"{each:.0f} bytes for each client"
