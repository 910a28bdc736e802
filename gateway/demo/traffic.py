"""Clients for the demonstration: some read to the end, some leave half-way, some come in bursts.

    python -m gateway.demo.traffic http://127.0.0.1:8080 --model NAME --minutes 10 --slots 2

Bounded: it ends after so many minutes, and at any time there are at most a few times as many requests as the
engine has slots. What the gateway refuses is counted, not tried again.
"""

from __future__ import annotations

import argparse
import random
import signal
from dataclasses import dataclass

import httpx
import trio

PROMPTS = (
    "Tell me about lighthouses.",
    "Write a story about a lighthouse keeper and her cat.",
    "List ten uses of a paper clip.",
    "Explain how bread rises.",
    "Write a letter to the sea.",
)
LEAVERS = 0.3
"""The share of clients that go before the end."""

UNSTREAMED = 0.15
BURST_EVERY_SECONDS = 20.0
MOST_PER_SLOT = 4
"""Requests at a time, for each of the engine's slots: enough for a queue, and for it to empty again."""

PATIENCE_SECONDS = 120.0


@dataclass
class Traffic:
    """The clients: ``most`` at a time."""

    client: httpx.AsyncClient
    model: str
    most: int
    live: int = 0

    async def run(self, seconds: float) -> None:
        """Let clients come until the time is over, and those that are there then end."""
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(seconds):
                began = trio.current_time()
                while True:
                    # Twice as many as the slots can take come in a burst, and hardly any after it.
                    since = (trio.current_time() - began) % BURST_EVERY_SECONDS
                    await trio.sleep(random.expovariate(2.0 if since < BURST_EVERY_SECONDS / 3 else 0.4))
                    if self.live < self.most:
                        self.live += 1
                        nursery.start_soon(self._one)

    async def _one(self) -> None:
        try:
            with trio.move_on_after(PATIENCE_SECONDS):
                await self._ask()
        except httpx.HTTPError:
            pass  # The gateway has ended, or this answer broke off: its record says so.
        finally:
            self.live -= 1

    async def _ask(self) -> None:
        stream = random.random() >= UNSTREAMED
        payload = {
            "model": self.model,
            "stream": stream,
            "max_tokens": random.randint(40, 300),
            "messages": [{"role": "user", "content": random.choice(PROMPTS)}],
        }
        leaves_after = random.randint(1, 120) if random.random() < LEAVERS else None
        with trio.move_on_after(
            random.uniform(0.5, 8.0) if leaves_after and not stream else PATIENCE_SECONDS
        ):
            async with self.client.stream("POST", "/v1/chat/completions", json=payload) as response:
                lines = 0
                async for _ in response.aiter_lines():
                    lines += 1
                    if leaves_after is not None and lines > 2 * leaves_after:
                        return


async def run(options: argparse.Namespace) -> None:
    """Run until the time is over, or SIGTERM or SIGINT comes."""
    client = httpx.AsyncClient(base_url=options.url, timeout=None, verify=False, trust_env=False)
    async with client, trio.open_nursery() as nursery:
        nursery.start_soon(_until_signal, nursery.cancel_scope)
        await Traffic(client, options.model, MOST_PER_SLOT * options.slots).run(60 * options.minutes)
        nursery.cancel_scope.cancel()


async def _until_signal(everything: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            everything.cancel()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="the gateway's API")
    parser.add_argument("--model", required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--slots", type=int, default=2, help="the engine's")
    trio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
