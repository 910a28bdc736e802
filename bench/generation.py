"""One request in the simulated engine: how its tokens are paced, and what is noted of its end."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.engine import Connection, Engine

now = time.monotonic
MODEL = "sim"
RECENT = 32  # instants kept of a paced stream's last tokens: 1.6 s at 20 tokens/s


class Generation:
    """One request: waiting, prefill, decode, then done or aborted."""

    def __init__(self, engine: Engine, connection: Connection, chat: bool, body: dict[str, Any]) -> None:
        self.engine, self.connection, self.chat = engine, connection, chat
        sim = body.get("sim") or {}
        self.name = str(body.get("user") or "")
        self.stream = bool(body.get("stream"))
        self.length = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        self.prefill = float(sim.get("prefill_ms") or 0) / 1e3
        self.tps = float(sim.get("tps") or 0)
        self.batch = max(1, int(sim.get("batch") or 8))
        self.pad = int(sim.get("pad") or 0)
        self.made, self.stage, self.over = 0, "waiting", False
        self.timer: asyncio.Handle | None = None
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.arrived = now()
        self.first = self.due = 0.0
        self.head = (
            f'{{"id":"{"chatcmpl" if chat else "cmpl"}-{engine.requests:032x}","object":'
            f'"{"chat.completion.chunk" if chat else "text_completion"}","created":{int(time.time())},'
            f'"model":"{MODEL}",'
        )
        text = '"delta":{"content":" tk%s"}' if chat else '"text":" tk%s"'
        event = (
            f'data: {self.head}"choices":[{{"index":0,{text},"logprobs":null,"finish_reason":null}}]}}\n\n'
        )
        before, after = (event % ("\0" + "x" * self.pad)).encode().split(b"\0")
        self.before = b"%x\r\n%b" % (len(before) + 6 + len(after), before)
        self.after = after + b"\r\n"

    def record(self, outcome: str) -> dict[str, Any]:
        return {
            "user": self.name,
            "outcome": outcome,
            "stage": self.stage,
            "tokens": self.made,
            "ended": now(),
            "recent": list(self.recent),
        }

    def begin(self) -> None:
        self.stage = "prefill"
        if self.prefill > 0:
            self.timer = self.engine.loop.call_later(self.prefill, self._decode)
        else:
            self._decode()

    def _decode(self) -> None:
        self.stage, self.first = "decode", now()
        if not self.stream:
            self.timer = self.engine.loop.call_later(self.length / self.tps if self.tps else 0, self._answer)
        elif self.tps > 0:
            self.due = self.first
            self._tick()
        else:
            self.pump()

    def _tick(self) -> None:
        """A paced stream's next token. A late one doesn't make the following ones come in a bunch."""
        instant = now()  # before the write: its reader shares this core and may run, and leave, at once
        self.recent.append(instant)
        self.connection.transport.write(self.before + b"%06d" % self.made + self.after)
        self.made += 1
        self.engine.tokens += 1
        if self.made >= self.length:
            return self._finish()
        self.due = max(self.due + 1 / self.tps, instant)
        self.timer = self.engine.loop.call_later(self.due - instant, self._tick)

    def pump(self) -> None:
        """An unpaced stream: one batch a turn for as long as the socket takes it."""
        self.timer = None
        if self.over or self.connection.paused:
            return
        upto = min(self.length, self.made + self.batch)
        data = b"".join([self.before + b"%06d" % number + self.after for number in range(self.made, upto)])
        self.engine.tokens += upto - self.made
        self.made = upto
        self.connection.transport.write(data)
        if self.made >= self.length:
            self._finish()
        elif not self.connection.paused:
            self.timer = self.engine.loop.call_soon(self.pump)

    def _finish(self) -> None:
        last = '"delta":{}' if self.chat else '"text":""'
        choice = f'{{"index":0,{last},"logprobs":null,"finish_reason":"length"}}'
        events = (f'data: {self.head}"choices":[{choice}]}}\n\n'.encode(), b"data: [DONE]\n\n")
        out = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
        self.connection.transport.write(out + b"0\r\n\r\n")
        self.close("done")

    def _answer(self) -> None:
        self.engine.tokens += self.length
        self.made = self.length
        text = " tk" * min(self.length, 4096) + "x" * self.pad
        choice = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        usage = {"prompt_tokens": 16, "completion_tokens": self.made, "total_tokens": 16 + self.made}
        body = {
            "model": MODEL,
            "choices": [{"index": 0, "finish_reason": "length", **choice}],
            "usage": usage,
        }
        self.connection.reply(200, body)
        self.close("done")

    def close(self, outcome: str) -> None:
        if self.over:
            return
        self.over = True
        if self.timer:
            self.timer.cancel()
        if outcome == "aborted" and not self.stream and self.stage == "decode":
            self.made = min(self.length, int((now() - self.first) * self.tps))
            self.engine.tokens += self.made
        self.engine.end(self, outcome)
        if outcome != "aborted":
            self.connection.answered()
