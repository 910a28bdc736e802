"""The real engine: llama.cpp serving a tiny model of random weights, in a process of its own.

Ask it for its slots once, and late: each answer to `/slots` restarts the second of quiet after which
llama.cpp looks for departed clients, so polling it keeps alive what the poller waits for.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from tests.support.http1 import http1

SLOTS = 2
MAKE_MODEL = Path(__file__).parents[2] / "scripts" / "make_tiny_gguf.py"


@dataclass(frozen=True)
class RealEngine:
    url: str
    log: Path

    @property
    def entry(self) -> dict[str, Any]:
        """As `[[engine]]` has it."""
        return {"name": "llama", "kind": "llamacpp", "url": self.url, "slots": SLOTS, "models": ["tiny"]}

    async def busy_slots(self) -> int:
        async with http1(self.url) as client:
            answer = await client.ask("/slots")
        return sum(slot["is_processing"] for slot in answer.json)

    @property
    def ends(self) -> int:
        """How many works have ended so far, by llama.cpp's log: the one witness that doesn't disturb it."""
        return len(re.findall(r"stop processing", self.log.read_text(errors="replace")))

    async def released(self, count: int) -> None:
        """Until so many works have ended."""
        while self.ends < count:  # noqa: ASYNC110 - a file wakes nobody
            await trio.sleep(0.002)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def write_model(path: Path, *, layers: int, dim: int) -> None:
    command = [sys.executable, str(MAKE_MODEL), str(path), "--layers", str(layers), "--dim", str(dim)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: TID251 - before any loop


@contextmanager
def real_engine(folder: Path, *, layers: int, dim: int) -> Iterator[RealEngine]:
    """`layers` sets its speed: 2 layers of 64 make thousands of tokens a second, 96 of 16 some hundreds."""
    model = folder / "tiny.gguf"
    write_model(model, layers=layers, dim=dim)
    with serving(model) as engine:
        yield engine


@contextmanager
def serving(model: Path) -> Iterator[RealEngine]:
    """A model that is there already."""
    log = model.with_name("engine.log")
    port = free_port()
    program = str(Path(__file__).with_name("serve_llama.py"))
    command = [
        sys.executable,
        program,
        str(model),
        "--port",
        str(port),
        "--slots",
        str(SLOTS),
        "--context",
        "8192",
    ]
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith(b"listening"), log.read_text(errors="replace")[-2000:]
        yield RealEngine(f"http://127.0.0.1:{port}", log)
    finally:
        if process.stdout is not None:
            process.stdout.close()
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def talk(words: str = "hello", **more: Any) -> dict[str, Any]:
    """A chat; without an end of its own, so that `max_tokens` is exact."""
    return {"model": "tiny", "messages": [{"role": "user", "content": words}], **more}


def events_of(body: bytes) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]
