"""Hypercorn's settings are set on purpose."""

from __future__ import annotations

import sys

import pytest
from hypercorn.config import Config

from gateway.server import clocks


def test_no_clock_of_hypercorn_s_runs_while_a_client_waits() -> None:
    config = clocks.hypercorn_config()
    assert config.read_timeout is None
    assert config.keep_alive_timeout == clocks.KEEP_ALIVE_SECONDS
    assert config.keep_alive_max_requests == sys.maxsize
    assert config.ssl_handshake_timeout == clocks.TLS_HANDSHAKE_SECONDS


def test_it_writes_no_log_and_adds_no_header() -> None:
    config = clocks.hypercorn_config()
    assert config.accesslog is None
    assert config.errorlog is None
    assert config.response_headers("h11") == []
    assert config.response_headers("h2") == []


def test_a_setting_that_hypercorn_has_no_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Config, "read_timeout")
    with pytest.raises(AttributeError, match="read_timeout"):
        clocks.hypercorn_config()
