"""What is refused, and in which words: a line for each fault, with its place and what was expected there."""

from __future__ import annotations

import pytest

from gateway.config import ConfigError, parse
from tests.test_config import MINIMAL, SECRET

ENGINE = 'engine[0] "gpu0"'


def faults(text: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, environ=environ or {})
    lines = str(caught.value).splitlines()
    assert len(lines) == len(caught.value.faults)
    assert all(line.startswith("config.toml: ") for line in lines)
    return [line.removeprefix("config.toml: ") for line in lines]


def engine_faults(*lines: str, environ: dict[str, str] | None = None) -> list[str]:
    """Of an engine with these lines, in place of the minimal one's with the same keys."""
    keys = {line.partition(" = ")[0] for line in lines}
    kept = [line for line in MINIMAL.splitlines() if line.partition(" = ")[0] not in keys]
    return [line.removeprefix(ENGINE + ".") for line in faults("\n".join([*kept, *lines]), environ)]


# ----------------------------------------------------------------------------------- keys and tables


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[server]\nlistne = 1", 'server.listne: unknown key; did you mean "listen"?'),
        (
            "[server]\nMax-Connections = 1",
            'server.Max-Connections: unknown key; did you mean "max_connections"?',
        ),
        ("[server]\ndrain = 1", 'server.drain: unknown key; did you mean "drain_seconds"?'),
        ("[server]\nslots = 1", "server.slots: unknown key; it belongs to [[engine]]"),
        ("[server]\nkey = 1", "server.key: unknown key; it belongs to [server.tls]"),
        ("[server]\nstream = 1", "server.stream: unknown key; it belongs to the top of the file"),
        (
            "[server]\nspol_bytes = 1",
            'server.spol_bytes: unknown key; did you mean "spool_bytes" of [stream]?',
        ),
        ("[stream]\nqueue = 1", "stream.queue: unknown key; it belongs to [admission]"),
        ("[server]\nzzzz = 1", "server.zzzz: unknown key"),
        ('[server]\n"a b" = 1', 'server."a b": unknown key'),
        ("listen = 1", "listen: unknown key; it belongs to [server]"),
        ("[admision]\nqueue = 1", 'admision: unknown key; did you mean "admission"?'),
        ("stream = 5", "stream: expected a table, got an integer; write it as a table of its own"),
    ],
)
def test_keys_where_none_is_known(text: str, fault: str) -> None:
    assert faults(text + MINIMAL) == [fault]


def test_an_unknown_key_of_an_engine_says_which_engine() -> None:
    assert engine_faults("slot = 1") == ['slot: unknown key; did you mean "slots"?']
    # Of a key that another table has, if it is as good as the engine's own.
    assert engine_faults("model = 1") == ['model: unknown key; did you mean "models"?']
    assert engine_faults("base_url = 1") == ['base_url: unknown key; did you mean "url"?']
    assert engine_faults("max_num_seqs = 1") == ['max_num_seqs: unknown key; did you mean "slots"?']
    assert engine_faults("fallbacks = 1") == ["fallbacks: unknown key; it belongs to [[route]]"]
    assert engine_faults("weight = 1") == ['weight: unknown key; it belongs to "to" of [[route]]']
    assert engine_faults("queue = 1") == ["queue: unknown key; it belongs to [admission]"]


def test_no_engine_at_all() -> None:
    missing = "engine: missing: at least one [[engine]] is needed"
    assert faults("") == faults("engine = []") == [missing]
    assert faults("[[engines]]") == ['engines: unknown key; did you mean "engine"?', missing]


def test_one_bracket_is_not_an_engine() -> None:
    assert faults(MINIMAL.replace("[[engine]]", "[engine]")) == [
        "engine: expected an array of tables, got a table; write [[engine]], with two brackets"
    ]
    assert faults("engine = [1]") == [
        "engine[0]: expected a table, got an integer; write it as a table of its own"
    ]


def test_what_has_no_default_must_be_there() -> None:
    keys = ["name", "kind", "url", "slots", "models"]
    assert faults("[[engine]]") == [f"engine[0]: {key}: missing".replace(": ", ".", 1) for key in keys]
    assert faults(f'[server.tls]\nkey = "{__file__}"{MINIMAL}') == ["server.tls.certificate: missing"]


