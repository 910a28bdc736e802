"""What a request may need, guessed before it is known: tokens, and how long its client waits."""

from __future__ import annotations

import re
from math import inf

from gateway.headers import Fields
from gateway.peek import Peek
from gateway.request import Request

BYTES_PER_TOKEN = 4.0
"""Of a request's body, for lack of better knowledge: English text has about so many."""

_TIMEOUTS = frozenset(
    # Ours, and two that OpenAI's clients send: how long they wait for the next byte, and for all of it.
    {b"x-request-timeout-seconds", b"x-stainless-read-timeout", b"x-stainless-timeout"}
)
_SECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")


class Estimator:
    """Guesses tokens. ``default`` is how long an answer may be that sets itself no limit."""

    def __init__(self, default: int) -> None:
        self._default = default

    def tokens(self, seen: Peek, size: int) -> int:
        """Return how many tokens a request with a body of ``size`` bytes may need: prompt and answers."""
        answers = (seen.max_tokens or self._default) * seen.sequences
        return self.prompt(size) + answers

    def prompt(self, size: int) -> int:
        """Return how many tokens a prompt has in a body of ``size`` bytes."""
        return max(1, int(size / BYTES_PER_TOKEN))

    def used(self, request: Request) -> int:
        """Return how many tokens a request has used, as far as that can be told."""
        return self.prompt(request.body_bytes) + request.tail.events


def client_timeout(headers: Fields) -> float:
    """Return how long the client waits for the beginning of its answer, in seconds; inf if it doesn't say."""
    said = [
        float(value)
        for name, value in headers
        if name.lower() in _TIMEOUTS and _SECONDS.fullmatch(value.strip())
    ]
    return min((seconds for seconds in said if seconds > 0), default=inf)
