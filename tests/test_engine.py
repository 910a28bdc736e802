"""One engine: what it serves, what its calls look like, what it never gets."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest

from gateway import config
from gateway.engine import Answer, Call, Engine
from gateway.profiles import PROFILES


class NoWay:
    """A transport that notes the calls and connects none."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def open(self, call: Call) -> AbstractAsyncContextManager[Answer]:
        self.calls.append(call)
        raise ConnectionError

    def connect_within(self, seconds: float) -> None: ...

    async def aclose(self) -> None:
        """Nothing is idle here."""


def make(
    kind: config.Kind = "vllm", *, prefix: bytes = b"", models: tuple[str, ...] = ("m",), **more: object
) -> Engine:
    settings = config.Engine(name="gpu0", kind=kind, url="http://gpu0", slots=4, models=models, **more)  # type: ignore[arg-type]
    return Engine(settings, NoWay(), host=b"gpu0:8000", prefix=prefix)


def test_an_engine_as_it_is_configured() -> None:
    engine = make(api_key="sk-1", headers={"X-Team": "a", "x-other": "b"})
    assert engine.name == "gpu0"
    assert engine.ledger.slots == 4
    assert engine.paths == PROFILES["vllm"].paths
    assert engine.policy.host == b"gpu0:8000"
    assert engine.policy.api_key == "sk-1"
    assert engine.policy.fixed == ((b"X-Team", b"a"), (b"x-other", b"b"))
    assert repr(engine) == "<Engine gpu0 <Ledger 0 running, 4 free of 4>>"
    assert "sk-1" not in repr(engine)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp", "ollama", "openai"])
def test_only_llamacpp_never_gets_what_makes_it_go_on_for_nobody(kind: config.Kind) -> None:
    expected = {b"x-conversation-id"} if kind == "llamacpp" else set()
    assert make(kind).policy.withheld == expected


def test_it_serves_the_models_it_names() -> None:
    engine = make(models=("a", "b"))
    assert [engine.serves(model) for model in ("a", "b", "A", "", "*", None)] == [True, True] + [False] * 4
    assert not engine.serves_any
    assert make(models=("*",)).serves_any
    assert all(make(models=("*",)).serves(model) for model in ("a", "", None))


@pytest.mark.parametrize(
    ("prefix", "query", "target"),
    [
        (b"", b"", b"/v1/completions"),
        (b"", b"a=1&b=%20", b"/v1/completions?a=1&b=%20"),
        (b"/llm", b"", b"/llm/v1/completions"),
        (b"/llm", b"a", b"/llm/v1/completions?a"),
    ],
)
def test_the_target_is_the_path_behind_the_prefix(prefix: bytes, query: bytes, target: bytes) -> None:
    assert make(prefix=prefix).target(b"/v1/completions", query) == target


def test_a_call_goes_to_its_transport() -> None:
    engine = make()
    call = Call(target=b"/", headers=[], body=b"", fresh=True, connected=lambda: None)
    with pytest.raises(ConnectionError):
        engine.open(call)
    assert isinstance(engine.transport, NoWay)
    assert engine.transport.calls == [call]
    assert call.method == b"POST"
