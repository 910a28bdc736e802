"""Traces when not all is well with them: no collector, no room, nothing installed, or none wanted."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio

from gateway import config, service, tracing
from gateway.server import BindError
from gateway.spans import Span, spans_of
from tests.support.collector import collector, straight, to
from tests.support.gateway import Gateway, running_gateway, toml_of
from tests.support.http1 import http1
from tests.support.process import command, free_ports
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import honest

__all__ = ["straight"]

SERVER = "POST /v1/chat/completions"


async def dropped(gateway: Gateway) -> float:
    """How many spans, as soon as it is any."""
    with trio.fail_after(5):
        while True:
            if count := (await gateway.metrics())["gateway_spans_dropped_total"]:
                return count
            await trio.sleep(0.01)


@pytest.mark.parametrize("how", ["nobody listens", "it refuses"])
async def test_without_a_collector_requests_are_fine_and_the_end_is_prompt(how: str) -> None:
    with structlog.testing.capture_logs() as logs:
        async with collector() as seen:
            seen.status = 400
            url = seen.url if how == "it refuses" else f"http://127.0.0.1:{free_ports(1)[0]}"
            async with running_gateway(ScriptedEngine(honest), traces=to(url)) as gateway:
                async with http1(gateway.url) as client:
                    for _ in range(3):
                        assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).status == 200
                await gateway.recorded(3)
                since = trio.current_time()
                gateway.service.drain()
                await gateway.ended.wait()
                assert trio.current_time() - since < 4
    said = [entry for entry in logs if "collector" in entry["event"]]
    assert [entry["log_level"] for entry in said] == ["warning"]
    assert said[0]["reason"]


async def test_dropped_spans_are_counted_and_the_return_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_SEND_SECONDS", 0.05)
    with structlog.testing.capture_logs() as logs:
        async with collector() as seen:
            seen.status = 400
            async with (
                running_gateway(ScriptedEngine(honest), traces=to(seen)) as gateway,
                http1(gateway.url) as client,
            ):
                await client.ask(CHAT.path, CHAT.payload(stream=True))
                await seen.until(1)
                assert await dropped(gateway)
                seen.status = 200
                await client.ask(CHAT.path, CHAT.payload(stream=True))
                await seen.until(2)
    assert len(seen.named(SERVER)) == 1
    assert [entry["log_level"] for entry in logs if "collector" in entry["event"]] == ["warning", "info"]


async def test_what_cant_be_encoded_is_dropped_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    odd: list[str | int] = ["\ud800", 2**64]

    def oddly(*about: Any) -> Iterator[Span]:
        attributes = {"odd": odd.pop()} if odd else {}
        return (replace(span, attributes=attributes) for span in spans_of(*about))

    monkeypatch.setattr(tracing, "spans_of", oddly)
    monkeypatch.setattr(tracing, "_SEND_SECONDS", 0.05)
    async with (
        collector() as seen,
        running_gateway(ScriptedEngine(honest), traces=to(seen)) as gateway,
        http1(gateway.url) as client,
    ):
        for _ in range(3):
            assert (await client.ask(CHAT.path, CHAT.payload(stream=True))).status == 200
        await seen.until(1)
        assert await dropped(gateway) == 2 * len(seen.spans)
    assert len(seen.named(SERVER)) == 1


async def test_spans_beyond_the_bounds_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MOST_SPANS", 4)
    monkeypatch.setattr(tracing, "_BATCH", 1)
    async with (
        collector() as seen,
        running_gateway(ScriptedEngine(honest), traces=to(seen)) as gateway,
        http1(gateway.url) as client,
    ):
        await client.ask(CHAT.path, CHAT.payload(stream=True))
        # Each is either there or lost; when that is known of all is the exporter's thread's business.
        while (lost := await dropped(gateway)) + len(seen.spans) < 6:  # noqa: ASYNC110
            await trio.sleep(0.05)
    assert (lost + len(seen.spans), lost > 0) == (6, True)


# What is loaded.

OFF = """
import sys, trio
from gateway import config, cli, check, service
settings = config.parse(open(sys.argv[1]).read(), file="f", environ={})
async def main():
    async with trio.open_nursery() as nursery:
        running = await nursery.start(service.run, settings)
        running.drain()
trio.run(main)
print(sorted(name for name in sys.modules if name.split(".")[0] in ("opentelemetry", "google", "requests")))
"""

MISSING = """
import sys
from importlib.abc import MetaPathFinder
class Nowhere(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nowhere())
from gateway.cli import main
sys.exit(main(sys.argv[1:]))
"""

ENGINE = {"name": "e", "kind": "openai", "url": "http://127.0.0.1:9", "slots": 1, "models": ["m"]}


def written(folder: Path, traces: dict[str, Any]) -> str:
    sections: dict[str, dict[str, Any]] = {
        "server": {"listen": ["127.0.0.1:0"], "admin": "127.0.0.1:0"},
        "health": {"probe_seconds": 0},
        "traces": traces,
    }
    file = folder / "config.toml"
    file.write_text(toml_of(sections, [ENGINE]))
    return str(file)


async def output(*arguments: str) -> tuple[int, str]:
    with trio.fail_after(20):
        done = await trio.run_process(arguments, capture_stdout=True, stderr=subprocess.STDOUT, check=False)
    return done.returncode, done.stdout.decode()


async def test_without_an_endpoint_nothing_of_opentelemetry_is_loaded(tmp_path: Path) -> None:
    status, told = await output(sys.executable, "-c", OFF, written(tmp_path, {"sample": 1.0}))
    assert (status, told.splitlines()[-1]) == (0, "[]")


@pytest.mark.parametrize("order", ["serve", "check"])
async def test_without_the_extra_the_fault_says_what_to_install(order: str, tmp_path: Path) -> None:
    file = written(tmp_path, to("http://127.0.0.1:4318"))
    status, told = await output(sys.executable, "-c", MISSING, order, "--config", file)
    assert status == 2
    assert told.startswith(f"{file}: traces.endpoint: ")
    assert ".[otel]" in told


async def test_a_start_that_fails_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        sections = {
            "server": {"listen": [address], "admin": "127.0.0.1:0"},
            "traces": to("http://127.0.0.1:1"),
        }
        with pytest.raises(BindError):
            await service.run(config.parse(toml_of(sections, [ENGINE]), environ={}))
    assert not [each for each in set(threading.enumerate()) - before if "Otel" in each.name]


async def test_a_process_with_a_dead_collector_ends_promptly(tmp_path: Path) -> None:
    file = written(tmp_path, to(f"http://127.0.0.1:{free_ports(1)[0]}"))
    process = await trio.lowlevel.open_process(
        command("serve", "--config", file), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    lines = b""
    with trio.fail_after(20):
        while b'"ready"' not in lines:
            lines += await process.stdout.receive_some()
        since = trio.current_time()
        process.terminate()
        assert await process.wait() == 0
    assert trio.current_time() - since < 4
    await process.stdout.aclose()