# ------------------------------------------------------------------------------------- single values


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('slots = "many"', 'slots: expected an integer of at least 1, got "many"'),
        ("slots = true", "slots: expected an integer of at least 1, got true"),
        ("slots = 0", "slots: expected an integer of at least 1, got 0"),
        ("slots = 2.0", "slots: expected an integer of at least 1, got 2.0"),
        ("slots = 1000001", "slots: expected an integer of at most 1000000, got 1000001"),
        ("slots = 1" + 40 * "0", "slots: expected an integer of at most 1000000, got a huge integer"),
        ("slots = []", "slots: expected an integer of at least 1, got an array"),
        ("slots = 2024-01-01", "slots: expected an integer of at least 1, got a date or time"),
        ("reclaim_seconds = true", "reclaim_seconds: expected a number of at least 0, got true"),
        ("reclaim_seconds = nan", "reclaim_seconds: expected a finite number of at least 0, got nan"),
        ("reclaim_seconds = inf", "reclaim_seconds: expected a finite number of at least 0, got inf"),
        ("reclaim_seconds = -1.0", "reclaim_seconds: expected a number of at least 0, got -1.0"),
        ("reclaim_seconds = 4e7", "reclaim_seconds: expected a number of at most 31536000, got 40000000.0"),
        ("reclaim_seconds = 0.5", 'reclaim_seconds: expected at least 1 for kind "vllm", got 0.5'),
        ('models = "m"', 'models: expected an array of strings, got "m"; write ["m"]'),
        ("models = []", "models: expected at least one, got an empty array"),
        ('models = ["m", ""]', "models[1]: expected text, not an empty string"),
        ('models = ["m", 3]', "models[1]: expected a string, got 3"),
        ('models = [" m"]', 'models[0]: expected printable text without spaces around it, got " m"'),
        ('models = ["a\\nb"]', 'models[0]: expected printable text without spaces around it, got "a\\nb"'),
        ('models = ["m", "*"]', 'models: "*" means every model and stands alone'),
        ('models = ["m", "n", "m"]', "models[2]: the same model as models[0]"),
        ('url = "file:/run/x"', "url: file: is for api_key and the values of headers only"),
        ('ca = "/nowhere/ca.pem"', 'ca: can\'t read "/nowhere/ca.pem"; No such file or directory'),
        ('ca = "/"', 'ca: can\'t read "/"; not a regular file'),
        (f'ca = "{__file__}"', "ca: only an https:// url has certificates to check"),
        ("headers = []", "headers: expected a table of strings, got an array"),
    ],
)
def test_values_out_of_line(line: str, fault: str) -> None:
    assert engine_faults(line) == [fault]


def test_words_out_of_a_list() -> None:
    kinds = 'kind: expected one of "llamacpp", "ollama", "openai", "sglang", "vllm"'
    assert engine_faults('kind = "llama.cpp"') == [f'{kinds}, got "llama.cpp"; did you mean "llamacpp"?']
    assert engine_faults('kind = "tgi"') == [f'{kinds}, got "tgi"']
    assert engine_faults("kind = 1") == [f"{kinds}, got 1"]
    assert engine_faults("reclaim = false") == [
        'reclaim: expected one of "enforce", "observe", "off", got false'
    ]


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 65, "a/b"])
def test_names_an_engine_cannot_have(name: str) -> None:
    (fault,) = faults(MINIMAL.replace("gpu0", name))
    words = "expected 1 to 64 letters, digits, dots, dashes and underscores, got"
    assert faults(MINIMAL.replace('"gpu0"', "5")) == ["engine[0].name: expected a string, got 5"]
    assert fault.startswith(f"engine[0].name: {words if name else 'expected text, not an empty string'}")


@pytest.mark.parametrize(
    ("table", "key", "limit"),
    [
        ("server", "max_connections = 0", "an integer of at least 1"),
        ("server", "drain_seconds = -1", "a number of at least 0"),
        ("server", "body_seconds = 0", "a number above 0"),
        ("server", "bodies_bytes = 1.5", "an integer of at least 1"),
        ("server", "max_body_bytes = 0", "an integer of at least 1"),
        ("stream", "connect_seconds = -1", "a number of at least 0"),
        ("stream", "first_byte_seconds = -1", "a number of at least 0"),
        ("stream", "idle_seconds = -1", "a number of at least 0"),
        ("stream", "total_seconds = true", "a number of at least 0"),
        ("stream", "stall_seconds = -0.5", "a number of at least 0"),
        ("stream", "spool_bytes = 4095", "an integer of at least 4096"),
        ("stream", "heartbeat_seconds = -1", "a number of at least 0"),
        ("admission", "queue = -1", "an integer of at least 0"),
        ("admission", "queue_seconds = 0", "a number above 0"),
    ],
)
def test_numbers_out_of_range(table: str, key: str, limit: str) -> None:
    name, _, value = key.partition(" = ")
    assert faults(f"[{table}]\n{key}{MINIMAL}") == [f"{table}.{name}: expected {limit}, got {value}"]


