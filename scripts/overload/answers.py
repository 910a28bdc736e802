"""vLLM's words: what is asked of the simulated engine, and what it answers.

A prompt has as many tokens as it has words. Token number n of every answer is ``"n "``, so that a client can
tell a whole answer from one with a hole in it: ``text_of`` says what it must be.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from overload.gpu import BLOCK_TOKENS, Gpu

MODEL = "overload-sim"
DEFAULT_TOKENS = 128
DONE = b"data: [DONE]\n\n"

_STARTED = time.time()


class Faulty(Exception):
    """The request can't be answered: an HTTP status and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.body = msgspec.json.encode(
            {"error": {"message": why, "type": "BadRequestError", "param": None, "code": status}}
        )


class Asked(msgspec.Struct):
    """The fields of a request that matter here; the others are ignored."""

    model: str = MODEL
    stream: bool | None = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream_options: dict[str, Any] | None = None
    messages: list[dict[str, Any]] = []
    prompt: str | list[int] = ""

    @property
    def most(self) -> int:
        """How many tokens the answer will have."""
        return self.max_completion_tokens or self.max_tokens or DEFAULT_TOKENS

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has; at least one."""
        if isinstance(self.prompt, list):
            return len(self.prompt) or 1
        words = self.prompt.split()
        for message in self.messages:
            words += str(message.get("content") or "").split()
        return len(words) or 1


def parse(body: bytes) -> Asked:
    """Read a request. Raises Faulty."""
    try:
        asked = msgspec.json.decode(body, type=Asked)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Faulty(400, f"This is no request: {error}") from error
    if asked.model != MODEL:
        raise Faulty(404, f"The model `{asked.model}` does not exist.")
    if asked.most < 1:
        raise Faulty(400, "max_tokens must be at least 1.")
    return asked


def text_of(tokens: int, first: int = 0) -> str:
    """What the tokens from ``first`` up to that number say."""
    return "".join(f"{number} " for number in range(first, tokens))


class Wording:
    """How one answer is put: a chat's or a completion's, whole or in events."""

    def __init__(self, asked: Asked, *, chat: bool, number: int) -> None:
        self._asked = asked
        self._chat = chat
        self._base = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
            "created": int(time.time()),
            "model": MODEL,
        }

    def opening(self) -> bytes:
        """What comes before the first token."""
        return self._event({"delta": {"role": "assistant", "content": ""}}) if self._chat else b""

    def tokens(self, first: int, end: int) -> bytes:
        """One event for each of these tokens; the answer's last one says so."""
        events = []
        for number in range(first, end):
            text = text_of(number + 1, number)
            choice: dict[str, Any] = {"delta": {"content": text}} if self._chat else {"text": text}
            events.append(self._event(choice, "length" if number + 1 == self._asked.most else None))
        return b"".join(events)

    def closing(self) -> bytes:
        """What comes after the last token."""
        if not (self._asked.stream_options or {}).get("include_usage"):
            return DONE
        return self._data({"choices": [], "usage": self._usage()}) + DONE

    def whole(self) -> bytes:
        """The answer in one piece."""
        text = text_of(self._asked.most)
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, **(said if self._chat else {"text": text}), "finish_reason": "length"}
        kind = "chat.completion" if self._chat else "text_completion"
        answer = {**self._base, "object": kind, "choices": [choice], "usage": self._usage()}
        return msgspec.json.encode(answer)

    def _usage(self) -> dict[str, int]:
        prompt, made = self._asked.prompt_tokens, self._asked.most
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    def _event(self, said: dict[str, Any], reason: str | None = None) -> bytes:
        return self._data({"choices": [{"index": 0, **said, "logprobs": None, "finish_reason": reason}]})

    def _data(self, rest: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return b"data: %b\n\n" % msgspec.json.encode({**self._base, "object": kind, **rest})


def models() -> bytes:
    """The answer to GET /v1/models."""
    model = {"id": MODEL, "object": "model", "created": int(_STARTED), "owned_by": "vllm"}
    return msgspec.json.encode({"object": "list", "data": [model]})


def metrics(gpu: Gpu) -> bytes:
    """The answer to GET /metrics: vLLM's names, and four of our own (``overload:``) for who watches.

    vLLM's gauges are those of its last step; these are of this moment.
    """
    counters, blocks = gpu.counters, gpu.settings.blocks
    left = gpu.left_behind
    rows: list[tuple[str, str, float]] = [
        ("vllm:num_requests_running", "gauge", len(gpu.running)),
        ("vllm:num_requests_waiting", "gauge", len(gpu.waiting)),
        ("vllm:kv_cache_usage_perc", "gauge", gpu.used / blocks),
        ("vllm:prompt_tokens_total", "counter", counters.prompts),
        ("vllm:generation_tokens_total", "counter", counters.generated),
        ("overload:left_behind_sequences", "gauge", len(left)),
        ("overload:left_behind_usage", "gauge", sum(one.blocks for one in left) / blocks),
        ("overload:peak_sequences", "gauge", counters.peak_running),
        ("overload:peak_usage", "gauge", counters.peak_blocks / blocks),
    ]
    labels = f'engine="0",model_name="{MODEL}"'
    lines = []
    for name, kind, value in rows:
        lines += [f"# TYPE {name} {kind}", f"{name}{{{labels}}} {float(value)}"]
    # A histogram of tokens in a step; its count is the number of steps.
    steps, tokens = counters.steps, counters.prompts + counters.generated
    name = "vllm:iteration_tokens_total"
    lines += [
        f"# TYPE {name} histogram",
        f'{name}_bucket{{{labels},le="+Inf"}} {float(steps)}',
        f"{name}_count{{{labels}}} {float(steps)}",
        f"{name}_sum{{{labels}}} {float(tokens)}",
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {_STARTED:.2f}",
        f"# {BLOCK_TOKENS} tokens to a block, {blocks} blocks",
        "",
    ]
    return "\n".join(lines).encode()
