"""vLLM, started once for all tests here. They are collected only with `VLLM_PYTHON`: scripts/test-vllm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio

from tests.vllm.server import PYTHON, Vllm, running_vllm
from tests.vllm.table import Table

collect_ignore_glob = [] if PYTHON else ["test_*.py"]

TABLE = Table()


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    with running_vllm(tmp_path_factory.mktemp("vllm")) as engine:
        TABLE.engine = f"vLLM {trio.run(engine.version)}"
        yield engine


@pytest.fixture(scope="session")
def table() -> Table:
    return TABLE


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TABLE.rows:
        terminalreporter.section(TABLE.engine)
        for line in TABLE.lines():
            terminalreporter.write_line(line)
