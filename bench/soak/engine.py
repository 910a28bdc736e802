"""The bench's simulated engine, with faults: a request's `sim.fault` says what goes wrong with its answer.

    python -m bench.soak.engine --port PORT --slots N

Before a request is counted, connections that hung up are let go of first: a close and the next request can be
readable in the same turn of the loop, and an engine that took them in the wrong order would see one too many.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import select
import socket
import struct
from collections import deque
from typing import Any

from bench import engine
from bench.generation import Generation
from bench.loop import run

# status: an error answer; refuse: closed without a byte; silent: a prefill that doesn't end; stale: an answer
# without fault on a connection that then closes. In the middle of one: reset; cut (closed); no_marker (ended
# well without its last event); garbage (broken framing).
IN_THE_MIDDLE = ("reset", "cut", "no_marker", "garbage")

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
ERROR = b'{"error":{"message":"out of memory","type":"engine","code":500}}'


class Engine(engine.Engine):
    """Keeps counters only: the log of what has ended would outgrow everything else here."""

    def reset(self) -> None:
        super().reset()
        self.ended: deque[dict[str, Any]] = deque(maxlen=0)

    def submit(self, generation: Generation) -> None:
        self._let_go()
        super().submit(generation)

    def _let_go(self) -> None:
        poll, connections = select.poll(), {}
        for generation in (*self.running, *self.waiting):
            descriptor = generation.connection.transport.get_extra_info("socket").fileno()
            if descriptor >= 0:
                connections[descriptor] = generation.connection
                poll.register(descriptor, select.POLLRDHUP)
        for descriptor, _ in poll.poll(0):
            connections[descriptor].eof_received()


class Connection(engine.Connection):
    """A connection that can fail."""

    def _generate(self, chat: bool, body: bytes) -> None:
        sim = json.loads(body).get("sim") or {}
        fault = sim.get("fault")
        if fault == "status":
            head = b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\n"
            self.transport.write(head + b"content-length: %d\r\n\r\n" % len(ERROR) + ERROR)
        elif fault == "refuse":
            self.transport.abort()
        else:
            super()._generate(chat, body)
            generation = self.generation
            if generation is not None and fault in IN_THE_MIDDLE:
                self.engine.loop.call_later(
                    float(sim.get("fault_ms", 10)) / 1e3, self._fail, generation, fault
                )
            self.last = self.last or fault == "stale"

    def _fail(self, generation: Generation, fault: str) -> None:
        if generation.over:
            return
        if fault == "no_marker":
            self.transport.write(b"0\r\n\r\n")
            generation.close("done")
            return
        if fault == "garbage":
            self.transport.write(b"zz\r\nno chunk\r\n")
        elif fault == "reset":
            raw = self.transport.get_extra_info("socket")
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.generation = None
        generation.close("failed")
        self.transport.close()


async def serve(port: int, slots: int) -> None:
    loop = asyncio.get_running_loop()
    state = Engine(loop, slots)
    server = await loop.create_server(lambda: Connection(state), "127.0.0.1", port, backlog=4096)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="A simulated engine that fails as it is told to.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        run(serve(options.port, options.slots))


if __name__ == "__main__":
    main()
