"""Where values come from and what is refused there: variables, secret files, the configuration file."""

from __future__ import annotations

import builtins
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from gateway.config import ConfigError, Fault, load, parse
from tests.test_config import MINIMAL, SECRET
from tests.test_config_faults import engine_faults, faults

# -------------------------------------------------------------------------------- expansion, secrets


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("${KEY}", "the environment variable KEY is not set; set it, or give a default: ${KEY:-default}"),
        ("${KEY:-}", "expected text, not an empty string; that is what it stands for"),
        ("", "expected text, not an empty string"),
        (f"${{{SECRET}}}", 'a "$" that begins no ${NAME} or ${NAME:-default}; write $$ for a dollar'),
        (f"{SECRET}$", 'a "$" that begins no ${NAME} or ${NAME:-default}; write $$ for a dollar'),
        (f"{SECRET} x", "expected visible ASCII characters, no spaces"),
        ("file:key", "expected file:/path with an absolute path"),
        ("file:/nowhere", "the file this secret is in can't be read; No such file or directory"),
        ("file:/", "the file this secret is in can't be read; not a regular file"),
        ("file:/\\u0000", "the file this secret is in can't be read; unusable path"),
    ],
)
def test_secrets_that_do_not_come(value: str, fault: str) -> None:
    assert engine_faults(f'api_key = "{value}"') == [f"api_key: {fault}"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"\n", "expected text, not an empty string; that is what it stands for"),
        (b"\xff", "the file this secret is in is not UTF-8 text"),
        (b"a" * 65537, "the file this secret is in is too large; at most 65536 bytes"),
        (b"two\nlines", "expected visible ASCII characters, no spaces"),
    ],
)
def test_files_without_a_secret(tmp_path: Path, content: bytes, fault: str) -> None:
    (tmp_path / "key").write_bytes(content)
    assert engine_faults(f'api_key = "file:{tmp_path}/key"') == [f"api_key: {fault}"]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", stat.S_IRUSR | stat.S_IWUSR)
    assert engine_faults(f'ca = "{tmp_path}/pipe"') == [
        f'ca: can\'t read "{tmp_path}/pipe"; not a regular file'
    ]


def test_a_fault_repeats_the_variable_not_its_value() -> None:
    environ = {"KEY": f"{SECRET} x"}
    assert engine_faults('name = "${KEY}"', environ=environ)[0].endswith(', got "${KEY}"')
    for line in ('api_key = "${KEY}"', 'url = "http://${KEY}"', 'kind = "${KEY}"', 'ca = "${KEY}"'):
        assert SECRET not in "".join(engine_faults(line, environ=environ)), line


# ----------------------------------------------------------------------------------- the file itself


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a = 1\nb = ok", 'line 2, column 5: not valid TOML: invalid value; text needs quotes: "text"'),
        (
            "a = 1\na = 2",
            "line 2, column 6: not valid TOML: cannot overwrite a value; a key may be given only once",
        ),
        ("a = 1\n[[", "line 2, column 3: not valid TOML: invalid initial character for a key part"),
        ("a = " + "9" * 5000, "not valid TOML: a value can't be read"),
        ("a = " + "[" * 5000, "nested too deeply"),
    ],
)
def test_text_that_is_not_toml(text: str, fault: str) -> None:
    assert faults(text) == [fault]


def load_fault(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, environ={})
    return str(caught.value)


def test_files_that_cannot_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    assert load_fault(path) == f"{path}: no such file; create it, or name another one with --config"
    assert load_fault(tmp_path) == f"{tmp_path}: a directory, not a file; name the file in it with --config"
    assert load_fault("a\0b").endswith("can't be read: unusable path; name another one with --config")
    path.write_bytes(b"a = 1\nb = '\xff'")
    assert load_fault(path) == f"{path}: line 2: not UTF-8 text; save it as UTF-8"
    path.write_bytes(b"#" * (1024 * 1024 + 1))
    assert load_fault(path) == f"{path}: larger than 1048576 bytes; is it the right file?"
    assert (
        load_fault(path / "x") == f"{path}/x: can't be read: Not a directory; name another one with --config"
    )


def test_a_file_of_somebody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "config.toml"
    path.touch()
    monkeypatch.setattr(builtins, "open", refuse)
    assert load_fault(path) == f"{path}: permission denied; let the gateway's user read it"
    assert engine_faults(f'ca = "{path}"') == [f'ca: can\'t read "{path}"; Permission denied']


def test_a_fault_is_data() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("[server]\nlistne = 1" + MINIMAL, file="/etc/g.toml", environ={})
    assert caught.value.faults == (
        Fault("/etc/g.toml", "server.listne", "unknown key", 'did you mean "listen"?'),
    )
    assert str(caught.value) == '/etc/g.toml: server.listne: unknown key; did you mean "listen"?'
