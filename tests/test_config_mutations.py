"""Whatever is in the file: a `Config` that can be shown and read again, or a `ConfigError` of whole lines."""

from __future__ import annotations

from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.config import MASK, Config, ConfigError, parse, show
from gateway.config.expand import escape, expand
from gateway.config.faults import quote

SECRET = "sk-0815-tell-nobody"
ENVIRON = {"KEY": "gpu-1", "EMPTY": "", "ODD": "a\udcffb\n"}
REFERENCE = (Path(__file__).parent.parent / "config.toml").read_text()
LINES = [line for line in REFERENCE.splitlines() if line and not line.startswith("#")] + [
    f'api_key = "{SECRET}"',
    f'headers = {{ X-A = "{SECRET}", X-B = "${{KEY}}" }}',
    "[[route]]",
    'model = "chat"',
    'to = [{ model = "smollm2-135m-instruct", weight = 3, engines = ["demo"] }]',
    'fallbacks = ["smollm2-135m-instruct"]',
    'policy = "session"',
]

VALUES = st.sampled_from(
    """
    0   -1   1e400   nan   true   ""   "*"   []   [[]]   {}   ["a", "a"]   1979-05-27   [["x"], 1]
    "${KEY}"   "${ODD}"   "${NOPE:-x}"   "$"   "file:/dev/zero"   "\\u0000"   "[::1]:1"   "unix:/a"
    {Host = "x"}   {a = {b = 1}}   "http://[/"   "http://a:99999999999999"   "http://${KEY}"   ["${KEY}"]
    """.strip().split("   ")
) | st.just("9" * 400)
TOKENS = st.sampled_from([*"=[]{}'\"#.$\\é\0\n", "[[", "${", "file:"])
KEYS = st.sampled_from([line.partition(" = ")[0] for line in LINES if " = " in line]) | st.text(max_size=8)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        line = lines[at]
        cut = draw(st.integers(0, len(line)))
        match draw(st.sampled_from(["value", "key", "drop", "repeat", "token", "text"])):
            case "value":
                lines[at] = f"{line.partition(' = ')[0]} = {draw(VALUES)}"
            case "key" if SECRET not in line:
                lines[at] = f"{draw(KEYS)} = {line.partition(' = ')[2]}"
            case "drop":
                lines[at] = ""
            case "repeat":
                lines.append(line)
            case "token":
                lines[at] = line[:cut] + draw(TOKENS) + line[cut:]
            case _:
                lines[at] = line[:cut] + draw(st.text(max_size=6)) + line[cut:]
    return "\n".join(lines)


def read(text: str) -> Config | ConfigError:
    try:
        return parse(text, environ=ENVIRON)
    except ConfigError as error:
        return error


def check(text: str) -> None:
    config = read(text)
    if isinstance(config, ConfigError):
        assert config.faults
        assert len(str(config).splitlines()) == len(config.faults)
        assert str(config).encode()
        assert SECRET not in str(config)
        return
    assert SECRET not in repr(config)
    again = parse(show(config), environ={})
    assert (again.server, again.stream, again.admission) == (config.server, config.stream, config.admission)
    for engine, same in zip(config.engines, again.engines, strict=True):
        assert same.headers == dict.fromkeys(engine.headers, MASK)
        assert (same.name, same.kind, same.url, same.slots) == (
            engine.name,
            engine.kind,
            engine.url,
            engine.slots,
        )
        assert (same.models, same.reclaim, same.ca) == (engine.models, engine.reclaim, engine.ca)
        assert same.reclaim_seconds == engine.reclaim_seconds


def test_the_unchanged_text_is_valid() -> None:
    assert parse("\n".join(LINES), environ=ENVIRON).engines[0].headers["X-B"] == "gpu-1"


@settings(max_examples=400, deadline=None)
@given(mutated())
def test_a_mutated_file_is_read_or_refused(text: str) -> None:
    check(text)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
@example("engine = [{}]")
@example("\r")
def test_any_text_is_read_or_refused(text: str) -> None:
    check(text)


@given(st.text(st.characters(codec="utf-8")))
@example("$${a}\x7f\U0001f600")
def test_escaping_and_quoting_are_undone_by_reading(text: str) -> None:
    assert expand(escape(text), {}) == text
    lines = ["[[engine]]", 'name = "a"', 'kind = "vllm"', 'url = "http://a"', "slots = 1"]
    config = read("\n".join([*lines, f"models = [{quote(escape(text))}]"]))
    if isinstance(config, ConfigError):
        assert [fault.key for fault in config.faults] == ['engine[0] "a".models[0]']
    else:
        assert config.engines[0].models == (text,)
