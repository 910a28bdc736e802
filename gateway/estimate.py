"""What a request may need, guessed before it is known: tokens, and how long its client waits."""

from __future__ import annotations

import re
from math import inf

from gateway.headers import Fields
from gateway.peek import Peek
from gateway.request import Request
from gateway.usage import prompt_size, usage_of

_TIMEOUTS = frozenset(
    # Ours, and two that OpenAI's clients send: how long they wait for the next byte, and for all of it.
    {b"x-request-timeout-seconds", b"x-stainless-read-timeout", b"x-stainless-timeout"}
)
_SECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")


class Estimator:
    """Guesses tokens. ``default`` is how long an answer may be that sets itself no limit."""

    def __init__(self, default: int) -> None:
        self._default = default

    def tokens(self, seen: Peek, body: bytes) -> tuple[int, int]:
        """Return how many tokens a request may need: its prompt, and the answers it asks for."""
        return prompt_size(body, seen.fields)[0], (seen.max_tokens or self._default) * seen.sequences


def used_tokens(request: Request) -> int:
    """Return how many tokens a request has used, as far as that can be told."""
    usage = usage_of(request.meter)
    completion = request.tail.events if usage.completion is None else usage.completion
    return (usage.prompt or 0) + completion


def client_timeout(headers: Fields) -> float:
    """Return how long the client waits for the beginning of its answer, in seconds; inf if it doesn't say."""
    said = [
        float(value)
        for name, value in headers
        if name.lower() in _TIMEOUTS and _SECONDS.fullmatch(value.strip())
    ]
    return min((seconds for seconds in said if seconds > 0), default=inf)
