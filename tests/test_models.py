"""The models of all engines together: from the configuration, or asked for and remembered for a while."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.asking import ask_models
from gateway.dialect import models_route
from gateway.errors import Code, EngineError, GatewayError
from gateway.models import Models
from tests.fakes import CONNECTED, END, Head, Rig, Script, broke_off, make_request, make_rig

JSON = Head(media=b"application/json")


def lists(*names: str, status: int = 200) -> Script:
    body = json.dumps({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})
    return [CONNECTED, Head(status, b"application/json"), body[:9].encode(), body[9:].encode(), END]


async def get(models: Models, path: str = "/v1/models", *, method: str = "GET") -> Any:
    request = make_request(path, method=method)
    response = await models.answer(request)
    assert response.status == 200
    assert (b"Content-Type", b"application/json") in response.headers
    return msgspec.json.decode(await response.spool.get())


async def names(models: Models) -> list[str]:
    return [model["id"] for model in (await get(models))["data"]]


async def refusal(models: Models, path: str, *, method: str = "GET") -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        await get(models, path, method=method)
    return caught.value


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("/v1/models", True),
        ("/v1/models/a/b", True),
        ("/api/tags", True),
        ("/v1/modelss", False),
        ("/api/tags/a", False),
        ("/v1", False),
    ],
)
def test_paths_that_are_answered_here(path: str, ours: bool) -> None:
    assert (models_route(path) is not None) is ours


# From the configuration.


async def test_models_are_listed_once_each_with_their_first_engine() -> None:
    rig = make_rig(models=[("a", "b"), ("b", "c/d")])
    models = Models(rig.gateway)
    listed = await get(models)
    assert listed["object"] == "list"
    assert [(model["id"], model["owned_by"]) for model in listed["data"]] == [
        ("a", "e0"),
        ("b", "e0"),
        ("c/d", "e1"),
    ]
    assert {(model["object"], model["created"] > 1_700_000_000) for model in listed["data"]} == {
        ("model", True)
    }
    assert [call for transport in rig.transports for call in transport.calls] == []


@pytest.mark.parametrize("name", ["a", "c/d", "100%25"])
async def test_one_model_by_its_name(name: str) -> None:
    """The server has decoded the path; a percent sign in it is the name's own."""
    models = Models(make_rig(models=("a", "c/d", "100%25")).gateway)
    assert (await get(models, f"/v1/models/{name}"))["id"] == name


@pytest.mark.parametrize("name", ["x", "", "a/", "A", "100%"])
async def test_model_that_is_not_there(name: str) -> None:
    models = Models(make_rig(models=("a", "100%25")).gateway)
    error = await refusal(models, f"/v1/models/{name}")
    assert (error.code, error.param) == (Code.MODEL_NOT_FOUND, "model")


@pytest.mark.parametrize("method", ["POST", "DELETE", "HEAD"])
async def test_models_can_only_be_read(method: str) -> None:
    error = await refusal(Models(make_rig().gateway), "/v1/models", method=method)
    assert error.code is Code.NOT_FOUND
    assert "GET" in error.message


async def test_tags_as_ollama_gives_them() -> None:
    tags = await get(Models(make_rig(models=("a", "b")).gateway), "/api/tags")
    assert [(tag["name"], tag["model"]) for tag in tags["models"]] == [("a", "a"), ("b", "b")]
    assert set(tags["models"][0]) >= {"modified_at", "size", "digest", "details"}


# Asked for.


def open_ended(*scripts: Script) -> Rig:
    """Two engines: one takes any model, the other names its own."""
    rig = make_rig(*scripts, models=[("*",), ("named",)])
    rig.transports[1].scripts = []
    return rig


async def test_engine_that_takes_any_is_asked() -> None:
    rig = open_ended(lists("x", "y"))
    assert await names(Models(rig.gateway)) == ["x", "y", "named"]
    (call,) = rig.transport.calls
    assert (call.call.method, call.call.target, call.call.body) == (b"GET", b"/v1/models", b"")
    assert call.call.fresh
    rig.assert_idle()


async def test_answer_is_remembered_for_ten_seconds(autojump_clock: MockClock) -> None:
    rig = open_ended(lists("x"), lists("y"))
    models = Models(rig.gateway)
    assert await names(models) == ["x", "named"]
    await trio.sleep(9.9)
    assert await names(models) == ["x", "named"]
    await trio.sleep(0.2)
    assert await names(models) == ["y", "named"]
    assert len(rig.transport.calls) == 2


async def test_engine_that_does_not_answer_in_time_is_left_out(autojump_clock: MockClock) -> None:
    rig = open_ended([60.0, *lists("x")], lists("x"))
    models = Models(rig.gateway)
    assert await names(models) == ["named"]
    assert trio.current_time() == 2
    assert await names(models) == ["named"]
    assert trio.current_time() == 2, "it is not asked at each request"
    await trio.sleep(10)
    assert await names(models) == ["x", "named"]
    rig.assert_idle()


async def test_engines_are_asked_side_by_side(autojump_clock: MockClock) -> None:
    rig = make_rig([1.5, *lists("x")], models=[("*",), ("*",)])
    assert await names(Models(rig.gateway)) == ["x"]
    assert trio.current_time() == 1.5


async def test_one_who_leaves_meanwhile_leaves_nothing_behind() -> None:
    rig = open_ended([60.0])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(get, Models(rig.gateway))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    rig.assert_idle()


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (lists("x", status=401), "answers 401 to GET /v1/models"),
        ([CONNECTED, JSON, b"<html>", END], "GET /v1/models gives no list of models"),
        ([CONNECTED, JSON, b'{"data":[{"name":"x"}]}', END], "GET /v1/models gives no list of models"),
        ([CONNECTED, JSON, b'{"data":[{"id":"\xff"}]}', END], "GET /v1/models gives no list of models"),
        ([CONNECTED, JSON, b'{"x":' + b"[" * 100_000, END], "GET /v1/models gives no list of models"),
        ([CONNECTED, JSON, b'{"da', broke_off()], "The engine's answer broke off: reset."),
        (
            [EngineError(Code.NO_ENGINE, "The engine can't be reached.", detail="Refused by 10.0.0.9.")],
            "Refused by 10.0.0.9.",
        ),
    ],
)
async def test_why_an_engine_has_no_list(script: Script, problem: str) -> None:
    rig = open_ended(script)
    found = await ask_models(rig.engine)
    assert (found.names, found.problem) == ((), problem)
    assert await names(Models(rig.gateway)) == ["named"]


async def test_list_is_bounded() -> None:
    endless = [b" " * 100_000] * 100
    rig = open_ended([CONNECTED, JSON, *endless, END])
    assert (await ask_models(rig.engine)).problem == "GET /v1/models gives no list of models"
    assert rig.transport.calls[0].unplayed > 80
    rig.transport.scripts = [lists(*map(str, range(5000)))]
    assert len((await ask_models(rig.engine)).names) == 1000
