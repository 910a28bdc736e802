"""A real vLLM on the processor, in a process of its own, and what it says of itself.

Its gauges are those of the last step that has ended. They are 0 until a request's first step is over, and
stay for one step after a request has gone; a step of decoding takes some 20 ms here, one of prefill 100 to
300. Another process than the one that computes answers, so asking for them holds no step up.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from tests.support.http1 import Answer, http1

PYTHON = os.environ.get("VLLM_PYTHON")  # one that has vLLM; scripts/test-vllm sets it
ARGS = os.environ.get("VLLM_ARGS", "--enable-scale-out")

SEQUENCES = 4  # how many it runs at once
STEP_TOKENS = 512  # the most that one step of prefill takes
START_SECONDS = 240
STOP_SECONDS = 20
MAKE_MODEL = Path(__file__).parents[2] / "scripts" / "make_tiny_hf.py"
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # two threads on busy cores wait for one another
}


@dataclass(frozen=True)
class Gauges:
    """What vLLM has to do, and what it has done."""

    running: int
    waiting: int
    tokens: int
    """Made so far."""
    prompts: int
    """Tokens of the prompts it has begun. Rises when a request's first step is over, even if the request has
    gone."""

    @property
    def load(self) -> int:
        return self.running + self.waiting


@dataclass(frozen=True)
class Vllm:
    """The running engine."""

    url: str
    log: Path

    def entry(self, slots: int = SEQUENCES) -> dict[str, Any]:
        """As `[[engine]]` has it."""
        return {"name": "vllm", "kind": "vllm", "url": self.url, "slots": slots, "models": ["tiny"]}

    @property
    def taken(self) -> int:
        """How many requests it has handed to its scheduler so far."""
        return self.log.read_text(errors="replace").count("Added request ")

    async def takes(self, count: int) -> None:
        """Until it has handed so many to its scheduler."""
        while self.taken < count:  # noqa: ASYNC110 - a file wakes nobody
            await trio.sleep(0.003)

    async def now(self) -> Gauges:
        text = (await self._ask("/metrics")).body.decode()

        def total(name: str) -> int:
            return round(sum(map(float, re.findall(rf"^vllm:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE))))

        return Gauges(
            running=total("num_requests_running"),
            waiting=total("num_requests_waiting"),
            tokens=total("generation_tokens_total"),
            prompts=total("prefix_cache_queries_total"),
        )

    async def until(self, true: Callable[[Gauges], bool], seconds: float = 30) -> Gauges:
        with trio.fail_after(seconds):
            while not true(gauges := await self.now()):  # noqa: ASYNC110 - it has to be asked
                await trio.sleep(0.01)  # each answer costs the process that also streams some milliseconds
        return gauges

    async def makes_no_more_than(self, tokens: int, prompt: Any) -> None:
        """Told to make so many tokens, it makes these and no more: it has nothing else to do."""
        before = (await self.until(lambda gauges: gauges.load == 0)).tokens
        answer = await self._ask("/v1/chat/completions", {**prompt, "max_tokens": tokens})
        assert answer.json["usage"]["completion_tokens"] == tokens
        after = await self.until(lambda gauges: gauges.load == 0 and gauges.tokens >= before + tokens)
        assert after.tokens == before + tokens

    async def version(self) -> str:
        version: str = (await self._ask("/version")).json["version"]
        return version

    async def _ask(self, path: str, payload: Any = None) -> Answer:
        """Directly, and over a connection of its own: vLLM closes one that was idle for five seconds."""
        async with http1(self.url) as client:
            return await client.ask(path, payload)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def command(model: Path, port: int) -> list[str]:
    assert PYTHON is not None
    # The module and not the command `vllm`, which this build of it can't run.
    options = {
        "model": model,
        "served-model-name": "tiny",
        "load-format": "dummy",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "bfloat16",
        "max-model-len": 8192,
        "max-num-seqs": SEQUENCES,
        "max-num-batched-tokens": STEP_TOKENS,
    }
    said = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    module = "vllm.entrypoints.openai.api_server"
    return [PYTHON, "-m", module, *said, "--enforce-eager", "--enable-log-requests", *shlex.split(ARGS)]


async def answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Whether it gets ready; it doesn't listen before it has loaded its model."""
    with trio.move_on_after(START_SECONDS):
        while process.poll() is None:
            try:
                async with http1(url) as client:
                    return (await client.ask("/health")).status == 200
            except OSError:
                await trio.sleep(0.2)
    return False


@contextmanager
def running_vllm(folder: Path) -> Iterator[Vllm]:
    model, log = folder / "model", folder / "vllm.log"
    make = [sys.executable, str(MAKE_MODEL), str(model), "--layers", "12", "--dim", "256"]
    subprocess.run(make, check=True)  # noqa: TID251 - before any loop
    port = free_port()
    vllm = Vllm(f"http://127.0.0.1:{port}", log)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command(model, port),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | SETTINGS,
            start_new_session=True,  # it starts processes of its own, which have to go with it
        )
    try:
        assert trio.run(answers, vllm.url, process), log.read_text(errors="replace")[-3000:]
        yield vllm
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):  # all may have gone by themselves
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
