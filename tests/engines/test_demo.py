"""`gateway demo`: one command that starts a real engine, the gateway and clients, and ends them all."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from gateway.demo.checks import MODEL, Failure, check_processor, read_plan
from gateway.demo.traffic import LEAVERS
from tests.support.http1 import Http1, connect, http1, request_bytes
from tests.support.process import free_ports

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CONFIG = """
[server]
listen = ["127.0.0.1:{}"]
admin = "127.0.0.1:{}"
drain_seconds = 1
[[engine]]
name = "demo"
kind = "llamacpp"
url = "http://127.0.0.1:{}"
slots = 2
models = ["{}"]
"""


@asynccontextmanager
async def demo(
    folder: Path, *arguments: str, seconds: float = 100
) -> AsyncIterator[tuple[trio.Process, list[int]]]:
    ports = free_ports(3)
    config = folder / "demo.toml"
    config.write_text(CONFIG.format(*ports, MODEL))
    with trio.fail_after(200), (folder / "out").open("wb") as out:
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "gateway", "demo", "--config", str(config), *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process, ports
        finally:
            if process.poll() is None:
                process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


async def admin(port: int, path: str) -> bytes | None:
    try:
        client = Http1(await connect(f"http://127.0.0.1:{port}"))
    except OSError:
        return None
    try:
        await client.send(request_bytes(path, method="GET"))
        return (await client.answer()).body
    finally:
        await client.close()


async def until(port: int, word: bytes) -> None:
    while word not in (await admin(port, "/metrics") or b""):  # noqa: ASYNC110 - it is another process's
        await trio.sleep(0.2)


async def gone(port: int) -> bool:
    return await admin(port, "/health") is None


async def test_it_runs_clients_come_and_go_and_ctrl_c_ends_all(tmp_path: Path) -> None:
    async with demo(tmp_path, "--traffic", "2") as (process, (api, control, engine)):
        await until(control, b'outcome="client_gone"')
        await until(control, b'outcome="completed"')
        assert b"<title>Gateway</title>" in (await admin(control, "/") or b"")
        async with http1(f"http://127.0.0.1:{api}") as client:
            assert (await client.ask("/v1/models", method="GET")).json["data"][0]["id"] == MODEL
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
        assert await gone(engine)
        assert await gone(api)
    said = (tmp_path / "out").read_text()
    assert "Clients come and go for 2 minutes" in said
    assert "The engine has stopped." in said
    assert "Traceback" not in said


@pytest.mark.parametrize("during", ["Loading", "Starting the gateway"])
async def test_ctrl_c_while_it_starts_ends_it_as_well(during: str, tmp_path: Path) -> None:
    async with demo(tmp_path) as (process, (_, _, engine)):
        while during not in (tmp_path / "out").read_text():  # noqa: ASYNC110 - it is another process's
            await trio.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
        assert await gone(engine)
    said = (tmp_path / "out").read_text()
    assert "cleanly" not in said
    assert "Traceback" not in said


async def test_a_port_that_is_taken_is_named_with_who_has_it(tmp_path: Path) -> None:
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    taken = listener.socket.getsockname()[1]
    config = tmp_path / "demo.toml"
    config.write_text(CONFIG.format(*free_ports(2), taken, MODEL))
    done = await trio.run_process(
        [sys.executable, "-m", "gateway", "demo", "--config", str(config)],
        capture_stderr=True,
        capture_stdout=True,
        check=False,
    )
    await listener.aclose()
    assert done.returncode == 1
    assert f"127.0.0.1:{taken} can't be listened on".encode() in done.stderr
    assert b"Held by: process" in done.stderr


def test_a_configuration_without_the_demonstration_s_engine_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(CONFIG.format(1, 2, 3, "mine"))
    with pytest.raises(Failure, match="doesn't describe the demonstration"):
        read_plan(config)


def test_a_processor_that_can_not_run_the_engine_is_named(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("flags\t\t: fpu vme sse2\n")
    with pytest.raises(Failure, match="AVX2"):
        check_processor(info)


def test_some_of_the_clients_leave() -> None:
    assert 0 < LEAVERS < 1
