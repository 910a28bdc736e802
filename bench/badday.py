"""Two healthy engines and a bad one behind one name: what clients notice of it, and what it costs.

    python -m bench.badday [--seconds S]

For each kind of bad engine: the failures that clients see (none, of requests that can be tried again) and
the throughput, as a part of what the two healthy ones carry alone. The engines are simulated: each answers
in 50 ms, eight at a time. The clients ask without a pause.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import trio

from bench.report import Outcome, print_table

SLOTS, TAKES_SECONDS, CLIENTS = 8, 0.1, 48
FLOOR = 0.9
FIRST_BYTE_SECONDS = 1.0
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}).encode()
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
REFUSAL = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: 2\r\n%b\r\n{}"

Answer = Callable[[trio.SocketStream], Coroutine[Any, Any, None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def healthy(stream: trio.SocketStream) -> None:
    await trio.sleep(TAKES_SECONDS)
    await stream.send_all(STREAM + chunk(TOKEN) + chunk(TOKEN + DONE) + b"0\r\n\r\n")


async def refuses(stream: trio.SocketStream) -> None:
    await stream.send_all(REFUSAL % (b"503 Service Unavailable", b""))


async def too_many(stream: trio.SocketStream) -> None:
    await stream.send_all(REFUSAL % (b"429 Too Many Requests", b"Retry-After: 2\r\n"))


async def resets_after_head(stream: trio.SocketStream) -> None:
    await stream.send_all(STREAM)
    await trio.sleep(0.005)
    raise trio.BrokenResourceError


async def error_first(stream: trio.SocketStream) -> None:
    error = b'data: {"error":{"message":"CUDA out of memory","code":500}}\n\n'
    await stream.send_all(STREAM + chunk(error + DONE) + b"0\r\n\r\n")


async def ten_times_slower(stream: trio.SocketStream) -> None:
    await trio.sleep(9 * TAKES_SECONDS)
    await healthy(stream)


async def hangs(stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


BAD: dict[str, Answer] = {
    "answers 503": refuses,
    "answers 429, Retry-After: 2": too_many,
    "resets after its head": resets_after_head,
    "error as first event": error_first,
    "ten times slower": ten_times_slower,
    "accepts and hangs": hangs,
}


async def engine(answer: Answer, *, task_status: trio.TaskStatus[int]) -> None:
    """Serve as an engine whose health page answers unless it hangs."""

    async def serve(stream: trio.SocketStream) -> None:
        data = b""
        try:
            async for more in stream:
                data += more
                head, end, body = data.partition(b"\r\n\r\n")
                if not end:
                    continue
                if head.startswith(b"GET"):
                    data = b""
                    if answer is hangs:
                        await trio.sleep_forever()
                    await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                elif len(body) >= _length(head):
                    data = b""
                    await answer(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await trio.aclose_forcefully(stream)

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    task_status.started(listeners[0].socket.getsockname()[1])
    await trio.serve_listeners(serve, listeners)


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def client(port: int, seen: Counter[str]) -> None:
    """Ask, one request after the other."""
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    request += b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
    while True:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            whole = True
            while whole:
                await stream.send_all(request)
                data = b""
                while not data.endswith(b"0\r\n\r\n"):
                    more = await stream.receive_some()
                    data += more
                    if not more or (b" 200 " not in data[:13] and b"\r\n\r\n" in data):
                        break
                whole = data.endswith(b"0\r\n\r\n") and DONE in data and b'"error"' not in data
                seen["whole" if whole else "failed"] += 1


async def measure(answers: list[Answer], seconds: float) -> tuple[float, int]:
    """Return whole answers a second, and failures."""
    async with trio.open_nursery() as nursery:
        ports = [await nursery.start(engine, answer) for answer in answers]
        with tempfile.TemporaryDirectory() as folder:
            port = await _free_port()
            admin = await _free_port()
            path = Path(folder) / "config.toml"
            path.write_text(_config(ports, port, admin))
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "gateway", "serve", "--config", str(path)],
                cwd=Path(__file__).parents[1],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                await _until_it_listens(port)
                seen: Counter[str] = Counter()
                with trio.move_on_after(seconds):
                    async with trio.open_nursery() as clients:
                        for _ in range(CLIENTS):
                            clients.start_soon(client, port, seen)
            finally:
                with trio.CancelScope(shield=True):
                    os.kill(process.pid, signal.SIGKILL)
                    await process.wait()
        nursery.cancel_scope.cancel()
    return seen["whole"] / seconds, seen["failed"]


def _config(engines: list[int], port: int, admin: int) -> str:
    tables = "".join(
        f'[[engine]]\nname = "e{number}"\nkind = "openai"\nurl = "http://127.0.0.1:{each}"\n'
        f'slots = {SLOTS}\nmodels = ["m"]\n'
        for number, each in enumerate(engines)
    )
    return (
        f'[server]\nlisten = ["127.0.0.1:{port}"]\nadmin = "127.0.0.1:{admin}"\n'
        f"[stream]\nfirst_byte_seconds = {FIRST_BYTE_SECONDS}\n"
        f"[health]\nprobe_seconds = 0.5\nprobe_timeout_seconds = 0.5\n{tables}"
    )


async def _free_port() -> int:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port: int = listener.socket.getsockname()[1]
    await listener.aclose()
    return port


async def _until_it_listens(port: int) -> None:
    with trio.fail_after(15):
        while True:
            try:
                await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
            except OSError:
                await trio.sleep(0.05)
            else:
                return


def main() -> None:
    """Measure all kinds and say what came of it."""
    parser = argparse.ArgumentParser(description="Two healthy engines and a bad one behind one name.")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each figure (default: %(default)s)")
    seconds = parser.parse_args().seconds
    outcome = Outcome("badday", f"{CLIENTS} clients, {seconds:g} s a figure")
    alone, failed = trio.run(partial(measure, [healthy, healthy], seconds))
    outcome.add("two healthy engines alone", f"{alone:.0f} answers/s, {failed} failed")
    for name, bad in BAD.items():
        rate, failed = trio.run(partial(measure, [bad, healthy, healthy], seconds))
        said = f"{rate:.0f} answers/s, {rate / alone:.2f} of that alone, {failed} failed"
        outcome.require(name, said, failed == 0 and rate >= FLOOR * alone, f">= {FLOOR:g}, 0 failed")
    print_table([outcome])


if __name__ == "__main__":
    main()
