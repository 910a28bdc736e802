"""What a configuration means once it is accepted: defaults, expansion, secrets, and how it is shown."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from gateway.config import (
    MASK,
    Admission,
    Config,
    Engine,
    Health,
    Kind,
    Log,
    Retry,
    Route,
    Server,
    Stream,
    Target,
    Tenant,
    Tls,
    Traces,
    Usage,
    changes,
    load,
    parse,
    schema,
    sections,
    show,
)
from gateway.config.values import RECLAIM_SECONDS

REFERENCE = Path(__file__).parent.parent / "config.toml"
MINIMAL = """
[[engine]]
name = "gpu0"
kind = "vllm"
url = "http://127.0.0.1:8000"
slots = 4
models = ["*"]
"""
SECRET = "sk-4711-tell-nobody"


def parse_engine(*lines: str, environ: dict[str, str] | None = None) -> Engine:
    config = parse(MINIMAL + "\n".join(lines), environ=environ or {})
    return config.engines[0]


def struct_keys(struct: Any, table: str) -> Iterator[tuple[str, msgspec.structs.FieldInfo]]:
    for field in msgspec.structs.fields(struct):
        yield f"{table}.{field.name}", field


# ----------------------------------------------------------------------------- defaults and the file


def test_one_engine_is_a_whole_configuration() -> None:
    config = parse(MINIMAL, environ={})
    engine = Engine(name="gpu0", kind="vllm", url="http://127.0.0.1:8000", slots=4, models=("*",))
    assert config == Config(server=Server(), stream=Stream(), admission=Admission(), engine=(engine,))
    assert config.engines is config.engine


def test_defaults_are_those_of_the_contract() -> None:
    assert Server() == Server(
        listen=("127.0.0.1:8080",),
        admin="127.0.0.1:9090",
        max_connections=4096,
        drain_seconds=30,
        max_body_bytes=33554432,
        bodies_bytes=268435456,
        body_seconds=30,
        tls=None,
    )
    assert Stream() == Stream(
        connect_seconds=5,
        first_byte_seconds=300,
        idle_seconds=120,
        total_seconds=3600,
        stall_seconds=30,
        spool_bytes=262144,
        heartbeat_seconds=0,
    )
    assert Admission() == Admission(queue=512, queue_seconds=60)
    assert Usage() == Usage(path=None, flush_seconds=1, keep_days=400, ask_engine="no")


@pytest.mark.parametrize("kind", get_args(Kind))
def test_reclaim_seconds_depends_on_the_kind(kind: Kind) -> None:
    expected = {"llamacpp": 1.5, "ollama": 1.0, "openai": 0.0}.get(kind, 10.0)
    built = Engine(name="a", kind=kind, url="http://a", slots=1, models=("m",))
    parsed = parse(MINIMAL.replace("vllm", kind), environ={}).engines[0]
    assert built.reclaim_seconds == parsed.reclaim_seconds == expected
    assert RECLAIM_SECONDS[kind].minimum <= expected


def test_the_file_of_usage_need_not_be_there_and_lies_beside_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'[usage]\npath = "usage.db"{MINIMAL}')
    assert load(path, environ={}).usage.path == str(tmp_path / "usage.db")


def test_reclaim_seconds_given_is_kept() -> None:
    assert parse_engine("reclaim_seconds = 20").reclaim_seconds == 20.0


def test_the_reference_file_starts_the_demo() -> None:
    (engine,) = load(REFERENCE, environ={}).engines
    assert engine == Engine(
        name="demo",
        kind="llamacpp",
        url="http://127.0.0.1:8081",
        slots=2,
        models=("smollm2-135m-instruct",),
        reclaim="enforce",
    )


def test_the_reference_file_holds_every_key_with_its_default() -> None:
    text = REFERENCE.read_text()
    tables = tomllib.loads(text)
    commented = set(re.findall(r"^# (\w+) = ", text, re.MULTILINE))
    required = {"engine.name", "engine.kind", "engine.url", "engine.slots", "engine.models"}
    per_kind = {"engine.reclaim_seconds"}
    structs: dict[str, Any] = {
        "server": Server,
        "stream": Stream,
        "admission": Admission,
        "health": Health,
        "retry": Retry,
        "usage": Usage,
        "log": Log,
        "traces": Traces,
        "engine": Engine,
    }
    assert {*structs, "route", "tenant"} == set(Config.__struct_fields__)
    for table, struct in structs.items():
        given = tables[table][0] if table == "engine" else tables[table]
        for path, field in struct_keys(struct, table):
            if path == "server.tls":
                assert "# [server.tls]" in text
            elif field.default is None or field.default_factory is dict:
                assert field.name in commented, path
            elif path in required | per_kind:
                assert field.name in given, path
            else:
                assert msgspec.convert(given[field.name], field.type) == field.default, path
    assert {field.name for _, field in struct_keys(Tls, "server.tls")} <= commented
    assert "# [[tenant]]" in text
    shown = dict(re.findall(r"^# (\w+) = (.*)", text[text.index("# [[tenant]]") :], re.MULTILINE))
    assert set(shown) == {field.name for _, field in struct_keys(Tenant, "tenant")}


def test_the_commented_out_examples_are_valid(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    text = re.sub(
        r"^# (\[server\.tls\]$|\[\[(?:tenant|route)\]\]$|\w+ = )",
        r"\1",
        REFERENCE.read_text(),
        flags=re.MULTILINE,
    )
    text = re.sub(r"/etc/gateway/[\w.-]+|/run/secrets/[\w-]+", str(tmp_path / "secret"), text)
    text = text.replace("http://127.0.0.1:8081", "https://127.0.0.1:8081")
    config = parse(text, environ={"ENGINE_KEY": SECRET})
    assert config.server.tls is not None
    assert config.engines[0].api_key == SECRET
    assert config.engines[0].headers == {"X-Example": SECRET}
    (route,) = config.route
    assert (route.model, route.policy) == ("chat", "least_loaded")
    (tenant,) = config.tenant
    assert tenant == Tenant(name="research", keys=tenant.keys)


def test_every_key_has_its_meaning_beside_it() -> None:
    source = "".join(Path(str(module.__file__)).read_text() for module in (sections, schema))
    for struct in (
        Server,
        Tls,
        Stream,
        Admission,
        Health,
        Retry,
        Usage,
        Log,
        Traces,
        Engine,
        Target,
        Route,
        Tenant,
        Config,
    ):
        body = source.split(f"class {struct.__name__}(")[1].split("\nclass ")[0]
        for field in msgspec.structs.fields(struct):
            meaning = re.search(rf'\n    {field.name}: .*\n    """((?:.|\n)*?)"""', body)
            assert meaning is not None, field.name
            assert not field.name.endswith("_seconds") or "seconds" in meaning[1], field.name


# -------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:0",
        "0.0.0.0:65535",
        "localhost:80",
        "my-host.example:1",
        "[::1]:80",
        "unix:/run/a",
        "fd://3",
    ],
)
def test_addresses_that_can_be_listened_on(address: str) -> None:
    assert parse(f'[server]\nlisten = ["{address}"]{MINIMAL}', environ={}).server.listen == (address,)


def test_ports_chosen_by_the_system_are_never_the_same_socket() -> None:
    config = parse(
        f'[server]\nlisten = ["127.0.0.1:0", "127.0.0.1:0"]\nadmin = "127.0.0.1:0"{MINIMAL}', environ={}
    )
    assert config.server.listen == ("127.0.0.1:0", "127.0.0.1:0")


def test_both_families_may_listen_on_one_port() -> None:
    parse(f'[server]\nlisten = ["0.0.0.0:8080", "[::]:8080"]{MINIMAL}', environ={})


@pytest.mark.parametrize(
    "url",
    ["http://a", "https://a.example:8443/", "http://[::1]:1/x/y", "http://a/v1beta/%41", "unix:/run/a.sock"],
)
def test_urls_an_engine_may_have(url: str) -> None:
    assert parse(MINIMAL.replace("http://127.0.0.1:8000", url), environ={}).engines[0].url == url


def test_whole_numbers_are_accepted_as_seconds_and_become_floats() -> None:
    stream = parse(f"[stream]\nidle_seconds = 7\nstall_seconds = 0.25{MINIMAL}", environ={}).stream
    assert (stream.idle_seconds, stream.stall_seconds) == (7.0, 0.25)
    assert type(stream.idle_seconds) is float


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load(path, environ={}) == parse(MINIMAL, environ={})


# ----------------------------------------------------------------------------------------- expansion


def test_variables_are_expanded_wherever_a_string_is() -> None:
    environ = {"HOST": "gpu", "MODEL": "m", "NAME": "n", "KIND": "ollama", "EMPTY": ""}
    text = """
    [[engine]]
    name = "${NAME}-${NOT_SET:-0}"
    kind = "${KIND}"
    url = "http://${HOST}:${EMPTY:-8000}"
    slots = 1
    models = ["${MODEL}", "${NOT_SET:-}x", "a$$b", "$${MODEL}"]
    headers = { X-A = "${HOST} $$1" }
    """
    (engine,) = parse(text, environ=environ).engines
    assert (engine.name, engine.kind, engine.url) == ("n-0", "ollama", "http://gpu:8000")
    assert engine.models == ("m", "x", "a$b", "${MODEL}")
    assert engine.headers == {"X-A": "gpu $1"}


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_secret_can_come_from_a_file(tmp_path: Path, end: str) -> None:
    (tmp_path / "key").write_bytes((SECRET + end).encode())
    engine = parse_engine(
        'api_key = "file:${DIR}/key"',
        f'headers = {{ X-A = "file:{tmp_path}/key" }}',
        environ={"DIR": str(tmp_path)},
    )
    assert engine.api_key == engine.headers["X-A"] == SECRET


def test_a_variable_that_looks_like_a_file_is_not_read() -> None:
    engine = parse_engine('api_key = "${KEY}"', environ={"KEY": "file:/etc/hostname"})
    assert engine.api_key == "file:/etc/hostname"


def test_the_environment_is_read_when_nothing_else_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_TEST_KEY", SECRET)
    assert parse(MINIMAL + 'api_key = "${GATEWAY_TEST_KEY}"').engines[0].api_key == SECRET


def test_relative_paths_start_at_the_configuration_file(tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).touch()
    path = tmp_path / "config.toml"
    path.write_text(f'[server.tls]\ncertificate = "cert.pem"\nkey = "./key.pem"{MINIMAL}')
    tls = Tls(certificate=str(tmp_path / "cert.pem"), key=str(tmp_path / "key.pem"))
    assert load(path, environ={}).server.tls == tls


# ------------------------------------------------------------------------------- secrets and showing


def secretive() -> Config:
    return parse(MINIMAL + f'api_key = "{SECRET}"\nheaders = {{ X-A = "{SECRET}", "x.b" = "2" }}', environ={})


def test_secrets_are_in_no_print() -> None:
    config = secretive()
    prints = [
        repr(config),
        str(config),
        f"{config.engines}",
        repr(config.engines[0].__rich_repr__()),
        show(config),
    ]
    assert not [text for text in prints if SECRET in text]
    assert f"api_key='{MASK}'" in repr(config)
    assert "api_key=None" in repr(parse(MINIMAL, environ={}))


def test_showing_masks_secrets_and_nothing_else() -> None:
    shown = parse(show(secretive()), environ={})
    (engine,) = shown.engines
    assert engine.api_key == MASK
    assert engine.headers == {"X-A": MASK, "x.b": MASK}
    assert shown.server == secretive().server
    assert engine.url == "http://127.0.0.1:8000"


def test_showing_reads_well() -> None:
    shown = show(parse(f"[stream]\nidle_seconds = 0.5{MINIMAL}", environ={}))
    assert shown.startswith('[server]\nlisten = ["127.0.0.1:8080"]\nadmin = "127.0.0.1:9090"\n')
    assert "\nidle_seconds = 0.5\ntotal_seconds = 3600\n" in shown
    assert shown.endswith('\nmodels = ["*"]\nreclaim = "enforce"\nreclaim_seconds = 10\nheaders = {}\n')


def test_what_is_shown_parses_to_the_same(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
    engines = """
    [[engine]]
    name = "a"
    kind = "sglang"
    url = "https://a/$${x"
    slots = 3
    models = ["a $$ b", 'quo"te\\', "ünï", "$${HOME}"]
    reclaim = "off"
    reclaim_seconds = 5.125
    ca = "a"
    """.replace("/$${x", "/$$x")
    text = f'[server]\ndrain_seconds = 1e-5\ntls = {{ certificate = "b", key = "c" }}\n{engines}{MINIMAL}'
    config = parse(text, file=str(tmp_path / "config.toml"), environ={})
    assert parse(show(config), file="elsewhere.toml", environ={}) == config


def test_no_secret_is_shown_as_a_change() -> None:
    """Whatever the schema calls a secret, now and later."""
    secrets = {"server": "admin_token", "engine": "api_key"}
    before = parse(MINIMAL)
    for section, key in secrets.items():
        for old, new in ((None, SECRET), (SECRET, SECRET + "2"), (SECRET, None)):
            told = [
                change.text
                for change in changes(
                    *(
                        msgspec.structs.replace(
                            before,
                            **{
                                section: msgspec.structs.replace(before.server, admin_token=value)
                                if section == "server"
                                else (msgspec.structs.replace(before.engine[0], api_key=value),)
                            },
                        )
                        for value in (old, new)
                    )
                )
            ]
            assert len(told) == 1
            assert key in told[0]
            assert SECRET not in told[0]
