"""What can be seen of the files of deploy/ without running them: that they are valid, and that they agree."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import trio

from gateway import config
from tests.deploy.proxies import DEPLOY

NGINX, HAPROXY, SERVICE, KUBERNETES = (
    (DEPLOY / name).read_text()
    for name in ("nginx.conf", "haproxy.cfg", "gateway.service", "kubernetes.yaml")
)
COMPOSE = ["vllm", "ollama"]
DEFAULTS = config.parse(
    '[[engine]]\nname = "e"\nkind = "vllm"\nurl = "http://127.0.0.1:1"\nslots = 1\nmodels = ["m"]', environ={}
)
PROFILES = sorted(path.name for path in DEPLOY.glob("engines/*.sh"))
FAREWELL_SECONDS = 3  # what a drain may take beyond drain_seconds, rounded up: service.py

# The longest silence that is in order: in the queue, then for one engine after the other.
SILENCE = DEFAULTS.admission.queue_seconds + DEFAULTS.retry.attempts * DEFAULTS.stream.first_byte_seconds


def number(text: str, pattern: str) -> float:
    """The one number that the pattern's group finds; in a line that is no comment."""
    found = re.findall(rf"^[^#\n]*{pattern}", text, re.MULTILINE)
    assert len(found) == 1, f"{pattern}: {found}"
    return float(found[0])


def compose(name: str) -> str:
    return (DEPLOY / f"compose.{name}.yaml").read_text()


def without_secrets(text: str, folder: Path) -> str:
    """With the secrets' files in this folder."""
    (folder / "admin-token").write_text("t" * 32 + "\n")
    return re.sub(r'"file:[^"]*/admin-token"', f'"file:{folder}/admin-token"', text)


def settings(name: str, folder: Path) -> config.Config:
    return config.parse(without_secrets((DEPLOY / name).read_text(), folder), file=name, environ={})


def of_config_map(folder: Path) -> config.Config:
    block = re.search(r"^  config\.toml: \|\n((?:    .*\n|\n)+)", KUBERNETES, re.MULTILINE)
    assert block is not None
    return config.parse(
        without_secrets(re.sub(r"^    ", "", block[1], flags=re.MULTILINE), folder), environ={}
    )


def engine_of_profile(name: str) -> config.Engine:
    lines = re.findall(r"^# {5}(\S.*)$", (DEPLOY / "engines" / name).read_text(), re.MULTILINE)
    (engine,) = config.parse("\n".join(lines), environ={}).engines
    return engine


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.toml")), ids=lambda path: path.name)
def test_configurations_are_valid(path: Path, tmp_path: Path) -> None:
    found = settings(path.name, tmp_path)
    assert found.server.admin_token == "t" * 32
    assert found.server.drain_seconds == DEFAULTS.server.drain_seconds


def test_the_configuration_of_the_config_map_is_valid(tmp_path: Path) -> None:
    found = of_config_map(tmp_path)
    assert (found.server.listen, found.server.admin) == (("0.0.0.0:8080",), "0.0.0.0:9090")


@pytest.mark.parametrize("directory", [None, "credentials"])
def test_the_token_under_systemd_is_its_credential(directory: str | None, tmp_path: Path) -> None:
    text = (DEPLOY / "config.systemd.toml").read_text()
    (tmp_path / "admin-token").write_text("t" * 32)
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)} if directory else {}
    if directory is None:
        text = text.replace(":-/etc/gateway}", f":-{tmp_path}}}")
    assert config.parse(text, environ=environ).server.admin_token == "t" * 32


def test_clocks_of_the_proxies_are_longer_than_the_gateway_s() -> None:
    longest = max(SILENCE, DEFAULTS.stream.total_seconds + DEFAULTS.admission.queue_seconds)
    assert number(NGINX, r"proxy_read_timeout (\d+)s;") > longest
    assert number(HAPROXY, r"timeout server (\d+)s") > longest
    assert number(HAPROXY, r"timeout client (\d+)s") > longest
    # The gateway closes idle connections after 75 s: nginx has to be the first.
    upstream = NGINX[NGINX.index("upstream gateway") : NGINX.index("    server {")]
    assert number(upstream, r"keepalive_timeout (\d+)s;") < 75


def test_nginx_lets_the_gateway_refuse_large_bodies() -> None:
    megabytes = number(NGINX, r"client_max_body_size (\d+)m;")
    assert DEFAULTS.server.max_body_bytes < megabytes * 2**20 < DEFAULTS.server.max_body_bytes * 1.1


def test_nginx_has_what_streams_need() -> None:
    for line in (
        "proxy_buffering off;",
        "proxy_request_buffering off;",
        "proxy_ignore_client_abort off;",
        "proxy_next_upstream off;",
        "proxy_http_version 1.1;",
        'proxy_set_header Connection "";',
    ):
        assert re.search(rf"^ *{re.escape(line)}$", NGINX, re.MULTILINE), line


