"""What must be true of what clients get, and of the log."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from structlog.testing import capture_logs

from tests.fuzz import frames
from tests.support.routes import CHAT

STATUSES = {100, 200, 400, 401, 403, 404, 405, 408, 413, 414, 417, 429, 431, 501, 502, 503, 504, 505}
"""What the gateway answers to nonsense. 500 is none of it."""

FLOOD = "connection ended by FloodError"

EJECTED = "engine ejected"
"""What hostile engines deserve; those of bystanders fail nobody."""


class Harm(Exception):  # noqa: N818 - it is what was done
    """Somebody was harmed, or something broke."""


def leaves(error: BaseException) -> str:
    """What an exception, or each of a group, says."""
    if isinstance(error, BaseExceptionGroup):
        return "\n".join(leaves(each) for each in error.exceptions)
    if isinstance(error, Harm):
        return str(error)
    return "".join(traceback.format_exception(error))


class Logs:
    """What was logged at warning or above, through structlog and through logging."""

    def __init__(self) -> None:
        self.own: list[Any] = []
        self.others: list[str] = []

    def take(self) -> list[str]:
        """The lines since the last look."""
        loud = [
            line
            for line in self.own
            if line["log_level"] not in ("debug", "info") and line["event"] != EJECTED
        ]
        lines = [f"{line['event']}" + (f": {line['detail']}" if "detail" in line else "") for line in loud]
        lines += self.others
        self.own.clear()
        self.others.clear()
        return lines


@contextmanager
def listening() -> Iterator[Logs]:
    """Collect what is logged inside the block."""
    logs = Logs()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logs.others.append(f"{record.name}: {record.getMessage()}")

    handler = Handler(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        with capture_logs() as logs.own:
            yield logs
    finally:
        logging.getLogger().removeHandler(handler)


def same_stream(name: str, got: bytes) -> None:
    """Raise Harm unless a bystander has got every event, in order, to the end."""
    assert CHAT.parts is not None
    expected = CHAT.parts.all(got.count(b" tk"))
    if got != expected:
        at = next((n for n, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(got))
        raise Harm(
            f"a bystander's stream over {name} is broken at {at}: {got[max(0, at - 100) : at + 200]!r}"
        )


def is_body(said: bytes, got: bytes) -> bool:
    """Whether a client got what the engine said and, if that was no end, at most an error event behind it."""
    more = got[len(said) :]
    return got.startswith(said) and (not more or b"engine_failed" in more)


def check_answer(got: bytes) -> None:
    """Raise Harm unless this is the beginning of HTTP/1.1 or HTTP/2 as the gateway speaks it."""
    if not got:
        return
    if b"HTTP/1.1 ".startswith(got[:9]):
        status = got[9:12]
        if len(status) == 3 and int(status) not in STATUSES:
            raise Harm(f"an odd answer: {got[:300]!r}")
        return
    try:
        frames.whole_frames(got)
    except ValueError as error:
        raise Harm(f"an answer that is no HTTP: {error}") from None
