"""`[[route]]`: what stands there can be served, and what can't is refused with its place."""

from __future__ import annotations

import pytest

from gateway.config import parse, show
from tests.test_config import MINIMAL
from tests.test_config_faults import faults

_OTHER = MINIMAL.replace("gpu0", "gpu1").replace(":8000", ":8001")
ENGINES = MINIMAL.replace('["*"]', '["qwen", "llama"]') + _OTHER.replace('["*"]', '["mistral"]')


def route(*lines: str, model: str = "chat") -> str:
    return "\n".join(["[[route]]", f'model = "{model}"', *lines, ""])


@pytest.mark.parametrize(
    ("routes", "fault"),
    [
        (
            route('to = [{model = "qwn"}]'),
            'route[0] "chat".to[0].model: no engine serves "qwn"; did you mean "qwen"?',
        ),
        (
            route('to = [{model = "qwen"}, {model = "x", weight = 2}]'),
            'route[0] "chat".to[1].model: no engine serves "x"',
        ),
        (
            route('to = [{model = "qwen", engines = ["gpu-1"]}]'),
            'route[0] "chat".to[0].engines[0]: there is no engine "gpu-1"; did you mean "gpu1"?',
        ),
        (
            route('to = [{model = "qwen", engines = ["gpu0", "gpu1"]}]'),
            'route[0] "chat".to[0].engines[1]: engine "gpu1" doesn\'t serve "qwen"',
        ),
        (route(), 'route[0] "chat".model: no engine serves "chat"'),
        (
            route('fallbacks = ["mistal"]', model="qwen"),
            'route[0] "qwen".fallbacks[0]: no engine serves "mistal"; did you mean "mistral"?',
        ),
        (
            route('fallbacks = ["qwen"]', model="qwen"),
            'route[0] "qwen".fallbacks: they lead back to this route',
        ),
        (
            route(model="qwen") + route('policy = "session"', model="qwen"),
            'route[1] "qwen".model: route[0] has this model already',
        ),
        (
            route('policy = "prefx"', model="qwen"),
            'route[0] "qwen".policy: expected one of "least_loaded", "prefix", "session", got "prefx"; '
            'did you mean "prefix"?',
        ),
        (
            route('to = [{model = "qwen", weigth = 1}]'),
            'route[0] "chat".to[0].weigth: unknown key; did you mean "weight"?',
        ),
    ],
)
def test_what_cannot_be_served(routes: str, fault: str) -> None:
    assert faults(ENGINES + routes) == [fault]


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", '"1"'])
def test_weights_that_are_none(weight: str) -> None:
    (fault,) = faults(ENGINES + route(f'to = [{{model = "qwen", weight = {weight}}}]'))
    assert fault.startswith('route[0] "chat".to[0].weight: expected ')


def test_fallbacks_that_lead_back_over_others() -> None:
    both = (("qwen", "llama"), ("llama", "qwen"))
    qwen, llama = (route(f'fallbacks = ["{to}"]', model=of) for of, to in both)
    assert faults(ENGINES + qwen + llama) == [
        'route[0] "qwen".fallbacks: they lead back to this route',
        'route[1] "llama".fallbacks: they lead back to this route',
    ]


def test_fallbacks_may_be_routes_that_share_one() -> None:
    chain = route('to = [{model = "qwen"}]', 'fallbacks = ["spare", "mistral"]') + route(
        'to = [{model = "llama"}]', 'fallbacks = ["mistral"]', model="spare"
    )
    assert len(parse(ENGINES + chain).route) == 2


@pytest.mark.parametrize("models", ['["*"]', '["auto"]'])
def test_an_engine_that_may_serve_anything_is_taken_at_its_word(models: str) -> None:
    text = MINIMAL.replace('["*"]', models) + route('to = [{model = "any", engines = ["gpu0"]}]')
    assert parse(text).route[0].to[0].model == "any"


def test_what_is_shown_is_read_as_the_same() -> None:
    text = ENGINES + route(
        'to = [{model = "qwen", weight = 9}, {model = "llama", weight = 0.5, engines = ["gpu0"]}]',
        'fallbacks = ["mistral"]',
        'policy = "session"',
        'session_header = "X-Conversation"',
    )
    config = parse(text)
    assert parse(show(config)) == config