def test_supervisors_wait_longer_than_a_drain_takes(tmp_path: Path) -> None:
    systemd = settings("config.systemd.toml", tmp_path).server.drain_seconds
    assert number(SERVICE, r"TimeoutStopSec=(\d+)") > systemd + FAREWELL_SECONDS
    for name in COMPOSE:
        drain = settings(f"config.{name}.toml", tmp_path).server.drain_seconds
        assert number(compose(name), r"^    stop_grace_period: (\d+)s$") > drain + FAREWELL_SECONDS
    drain, before = of_config_map(tmp_path).server.drain_seconds, number(KUBERNETES, r'\["sleep", "(\d+)"\]')
    grace = number(KUBERNETES, r"terminationGracePeriodSeconds: (\d+)")
    assert grace > before + drain + FAREWELL_SECONDS


def test_there_are_descriptors_for_every_connection() -> None:
    wanted = 2 * DEFAULTS.server.max_connections
    assert number(SERVICE, r"LimitNOFILE=(\d+)") > wanted
    for name in COMPOSE:
        assert number(compose(name), r"nofile: (\d+)") > wanted
    assert number(HAPROXY, r"check .* maxconn (\d+)") < DEFAULTS.server.max_connections


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_files_and_their_configurations_agree(name: str, tmp_path: Path) -> None:
    text, found = compose(name), settings(f"config.{name}.toml", tmp_path)
    (engine,) = found.engines
    assert f"./config.{name}.toml:/etc/gateway/config.toml:ro" in text
    assert re.search(rf"^  {engine.name}:$", text, re.MULTILINE)
    slots = r"--max-num-seqs=(\d+)" if name == "vllm" else r'OLLAMA_NUM_PARALLEL: "(\d+)"'
    assert number(text, slots) == engine.slots
    # Nobody but this machine reaches what has no key; the engine isn't reached from outside at all.
    assert set(re.findall(r'^ +- "([\d.]+):\d+:\d+"$', text, re.MULTILINE)) == {"127.0.0.1"}
    assert text.count("    ports:") == 1


@pytest.mark.parametrize("name", PROFILES)
def test_engines_are_started_with_the_slots_of_their_table(name: str) -> None:
    text, engine = (DEPLOY / "engines" / name).read_text(), engine_of_profile(name)
    assert name.startswith(engine.kind)
    assert number(text, r"(?:SLOTS=\"\$\{SLOTS:-|NUM_PARALLEL=\"\$\{SLOTS:-)(\d+)\}") == engine.slots
    port = engine.url.rpartition(":")[2]
    assert re.search(rf'(?:PORT:-|127\.0\.0\.1:){port}\}}"', text)


@pytest.mark.parametrize("name", PROFILES)
def test_flags_are_explained(name: str) -> None:
    text = (DEPLOY / "engines" / name).read_text()
    command = text[text.index("\nexec ") :]
    flags = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", command)) - {
        "--model",
        "--model-path",
        "--port",
        "-m",
    }
    explained = set(
        re.findall(r"(?<![\w-])--?[a-z][\w-]*", "".join(re.findall(r"^# .*\n", text, re.MULTILINE)))
    )
    assert flags <= explained


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("checker", [["sh", "-n"], ["shellcheck", "-s", "sh"]], ids=["sh", "shellcheck"])
async def test_profiles_are_valid_scripts(name: str, checker: list[str]) -> None:
    if shutil.which(checker[0]) is None:
        pytest.skip(f"{checker[0]} isn't installed")
    await run(*checker, str(DEPLOY / "engines" / name))


async def test_units_are_valid(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze isn't installed")
    (tmp_path / "gateway.socket").write_text((DEPLOY / "gateway.socket").read_text())
    # The program has to be there.
    (tmp_path / "gateway.service").write_text(SERVICE.replace("=/opt/gateway/bin/gateway ", "=/bin/true "))
    said = await run(
        "systemd-analyze", "verify", *(str(tmp_path / f"gateway.{kind}") for kind in ("service", "socket"))
    )
    assert "gateway.s" not in said, said


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.name)
def test_yaml_is_valid(path: Path) -> None:
    text = path.read_text()
    assert "\t" not in text
    for line in text.splitlines():
        assert (len(line) - len(line.lstrip())) % 2 == 0, line
    yaml = pytest.importorskip("yaml", reason="PyYAML isn't installed: looked at indents alone")
    assert all(isinstance(document, dict) for document in yaml.safe_load_all(text))


def test_the_container_runs_as_nobody_and_without_a_shell() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", text, re.MULTILINE)
    assert re.search(
        r'^ENTRYPOINT \["gateway", "serve", "--config", "/etc/gateway/config.toml"\]$', text, re.MULTILINE
    )
    assert "--require-hashes" in text
    user = re.findall(r"^USER (\d+)", text, re.MULTILINE)[0]
    assert f"runAsUser: {user}" in KUBERNETES
    for name in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE):
        ignored = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
        assert {f"!{each}" for each in name.split()} <= set(ignored)


async def run(*command: str) -> str:
    done = await trio.run_process(command, capture_stdout=True, stderr=subprocess.STDOUT, check=False)
    said = done.stdout.decode()
    assert done.returncode == 0, said
    return said