@pytest.mark.parametrize(
    "address",
    [
        "8080",
        ":8080",
        "a:b",
        "::1:80",
        "[::1]",
        "[127.0.0.1]:80",
        "999.1.1.1:80",
        "-a:80",
        "a b:80",
        "http://a:80",
    ],
)
def test_addresses_that_are_none(address: str) -> None:
    expected = 'expected "host:port", "[v6]:port", "unix:/path" or "fd://3"'
    assert faults(f'[server]\nadmin = "{address}"{MINIMAL}') == [f'server.admin: {expected}, got "{address}"']


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("a:65536", "expected a port from 0 to 65535"),
        ("unix:a", 'expected "unix:/path" with an absolute path'),
        ("unix:///a", 'expected "unix:/path" with an absolute path'),
        ("unix:/" + "a" * 107, "expected a socket's path of at most 107 bytes"),
        ("fd://1", "expected an inherited descriptor from fd://3 on"),
        ("fd:3", "expected an inherited descriptor from fd://3 on"),
    ],
)
def test_addresses_nearly_right(address: str, expected: str) -> None:
    (fault,) = faults(f'[server]\nlisten = ["{address}"]{MINIMAL}')
    assert fault.startswith(f'server.listen[0]: {expected}, got "{address[:20]}')


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("127.0.0.1:8000", "expected a URL that begins with http://, https:// or unix:/"),
        ("http://", "expected a URL with a valid host, and a port from 1 to 65535 if any"),
        ("http://a:0", "expected a URL with a valid host, and a port from 1 to 65535 if any"),
        ("http://a:", "expected a URL with a valid host, and a port from 1 to 65535 if any"),
        ("http://a:65536", "expected a URL with a valid host, and a port from 1 to 65535 if any"),
        ("http://[::1", "expected a URL with a valid host, and a port from 1 to 65535 if any"),
        ("http://a b", "expected a URL of visible ASCII characters"),
        (f"http://me:{SECRET}@a", "expected a URL without credentials: they go to api_key or headers"),
        (f"http://a/?key={SECRET}", "expected a URL without query and fragment"),
        (f"http://a/#{SECRET}", "expected a URL without query and fragment"),
        ("http://a/../b", "expected a URL with a valid path"),
        ("http://a/%zz", "expected a URL with a valid path"),
        (
            "http://a/v1",
            "expected a URL without /v1 at its end: the gateway adds the whole path of a request",
        ),
        ("unix:run/a", 'expected "unix:/path" with an absolute path'),
    ],
)
def test_urls_that_lead_nowhere(url: str, expected: str) -> None:
    assert engine_faults(f'url = "{url}"') == [f"url: {expected}"]


@pytest.mark.parametrize(
    ("listen", "url", "loop"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080/prefix", True),
        ("0.0.0.0:8080", "http://localhost:8080", True),
        ("[::]:443", "https://[::1]", True),
        ("unix:/run/a", "unix:/run/a", True),
        ("0.0.0.0:8080", "http://gpu1:8080", False),
        ("127.0.0.1:8080", "http://127.0.0.1:8081", False),
    ],
)
def test_the_gateway_is_no_engine_of_its_own(listen: str, url: str, loop: bool) -> None:
    text = f'[server]\nlisten = ["{listen}"]\n' + MINIMAL.replace("http://127.0.0.1:8000", url)
    expected = f"{ENGINE}.url: the same socket as server.listen[0]; the gateway would ask itself"
    assert url in text
    if loop:
        assert faults(text) == [expected]
    else:
        parse(text, environ={})


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        ('"a b" = "x"', 'headers."a b": not a valid header name'),
        ('Host = "x"', "headers.Host: can't be set: it is taken from url"),
        ('content-length = "x"', "headers.content-length: can't be set: it follows from the body"),
        ('TE = "x"', "headers.TE: can't be set: it belongs to one connection (hop by hop)"),
        ('X-A = ""', "headers.X-A: expected text, not an empty string"),
        (f'X-A = "{SECRET}\\n"', "headers.X-A: expected printable ASCII without spaces around it"),
        ("X-A = 4711", "headers.X-A: expected a string, got an integer"),
        ('X-A = "1", x-a = "2"', "headers.x-a: given twice: header names don't differ by case"),
    ],
)
def test_headers_that_cannot_be_sent(header: str, fault: str) -> None:
    assert engine_faults(f"headers = {{ {header} }}") == [fault]


