"""The abort storm: clients that ask, read a little, leave, and come again at once; and a few that stay.

There are never more requests at once than clients. With as many clients as the engine has room for, whatever
overloads it was left behind by those that are gone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from overload.answers import MODEL, text_of
from overload.client import Answer, Broken, asking

REST_SECONDS = 0.1
"""Before the next request, when one was refused."""
FINISH_SECONDS = 30.0
"""How long those that stay may take for their last answers."""


@dataclass(frozen=True)
class Plan:
    """Who comes, what they ask for, and how long they stay."""

    leavers: int = 56
    patient: int = 4
    prompt_tokens: int = 128
    answer_tokens: int = 64
    leave_after: tuple[float, float] = (0.1, 0.8)
    """Seconds after the first token, drawn anew each time."""
    unread: float = 0.1
    """The share of requests whose client leaves without waiting for the first token."""
    ramp_seconds: float = 6.0
    """Until all have come."""
    seed: int = 1

    @property
    def clients(self) -> int:
        """How many there are."""
        return self.leavers + self.patient


@dataclass
class Tally:
    """What became of the requests."""

    asked: int = 0
    whole: int = 0
    aborted: int = 0
    cut: int = 0
    """Answers that broke off, or were not what had been asked for."""
    refused: int = 0
    faults: list[str] = field(default_factory=list)
    """The first few reasons of the last two."""

    def blame(self, why: str) -> None:
        """Keep the reason, if there are few yet."""
        if len(self.faults) < 5 and why not in self.faults:
            self.faults.append(why)


class Storm:
    """All clients of one storm. Same plan, same draws."""

    def __init__(self, url: str, plan: Plan) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._plan = plan
        self.tally = Tally()
        self._stopping = False

    async def run(self, seconds: float) -> None:
        """Storm for so long; then the leavers go, and the patient ones get their last answers whole."""
        plan = self._plan
        async with trio.open_nursery() as patient, trio.open_nursery() as leavers:
            patient.cancel_scope.deadline = trio.current_time() + seconds + FINISH_SECONDS
            leavers.cancel_scope.deadline = trio.current_time() + seconds
            for number in range(plan.clients):
                rng = random.Random(f"{plan.seed} {number}")
                start = number * plan.ramp_seconds / plan.clients
                if number < plan.patient:
                    patient.start_soon(self._stay, start)
                else:
                    leavers.start_soon(self._leave, start, rng)
            leavers.start_soon(trio.sleep, seconds)
            patient.start_soon(self._stop_after, seconds)

    async def _stop_after(self, seconds: float) -> None:
        await trio.sleep(seconds)
        self._stopping = True

    async def _stay(self, start: float) -> None:
        await trio.sleep(start)
        while not self._stopping:
            await self._ask(lambda: None)

    async def _leave(self, start: float, rng: random.Random) -> None:
        await trio.sleep(start)
        while True:
            patience, unread = rng.uniform(*self._plan.leave_after), rng.random() < self._plan.unread
            with trio.CancelScope() as stay:

                def leave_soon(stay: trio.CancelScope = stay, patience: float = patience) -> None:
                    stay.deadline = min(stay.deadline, trio.current_time() + patience)

                if unread:
                    leave_soon()
                await self._ask(leave_soon)
            self.tally.aborted += stay.cancelled_caught

    async def _ask(self, begun: Callable[[], None]) -> None:
        """Ask once, and read to the end; says when the first token is there."""
        tally, most = self.tally, self._plan.answer_tokens
        asked = {
            "model": MODEL,
            "stream": True,
            "max_tokens": most,
            "messages": [{"role": "user", "content": "word " * self._plan.prompt_tokens}],
        }
        tally.asked += 1
        try:
            async with asking(self._url, asked) as answer:
                status = await answer.status()
                if status == 200:
                    text = await self._read(answer, begun)
                    tally.whole += text == text_of(most)
                    tally.cut += text != text_of(most)
                    return
        except Broken as broken:
            tally.cut += 1
            tally.blame(str(broken))
        else:
            tally.refused += 1
            tally.blame(f"status {status}")
        await trio.sleep(REST_SECONDS)

    async def _read(self, answer: Answer, begun: Callable[[], None]) -> str | None:
        """The text; None if the answer isn't ended as it should be."""
        text = ""
        while events := await answer.events():
            for event in events:
                if event == b"[DONE]":
                    return text
                said = json.loads(event)
                if "choices" not in said:
                    self.tally.blame(event[:200].decode(errors="replace"))
                    return None
                token = said["choices"][0]["delta"]["content"]
                if token and not text:
                    begun()
                text += token
        return None
