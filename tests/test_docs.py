"""What the documentation says is so: codes, metrics, record fields, endpoints, keys and links.

The tables of `docs/` are read, and compared with what the code says or a running gateway shows.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
from make_reference import reference

from gateway import config
from gateway.config.changes import NEEDS_RESTART
from gateway.control import control_plane
from gateway.dialect import ROUTES, Api, error_body
from gateway.errors import Code, GatewayError
from gateway.gateway import Gateway as GatewayState
from gateway.headers import Caller
from gateway.ledger import Ledger
from gateway.request import Request
from gateway.telemetry import Telemetry
from gateway.tenants import digest_of
from gateway.words import Outcome, Phase
from tests.support.gateway import running_gateway
from tests.support.http1 import http1
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import honest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
README, LIFE, ERRORS, METRICS = (
    ROOT / name for name in ("README.md", "docs/life-of-a-request.md", "docs/errors.md", "docs/metrics.md")
)

TABLES = {
    "server": config.Server,
    "stream": config.Stream,
    "admission": config.Admission,
    "health": config.Health,
    "retry": config.Retry,
    "usage": config.Usage,
    "log": config.Log,
    "traces": config.Traces,
    "engine": config.Engine,
    "route": config.Route,
    "tenant": config.Tenant,
}
KEYS = {f"{title}.{name}" for title, struct in TABLES.items() for name in struct.__struct_fields__}
OF_SPANS = {"server.address", "server.port"}
OF_LIVE_REQUESTS = {"age_seconds", "spooled_bytes"}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose_of(page: Path) -> str:
    """Without the blocks of code, in which nothing is a link or a heading."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)


def table(page: Path, *titles: str) -> list[list[str]]:
    """The rows of every table with these first columns, cell by cell."""
    rows: list[list[str]] = []
    inside = False
    for line in prose_of(page).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells[: len(titles)] == list(titles):
            inside = True
        elif not cells:
            inside = False
        elif inside and set(cells[0]) != {"-"}:
            rows.append(cells)
    assert rows, f"{page.name} has no table of {', '.join(titles)}"
    return rows


