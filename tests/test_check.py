"""`gateway check`: the configuration as it counts, and a line for each engine."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gateway import check, config
from gateway.errors import Code, EngineError
from tests.fakes import Rig, Script, make_rig
from tests.test_models import lists

REFUSED = EngineError(
    Code.NO_ENGINE, "The engine can't be reached.", detail="The engine can't be reached: refused."
)


async def checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *scripts: Script, **settings: Any
) -> tuple[int, list[str]]:
    """The exit code, and the lines about engines; the nth script is the nth engine's."""
    models = settings.pop("models", ("m",))
    rig: Rig = make_rig(models=[models] * len(scripts), **settings)
    for transport, script in zip(rig.transports, scripts, strict=True):
        transport.scripts = [script]
    monkeypatch.setattr(check, "make_engines", lambda _: list(rig.gateway.engines))
    code = await check.run(rig.gateway.config)
    rig.assert_idle()
    return code, [line for line in capsys.readouterr().out.splitlines() if line.startswith("engine ")]


async def test_engines_that_answer_are_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = await checked(monkeypatch, capsys, lists("m", "n"), lists("m"))
    assert code == 0
    lines.sort()
    assert lines[0].startswith('engine "e0" (vllm, http://e): answers in ')
    assert lines[0].endswith(" ms, serves m, n")
    assert len(lines) == 2


async def test_one_that_does_not_makes_the_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = await checked(monkeypatch, capsys, lists("m"), [REFUSED])
    assert code == 1
    assert 'engine "e1" (vllm, http://e): The engine can\'t be reached: refused.' in lines


async def test_silent_engine_is_waited_for_five_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], autojump_clock: MockClock
) -> None:
    code, lines = await checked(monkeypatch, capsys, [60.0], [60.0])
    assert (code, trio.current_time()) == (1, 5)
    assert sorted(lines) == [f'engine "e{n}" (vllm, http://e): no answer within 5 s' for n in (0, 1)]


async def test_model_that_the_engine_does_not_list_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = await checked(monkeypatch, capsys, lists("m"), models=("m", "gone", "lost"))
    assert code == 0
    assert lines[1] == 'engine "e0" (vllm, http://e): doesn\'t list gone, lost, named in its models'


@pytest.mark.parametrize(("says", "more"), [(1, True), (2, False), (None, False)])
async def test_fewer_slots_than_it_is_to_have_are_told(
    says: int | None, more: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def capacity(_engine: Any) -> int | None:
        return says

    monkeypatch.setattr(check, "ask_capacity", capacity)
    code, lines = await checked(monkeypatch, capsys, lists("m"), slots=2)
    told = "says that it runs 1 at once, and slots = 2: what is more waits inside it"
    assert (code, f'engine "e0" (vllm, http://e): {told}' in lines) == (0, more)


async def test_engine_that_takes_any_misses_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = await checked(monkeypatch, capsys, lists(), models=("*",))
    assert (code, len(lines)) == (0, 1)
    assert lines[0].endswith("serves no models")


async def test_configuration_is_shown_as_it_counts_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        '[[engine]]\nname = "e"\nkind = "vllm"\nurl = "http://127.0.0.1:1"\n'
        'slots = 1\nmodels = ["m"]\napi_key = "sesame"\n'
    )
    monkeypatch.setattr(check, "make_engines", lambda _: [])
    assert await check.run(config.parse(text, file="t.toml", environ={})) == 0
    out = capsys.readouterr().out
    assert "queue_seconds = 60" in out
    assert config.MASK in out
    assert "sesame" not in out
