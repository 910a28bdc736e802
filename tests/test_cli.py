"""The command: exit codes, what it says when something is wrong, and signals."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

import gateway
from gateway import __main__ as entry
from gateway import cli, reload
from gateway.cli import main
from tests.conftest import Tls

ENGINE = '[[engine]]\nname = "e"\nkind = "vllm"\nurl = "{url}"\nslots = 1\nmodels = ["m"]\n{more}'
SERVER = '[server]\nlisten = ["{listen}"]\nadmin = "{admin}"\n'

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a configuration; its path."""

    def write(
        *,
        listen: str = "127.0.0.1:0",
        admin: str = "127.0.0.1:0",
        url: str = "http://127.0.0.1:1",
        more: str = "",
    ) -> str:
        path = tmp_path / "config.toml"
        path.write_text(SERVER.format(listen=listen, admin=admin) + ENGINE.format(url=url, more=more))
        return str(path)

    return write


@pytest.fixture(autouse=True)
def logging() -> Iterator[None]:
    """What the command configures is this test's only."""
    yield
    structlog.reset_defaults()


# The configuration is at fault: 2, and one line for each fault.


@pytest.mark.parametrize("command", ["serve", "check"])
def test_missing_file(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.toml"
    assert main([command, "--config", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{path}: ")
    assert "no such file" in line


@pytest.mark.parametrize("command", ["serve", "check"])
def test_typo_is_named_with_what_was_meant(
    command: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(more="slotz = 1\n[stream]\nidle_secs = 3\n")
    assert main([command, "--config", path]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 2
    assert any("idle_secs" in line and "idle_seconds" in line for line in lines)
    assert any("slotz" in line and "slots" in line for line in lines)


@pytest.mark.parametrize("command", ["serve", "check"])
def test_authority_that_is_no_pem_file(
    command: str, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ca.pem").write_text("no pem\n")
    path = write(url="https://127.0.0.1:1", more='ca = "ca.pem"\n')
    assert main([command, "--config", path]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "engine[0].ca" in line
    assert "PEM" in line


def test_certificate_that_is_no_pem_file(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("c.pem", "k.pem"):
        (tmp_path / name).write_text("no pem\n")
    path = write(more='[server.tls]\ncertificate = "c.pem"\nkey = "k.pem"\n')
    assert main(["serve", "--config", path]) == 2
    assert "server.tls.certificate: the file holds no certificate" in capsys.readouterr().err


def test_key_file_without_a_key(
    write: Write, tls: Tls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.pem").write_bytes(Path(tls.certificate).read_bytes())
    path = write(more='[server.tls]\ncertificate = "c.pem"\nkey = "c.pem"\n')
    assert main(["check", "--config", path]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (
        "",
        f"{path}: server.tls.key: the file holds no private key; is it the right PEM file?\n",
    )


@pytest.mark.parametrize("arguments", [[], ["sreve"], ["serve", "--confg", "x"]])
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "usage: gateway" in said
    assert "usage: gateway serve [-h] [--config FILE]" in said or "--confg" not in arguments


# Something else is: 1.


@pytest.mark.parametrize("plane", ["listen", "admin"])
def test_busy_port(plane: str, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert main(["serve", "--config", write(**{plane: address})]) == 1
    err = capsys.readouterr().err
    assert f"Can't listen on {address}: Address already in use." in err
    assert "ss -lxtnp" in err
    assert "Traceback" not in err


def test_dead_engine_fails_the_check(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", write()]) == 1
    captured = capsys.readouterr()
    assert "can't be reached" in captured.out
    assert captured.err == ""


# All is well: 0.


class Log:
    """Stands for the command's log, and sends signals when the gateway is ready."""

    def __init__(self, *signals: signal.Signals) -> None:
        self.events: list[str] = []
        self._signals = signals

    def info(self, event: str, **_: Any) -> None:
        self.events.append(event)
        if event == "ready":
            for number in self._signals:
                signal.raise_signal(number)

    warning = info


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_ends_well(
    number: signal.Signals, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(number)
    monkeypatch.setattr(cli, "log", log)
    assert main(["serve", "--config", write()]) == 0
    assert log.events == ["ready"]


@pytest.mark.parametrize(
    ("listen", "more", "told"),
    [
        ("0.0.0.0:0", "", True),
        ("0.0.0.0:0", f'[[tenant]]\nname = "t"\nkeys = ["sha256:{64 * "0"}"]\n', False),
        ("127.0.0.1:0", "", False),
    ],
)
def test_an_address_that_is_open_to_all_is_told(
    listen: str, more: str, told: bool, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(signal.SIGTERM)
    monkeypatch.setattr(cli, "log", log)
    assert main(["serve", "--config", write(listen=listen, more=more)]) == 0
    warning = "no tenants are configured: whoever reaches these addresses may use every model"
    assert log.events == ["ready", *([warning] if told else [])]


def test_second_signal_ends_it_now(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(signal.SIGTERM, signal.SIGINT)
    monkeypatch.setattr(cli, "log", log)
    assert main(["serve", "--config", write()]) == 1
    assert log.events == ["ready", "second signal: ending now"]


@pytest.mark.parametrize(("slots", "event"), [("1", "reloaded"), ("0", "reload failed, nothing is changed")])
def test_hangup_reloads(slots: str, event: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(write())

    class Operator(Log):
        def info(self, event: str, **more: Any) -> None:
            self.events.append(event)
            if event == "ready":
                path.write_text(path.read_text().replace("slots = 1", f"slots = {slots}"))
                signal.raise_signal(signal.SIGHUP)
            elif len(self.events) == 2:
                signal.raise_signal(signal.SIGTERM)

        error = info

    log = Operator()
    monkeypatch.setattr(cli, "log", log)
    monkeypatch.setattr(reload, "log", log)
    assert main(["serve", "--config", str(path)]) == 0
    assert log.events == ["ready", event]


def test_configuration_file_is_the_one_here_by_default(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(more="slotz = 1\n")
    monkeypatch.chdir(tmp_path)
    assert main(["check"]) == 2


@pytest.mark.parametrize(
    ("arguments", "status"), [(["serve"], 0), (["demo"], 0), (["check"], 130), (["usage"], 130), ([], 130)]
)
def test_ctrl_c_before_anything_minds_it(
    arguments: list[str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupted)
    monkeypatch.setattr("sys.argv", ["gateway", *arguments])
    assert entry.main() == status


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"gateway {gateway.__version__}\n"
