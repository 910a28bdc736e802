"""The gateway's own events, on standard error. Access records are the telemetry's (:mod:`gateway.telemetry`).

What is written, and how, may change while the gateway runs; loggers that exist follow.
"""

from __future__ import annotations

import logging
import select
import sys
from typing import Any

import msgspec
import structlog
from structlog.typing import EventDict, WrappedLogger

from gateway.config import Log


def _encode(value: Any, **_: Any) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()


JSON = structlog.processors.JSONRenderer(serializer=_encode)
"""One object a line."""

_LEVELS = logging.getLevelNamesMapping()


class _Settings:
    """What the processors below look at each time."""

    def __init__(self) -> None:
        self.least = logging.INFO
        self.render: Any = JSON
        self.lost = 0


_settings = _Settings()


def configure_logging() -> None:
    """Set structlog up: once, before anything is logged."""
    apply(Log())
    structlog.configure(
        processors=[
            _drop_lesser,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _render,
        ],
        logger_factory=_Stderr,
        cache_logger_on_first_use=True,
    )


def apply(settings: Log) -> None:
    """Write events as ``settings`` say from now on."""
    terminal = sys.stderr.isatty()
    people = settings.format == "console" or (settings.format == "auto" and terminal)
    _settings.least = _LEVELS[settings.level.upper()]
    _settings.render = structlog.dev.ConsoleRenderer(colors=terminal) if people else JSON


class _Stderr:
    """Writes lines to standard error; counts those that it doesn't take: nobody waits, or ends, for a log."""

    def __init__(self, *_: Any) -> None:
        self._poll = select.poll()

    def msg(self, line: str) -> None:
        """Write a line."""
        try:
            number = sys.stderr.fileno()
            self._poll.register(number, select.POLLOUT)
            # A pipe says so as long as it has room for PIPE_BUF; what is shorter is written without waiting.
            if not any(events & select.POLLOUT for _, events in self._poll.poll(0)):
                raise BlockingIOError
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            _settings.lost += 1

    debug = info = warning = error = critical = exception = log = msg


def lost() -> int:
    """Return how many lines of the log could not be written."""
    return _settings.lost


def _drop_lesser(_: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if _LEVELS.get(method.upper(), logging.ERROR) < _settings.least:
        raise structlog.DropEvent
    return event


def _render(logger: WrappedLogger, method: str, event: EventDict) -> Any:
    return _settings.render(logger, method, event)