def test_two_authorizations() -> None:
    lines = ['api_key = "k"', 'headers = { authorization = "x" }']
    assert engine_faults(*lines) == ["headers.authorization: api_key makes this header already"]


# -------------------------------------------------------------------------------------- several keys


@pytest.mark.parametrize(
    ("server", "fault"),
    [
        ('listen = ["a:1", "b:1", "A:1"]', "server.listen[2]: the same socket as server.listen[0]"),
        ('listen = ["fd://3", "fd://03"]', "server.listen[1]: the same socket as server.listen[0]"),
        ('listen = ["[::1]:1", "[0::1]:1"]', "server.listen[1]: the same socket as server.listen[0]"),
        ('listen = ["0.0.0.0:1", "a:1"]', "server.listen[1]: the same socket as server.listen[0]"),
    ],
)
def test_the_same_address_twice(server: str, fault: str) -> None:
    assert faults(f"[server]\n{server}{MINIMAL}") == [fault]


@pytest.mark.parametrize("listen", ["127.0.0.1:9090", "localhost:9090", "0.0.0.0:9090"])
def test_the_control_plane_has_a_socket_of_its_own(listen: str) -> None:
    assert faults(f'[server]\nlisten = ["a:1", "{listen}"]{MINIMAL}') == [
        "server.admin: the same socket as server.listen[1]; the control plane needs one of its own"
    ]


def test_a_body_larger_than_all_bodies() -> None:
    assert faults(f"[server]\nbodies_bytes = 1024{MINIMAL}") == [
        "server.max_body_bytes: expected at most bodies_bytes (1024), got 33554432; "
        "a body of that size could never be read"
    ]


def test_two_engines_of_one_name() -> None:
    other = MINIMAL.replace("gpu0", "${N}").replace('url = "http://', 'url = "http://other-')
    expected = ['engine[1] "gpu0".name: engine[0] has this name already']
    assert faults(MINIMAL + other, {"N": "gpu0"}) == expected


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("http://127.0.0.1:8000/", True),
        ("http://localhost:8000", True),
        ("http://127.0.0.1:8001", False),
        ("http://127.0.0.1:8000/other", False),
        ("http://127.0.0.2:8000", False),
    ],
)
def test_two_tables_for_one_engine(url: str, same: bool) -> None:
    """Each would give it its own slots."""
    table = '\n[[engine]]\nname = "{}"\nkind = "vllm"\nurl = "{}"\nslots = 1\nmodels = ["m"]\n'
    expected = [
        'engine[1] "b".url: engine[0] is at this address already, and each would use its own slots; '
        "one table for each engine, with all that it serves in its models"
    ]
    text = table.format("a", "http://127.0.0.1:8000") + table.format("b", url)
    if same:
        assert faults(text) == expected
    else:
        parse(text)


@pytest.mark.parametrize("value", ['"30s"', '"30"', '"30 seconds"'])
def test_a_number_with_a_unit_or_in_quotes(value: str) -> None:
    (fault,) = faults(f"[server]\ndrain_seconds = {value}{MINIMAL}")
    assert fault == (
        f"server.drain_seconds: expected a number of at least 0, got {value}; written without quotes and unit"
    )


def test_all_faults_are_told_at_once_and_none_twice() -> None:
    text = """
    [server]
    listne = []
    listen = ["x"]
    max_body_bytes = "1 GB"
    [stream]
    idle_seconds = nan
    [[engine]]
    name = "gpu0"
    kind = "wllm"
    slots = "many"
    reclaim_seconds = 0.1
    [[engine]]
    name = "gpu0"
    """
    keys = [line.rpartition(": expected")[0] or line.partition(": ")[0] for line in faults(text)]
    assert keys == [
        "server.listne",
        "server.listen[0]",
        "server.max_body_bytes",
        "stream.idle_seconds",
        f"{ENGINE}.kind",
        f"{ENGINE}.url",
        f"{ENGINE}.slots",
        f"{ENGINE}.models",
        'engine[1] "gpu0".kind',
        'engine[1] "gpu0".url',
        'engine[1] "gpu0".slots',
        'engine[1] "gpu0".models',
        'engine[1] "gpu0".name',
    ]
