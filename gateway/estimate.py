"""What a request may need, guessed before it is known: tokens, and how long its client waits."""

from __future__ import annotations

import re
from math import inf

from gateway.headers import Fields
from gateway.peek import MAX_TOKENS, Peek
from gateway.request import Request
from gateway.usage import prompt_size

_TIMEOUTS = frozenset(
    # Ours, and two that OpenAI's clients send: how long they wait for the next byte, and for all of it.
    {b"x-request-timeout-seconds", b"x-stainless-read-timeout", b"x-stainless-timeout"}
)
_SECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")


class Estimator:
    """Guesses tokens. ``default`` is how long an answer may be that sets itself no limit."""

    def __init__(self, default: int) -> None:
        self._default = default

    def tokens(self, path: str, seen: Peek, body: bytes) -> tuple[int, int]:
        """Return how many tokens a request may need: its prompt, and the answers it asks for."""
        answers = (seen.max_tokens or self._default) * seen.sequences
        return prompt_size(path, body, seen.fields)[0], min(answers, MAX_TOKENS)


def used_tokens(request: Request) -> int | None:
    """Return how many tokens a request has used; None if that can't be told."""
    usage = request.usage
    if usage.completion is not None:
        return (usage.prompt or 0) + usage.completion
    if request.meter is not None and request.meter.refused:
        return usage.prompt or 0
    return None


def client_timeout(headers: Fields) -> float:
    """Return how long the client waits for the beginning of its answer, in seconds; inf if it doesn't say."""
    said = [
        value for name, value in headers if name.lower() in _TIMEOUTS and _SECONDS.fullmatch(value.strip())
    ]
    return min([seconds for seconds in map(float, said) if seconds > 0], default=inf)
