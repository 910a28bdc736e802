"""On a real engine: from the client's close to the slot being idle, with and without the gateway.

The engine is llama.cpp (the xllamacpp wheel) on a tiny random model, slow enough (some hundred tokens/s) to
be caught in the middle of an answer. When a slot is free is read off the engine's own log, through a pipe,
as the line is written. Asking /slots or /metrics instead would disturb what is measured: llama.cpp looks for
gone clients only when its result queue has been quiet for a while, and every answer to such a question wakes
that queue. (A streaming answer's client is found gone at the next token anyway, so for this scenario both
ways would do; the log costs the engine nothing and isn't rounded up to a polling interval.)

Direct and through the gateway take turns; the moment of closing shifts against the tokens from turn to turn.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from types import ModuleType

from bench import processes
from bench.figures import percentiles
from bench.report import Outcome, at_most, spread
from bench.targets import HOST, ROOT, BenchError, Gateway, direct, free_port, wait_ready

SLOTS = 4
LAYERS, DIM = 96, 16
CLOSES = 20  # a round, each way
RELEASE = re.compile(rb"slot +release: id +\d+ \| task (\d+) \| stop processing")
LAUNCH = re.compile(rb"slot +launch_slot_: id +\d+ \| task (\d+) \| processing")
WAIT_SECONDS = 20.0

now = time.monotonic


class LlamaEngine:
    """llama.cpp in a process of its own, and a thread that stamps each line of its log on arrival."""

    def __init__(self, folder: str) -> None:
        self.port = free_port()
        self.seen: queue.Queue[tuple[str, bytes, float]] = queue.Queue()
        self.log = os.path.join(folder, "engine.log")
        model = os.path.join(folder, "tiny.gguf")
        _generator().build(model, layers=LAYERS, dim=DIM)
        command = [
            sys.executable,
            "-m",
            "bench.llama",
            model,
            "--port",
            str(self.port),
            "--slots",
            str(SLOTS),
        ]
        process = processes.start(command, cpu=processes.rest_cpu(), cwd=ROOT, stderr=subprocess.PIPE)
        self.tree = processes.Tree(process)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def __enter__(self) -> LlamaEngine:
        try:
            wait_ready(self.tree, self.port, "/health", "the real engine", self.log)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.tree.end()
        self.reader.join(2)

    def _read(self) -> None:
        """Ends with the engine: the pipe is at its end then."""
        assert self.tree.process.stderr is not None
        with self.tree.process.stderr as pipe, open(self.log, "wb", buffering=0) as log:
            while line := pipe.readline():
                instant = now()
                for what, pattern in (("release", RELEASE), ("launch", LAUNCH)):
                    if match := pattern.search(line):
                        self.seen.put((what, match[1], instant))
                log.write(line)

    def wait(self, what: str, task: bytes | None = None) -> tuple[bytes, float]:
        """(task, instant) of the next such line, if need be of one task only."""
        limit = now() + WAIT_SECONDS
        while (left := limit - now()) > 0:
            try:
                kind, number, instant = self.seen.get(timeout=left)
            except queue.Empty:
                break
            if kind == what and task in (None, number):
                return number, instant
        raise BenchError(f"the engine's log shows no {what} within {WAIT_SECONDS:.0f} s")


def _generator() -> ModuleType:
    """scripts/make_tiny_gguf.py, which is a script and not in a package."""
    path = os.path.join(ROOT, "scripts", "make_tiny_gguf.py")
    spec = importlib.util.spec_from_file_location("make_tiny_gguf", path)
    if spec is None or spec.loader is None or not os.path.exists(path):
        raise BenchError(f"{path} is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def _request(number: int) -> bytes:
    message = {"role": "user", "content": f"{number:06d} tell me about it"}
    body = json.dumps({"model": "tiny", "stream": True, "max_tokens": 1500, "messages": [message]}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def close_once(engine: LlamaEngine, port: int, number: int) -> float:
    """Stream a few tokens, close, and return the ms until the engine's slot was free."""
    with socket.create_connection((HOST, port), timeout=WAIT_SECONDS) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(_request(number))
        task, _ = engine.wait("launch")
        got = b""
        while got.count(b"data: ") < 8 + number % 5:
            data = client.recv(65536)
            if not data or not got.startswith(b"HTTP/1.1 200"[: len(got)]):
                raise BenchError(f"no stream: {(got + data)[:300]!r}")
            got += data
        time.sleep(number * 0.7 % 4 / 1e3)
        closed = now()
    return (engine.wait("release", task)[1] - closed) * 1e3


def real(rounds: int) -> Outcome:
    """The main promise on a real engine: what the gateway adds to the time until the GPU's slot is free."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise BenchError("the real engine needs the xllamacpp package (in the project's group `demo`)")
    outcome = Outcome(
        "real", f"llama.cpp, {LAYERS} layers x {DIM}; {CLOSES * rounds} closes each way, in turns"
    )
    times: dict[str, list[float]] = {"direct": [], "gateway": []}
    with (
        tempfile.TemporaryDirectory(prefix="bench-real-") as folder,
        LlamaEngine(folder) as engine,
        Gateway(engine, SLOTS, kind="llamacpp") as gateway,
    ):
        for number in range(-2, CLOSES * rounds):
            for target in (direct(engine), gateway):
                value = close_once(engine, target.port, abs(number))
                if number >= 0:  # the first two are the warm-up
                    times[target.name].append(value)
                time.sleep(0.03)
        ledger, gauges = gateway.idle()
    got, base = (percentiles(times[name]) for name in ("gateway", "direct"))
    added = statistics.median(times["gateway"]) - statistics.median(times["direct"])
    outcome.figures = {"ms": times, "gateway": got, "direct": base, "median_added_ms": added}
    outcome.figures.update(ledger=ledger, gauges=gauges)
    names = ("p50", "p99", "max")
    outcome.add(
        "client's close to idle slot, p50 / p99 / max ms",
        {"gateway": spread(got, *names), "direct": spread(base, *names)},
    )
    holds = at_most(added, 50)
    outcome.require("added by the gateway, median ms", f"{added:+.2f}", holds, "<= 50")
    outcome.require("ledger balanced afterwards", str(ledger["balanced"]), bool(ledger["balanced"]), "True")
    return outcome
