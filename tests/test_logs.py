"""The gateway's own events: where they go, and what the configuration says of them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from gateway import logs
from gateway.config import Log
from gateway.config.values import LogLevel
from gateway.words import Outcome

LEVELS: tuple[LogLevel, ...] = ("debug", "info", "warning", "error")


@contextmanager
def logger() -> Iterator[Any]:
    """Set up within the test: before that standard error is another file."""
    logs.configure_logging()
    try:
        yield structlog.get_logger("gateway.test")
    finally:
        logs.apply(Log())
        structlog.reset_defaults()


def test_they_go_to_standard_error_as_json(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with logger() as log:
        log.info("draining", where=tmp_path, outcome=Outcome.DRAINED)
    captured = capfd.readouterr()
    assert captured.out == ""
    event = json.loads(captured.err)
    assert (event["event"], event["level"], event["outcome"]) == ("draining", "info", "drained")
    assert (event["where"], event["timestamp"][-1]) == (str(tmp_path), "Z")


@pytest.mark.parametrize("least", range(len(LEVELS)))
def test_what_is_less_than_the_level_is_not_written(least: int, capfd: pytest.CaptureFixture[str]) -> None:
    with logger() as log:
        log.error("before")  # A logger that is in use already follows.
        capfd.readouterr()
        logs.apply(Log(level=LEVELS[least]))
        for level in LEVELS:
            getattr(log, level)("told", at=level)
    told = [json.loads(line)["at"] for line in capfd.readouterr().err.splitlines()]
    assert told == list(LEVELS[least:])


def test_an_exception_is_written_whatever_the_level(capfd: pytest.CaptureFixture[str]) -> None:
    with logger() as log:
        logs.apply(Log(level="error"))
        try:
            raise ValueError("of no use")
        except ValueError:
            log.exception("failed")
    assert "of no use" in json.loads(capfd.readouterr().err)["exception"]


def test_for_people_and_for_machines(capfd: pytest.CaptureFixture[str]) -> None:
    with logger() as log:
        logs.apply(Log(format="console"))
        log.warning("engine ejected", engine="gpu0")
        text = capfd.readouterr().err
        logs.apply(Log(format="json"))
        log.warning("engine ejected", engine="gpu0")
    assert "engine ejected" in text
    assert "\x1b" not in text, "colours are for terminals"
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    assert json.loads(capfd.readouterr().err)["engine"] == "gpu0"


@pytest.mark.parametrize("how", ["closed", "full", "nobody reads"])
def test_a_line_that_can_not_be_written_ends_nothing(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full, the terminal has gone, or whoever reads it is stuck: it is counted."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    if how == "closed":
        os.close(read)
    elif how == "nobody reads":
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write, b"x" * 65536)
    os.set_blocking(write, True)
    with contextlib.ExitStack() as opened:
        stream = opened.enter_context(
            open("/dev/full" if how == "full" else write, "w", closefd=how == "full")
        )
        before = logs.lost()
        with logger() as log:
            monkeypatch.setattr("sys.stderr", stream)
            log.warning("engine ejected", engine="gpu0")
            log.warning("engine ejected", engine="gpu0")
        assert logs.lost() == before + 2
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            stream.close()
        os.close(write)
        if how != "closed":
            os.close(read)