def words_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def anchor(heading: str) -> str:
    """As code hosts make them of headings."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


def test_every_code_is_documented_with_its_status_and_outcome() -> None:
    documented = {
        word: (int(status), words_in(outcome))
        for code, status, outcome, *_ in table(ERRORS, "code", "status", "outcome")
        for word in words_in(code)
    }
    assert documented == {
        code.value: (error.status, [error.outcome.value])
        for code in Code
        for error in [GatewayError(code, "")]
    }


def test_the_example_of_each_shape_is_what_is_sent() -> None:
    examples = [example.rstrip("\n").encode() for example in code_blocks(ERRORS, "json")[:3]]
    for api, path, example in zip(Api, (CHAT.path, "/v1/messages", "/api/chat"), examples, strict=True):
        message = f"No engine serves the model 'gpt-4' on {path}; GET /v1/models lists them."
        assert example == error_body(api, GatewayError(Code.MODEL_NOT_FOUND, message, param="model"))


def test_every_outcome_and_phase_is_in_the_life_of_a_request() -> None:
    told = set(words_in(prose_of(LIFE)))
    assert {*map(str, Outcome), *map(str, Phase)} <= told
    for *_, outcome, status in table(LIFE, "what happens", "what the client sees"):
        assert words_in(outcome)[0] in set(Outcome)
        assert status == "the engine's" or re.search(r"\b[45]\d\d\b", status)


async def test_metrics_and_record_fields_are_those_documented() -> None:
    engine = ScriptedEngine(honest, slots=1)
    tenant = {"name": "t", "keys": [digest_of("sk-t")]}
    async with running_gateway(engine, tenants=[tenant]) as gateway:
        async with http1(gateway.url) as client:
            await client.ask(CHAT.path, CHAT.payload(stream=True), headers={"x-api-key": "sk-t"})
        record = await gateway.record(outcome="completed")
        exported = (await gateway.admin("/metrics")).body.decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", exported, re.MULTILINE))
    labels: dict[str, set[str]] = {name: set() for name in kinds}
    for name, inside in re.findall(r"^(\w+)\{(.*)\} ", exported, re.MULTILINE):
        family = re.sub(r"_(bucket|count|sum)$", "", name)
        labels[family] |= set(re.findall(r'(\w+)="', inside)) - {"le"}
    documented = {
        words_in(name)[0]: (kind, set(words_in(label)))
        for name, kind, label, *_ in table(METRICS, "metric", "type", "labels")
    }
    assert documented == {
        name: (kind, labels[name])
        for name, kind in kinds.items()
        if not name.endswith("_created") and not name.startswith("process_")
    }
    fields = [words_in(name)[0] for name, *_ in table(METRICS, "field", "meaning")]
    assert fields == ["event", *record]
    for page in (README, METRICS):
        for example in code_blocks(page, "json"):
            assert list(json.loads(example)) == fields, page.name


async def test_examples_of_the_control_plane_have_the_fields_it_answers_with() -> None:
    shown = [json.loads(line) for line in re.findall(r"^\{.*", text_of(METRICS), re.MULTILINE)]
    live = Request(method="GET", path="/", query=b"", headers=[], caller=Caller("", "http")).view()
    requests = [request for answer in shown for request in answer.get("requests", ())]
    assert {tuple(sorted(request)) for request in requests} == {tuple(sorted(live))}
    engines = [engine for answer in shown for engine in answer.get("engines", {}).values()]
    assert {tuple(sorted(engine)) for engine in engines} == {tuple(sorted(asdict(Ledger(1).statement())))}
    assert set(live) >= OF_LIVE_REQUESTS


async def test_every_endpoint_of_the_control_plane_is_documented() -> None:
    settings = config.load(ROOT / "config.toml", {})
    app = control_plane(GatewayState(settings, [], ended=lambda _: None), Telemetry())
    served = {
        f"{method} {re.sub(r'<.*>', '{id}', rule.rule)}"
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    told = {word for request, _ in table(METRICS, "request", "answer") for word in words_in(request)}
    assert served == told


def test_the_reference_of_the_configuration_is_what_its_types_say() -> None:
    page = ROOT / "docs/configuration.md"
    assert text_of(page) == reference(), "run scripts/make_reference.py"


@every_page
def test_configuration_keys_that_are_mentioned_exist(page: Path) -> None:
    words = set(words_in(prose_of(page)))
    dotted = {word for word in words if word.partition(".")[0] in TABLES and not word.endswith(".py")}
    assert dotted - set(TABLES) - OF_SPANS <= KEYS
    bare = {word for word in words if re.fullmatch(r"[a-z_]+_(seconds|bytes)", word)}
    bare -= {word for word in bare if word.startswith(("gateway_", "process_"))} | OF_LIVE_REQUESTS
    assert bare <= {key.partition(".")[2] for key in KEYS}


def test_the_readme_has_every_route_and_a_configuration_that_is_valid() -> None:
    assert set(ROUTES) <= set(words_in(prose_of(README)))
    (example,) = code_blocks(README, "toml")
    config.parse(example, environ={})


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, section = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), f"{page.name}: {target}"
        if section:
            headings = re.findall(r"^#+ (.*)$", prose_of(to), re.MULTILINE)
            assert section in map(anchor, headings), f"{page.name}: {target}"


def test_what_needs_a_restart_is_listed() -> None:
    words = words_in(prose_of(ROOT / "docs/reload.md"))
    assert {key for key in NEEDS_RESTART if key not in words} == set()


def test_modules_that_are_mentioned_exist() -> None:
    modules = {word for word in words_in(prose_of(LIFE)) if re.fullmatch(r"[\w/]+(\.py|/)", word)}
    assert [name for name in modules if not (ROOT / "gateway" / name.removeprefix("gateway/")).exists()] == []
