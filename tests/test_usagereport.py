"""`gateway usage`: its tables, and what it says of files it can't read."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import structlog

from gateway.cli import main
from gateway.usagefile import Row, UsageFile

ENGINE = '[[engine]]\nname = "e"\nkind = "vllm"\nurl = "http://e"\nslots = 1\nmodels = ["m"]\n'


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


def row(time: str, tenant: str, model: str | None, prompt: int, completion: int | None, source: str) -> Row:
    known = "unknown" if completion is None else source
    return Row(
        at(time),
        tenant,
        model,
        "e",
        "/v1/chat/completions",
        "completed",
        200,
        prompt,
        completion,
        source,
        known,
        1,
        "id",
    )


ROWS = [
    row("2026-11-01T00:00:00", "a", "small", 10, 1, "engine"),
    row("2026-11-01T23:59:59", "b", "large", 1000, 2000, "engine"),
    row("2026-11-02T00:00:00", "a", "large", 5, None, "estimated"),
    row("2026-11-02T12:00:00", "", None, 0, 0, "counted"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "usage.db"
    file = UsageFile(str(path))
    file.open()
    file.write(ROWS)
    file.close()
    return path


@pytest.fixture(autouse=True)
def logging() -> Iterator[None]:
    """What the command configures is this test's only."""
    yield
    structlog.reset_defaults()


def said(capsys: pytest.CaptureFixture[str], *arguments: Any, status: int = 0) -> str:
    assert main(["usage", *map(str, arguments)]) == status
    captured = capsys.readouterr()
    assert (captured.err if status == 0 else captured.out) == ""
    return captured.out or captured.err


def test_by_day(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--path", path) == (
        "day         requests  prompt tokens  completion tokens  estimated  unknown\n"
        "2026-11-01         2          1,010              2,001          0        0\n"
        "2026-11-02         2              5                  0          1        1\n"
        "total              4          1,015              2,001          1        1\n"
    )


def test_by_model_of_one_tenant(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "--path", path, "--by", "model", "--tenant", "a").splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [
        ["large", "1", "5", "0"],
        ["small", "1", "10", "1"],
        ["total", "2", "15", "1"],
    ]


def test_by_tenant_as_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(
        said(capsys, "--path", path, "--by", "tenant", "--since", "2026-11-01T12:00", "--json")
    )
    assert (report["by"], report["tenant"], report["since"]) == ("tenant", None, "2026-11-01T12:00:00+00:00")
    assert [(each["tenant"], each["requests"]) for each in report["rows"]] == [("", 1), ("a", 1), ("b", 1)]
    assert report["total"] == {
        "requests": 3,
        "prompt_tokens": 1005,
        "completion_tokens": 2000,
        "estimated": 1,
        "unknown": 1,
    }


@pytest.mark.parametrize(
    ("since", "requests"), [("2026-11-02", 2), ("2026-11-02T13:00+01:00", 1), ("9999d", 4)]
)
def test_since(path: Path, since: str, requests: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        json.loads(said(capsys, "--path", path, "--since", since, "--json"))["total"]["requests"] == requests
    )


@pytest.mark.parametrize("since", ["yesterday", "7w", "2026-13-01", "999999d999", "-1d", ""])
def test_a_time_that_is_none(path: Path, since: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["usage", "--path", str(path), f"--since={since}"])
    assert caught.value.code == 2
    assert "expected a day" in capsys.readouterr().err


def test_while_the_gateway_writes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute(f"INSERT INTO usage VALUES ({','.join('?' * 13)})", ROWS[0])
        assert "total              4" in said(capsys, "--path", path)


def test_the_file_of_a_configuration(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[usage]\npath = "usage.db"\n{ENGINE}')
    assert "total              4" in said(capsys, "--config", config)
    config.write_text(ENGINE)
    assert "usage.path: missing" in said(capsys, "--config", config, status=2)
    assert "no such file" in said(capsys, "--config", tmp_path / "none.toml", status=2)


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none, text, other = (tmp_path / name for name in ("none.db", "text.db", "other.db"))
    text.write_text("some text " * 500)
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE songs (title)")
    assert "no such file" in said(capsys, "--path", none, status=1)
    assert "isn't a usage file" in said(capsys, "--path", text, status=1)
    assert "isn't a usage file" in said(capsys, "--path", other, status=1)
    assert "is a directory" in said(capsys, "--path", tmp_path, status=1)
    assert not none.exists()


def test_a_name_steers_no_terminal(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = UsageFile(str(path))
    file.write([row("2026-11-01T00:00:00", "", "\x1b[2Jm\n", 1, 1, "engine")])
    file.close()
    assert "?[2Jm?" in said(capsys, "--path", path, "--by", "model")


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_file_that_cannot_be_used_stops_the_start(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        f'[server]\nlisten = ["127.0.0.1:0"]\nadmin = "127.0.0.1:0"\n[usage]\npath = "x.db"\n{ENGINE}'
    )
    (tmp_path / "x.db").write_text("some text " * 500)
    assert main([command, "--config", str(config)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"{config}: usage.path: the file isn't a usage file: it isn't an SQLite database"


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_folder_is_no_usage_file(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        f'[server]\nlisten = ["127.0.0.1:0"]\nadmin = "127.0.0.1:0"\n[usage]\npath = "."\n{ENGINE}'
    )
    assert main([command, "--config", str(config)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"{config}: usage.path: the file is a directory; name a file in it"


def test_one_file_is_named_in_one_way(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["usage", "--config", "a", "--path", "b"])
    assert "not allowed with" in capsys.readouterr().err
