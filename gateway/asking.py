"""Asking an engine something in the gateway's own name: its models, its load, to abort."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gateway.dialect import MODELS_PATH
from gateway.engine import Call, Engine
from gateway.errors import EngineError, GatewayError
from gateway.headers import Caller, to_engine
from gateway.profiles import Ask, Load

MOST_BYTES = 4 << 20
"""What is read of an answer: pages of metrics are smaller, and so are indexes of pages."""


async def ask(
    engine: Engine, what: Ask, *, fresh: bool = False, most_bytes: int = MOST_BYTES
) -> tuple[int, bytes]:
    """Return status and body of the answer, about ``most_bytes`` of it at most.

    ``fresh`` asks over a new connection.

    Raises EngineError. It waits as long as the engine takes.
    """
    try:
        return await _ask(engine, what, fresh, most_bytes)
    except EngineError as error:
        if not error.stale:
            raise
    return await _ask(engine, what, True, most_bytes)


MODELS_SECONDS = 2.0
"""How long an engine may take to list its models."""

_MOST_LIST_BYTES = 1 << 20
_MOST_MODELS = 1000


@dataclass(frozen=True, slots=True)
class LoadAnswer:
    """What an engine says that it is doing, the page on which it does, or why there is nothing.

    ``absent``: nobody listens at its address.
    """

    load: Load | None = None
    path: str | None = None
    problem: str = ""
    absent: bool = False


async def ask_load(engine: Engine, path: str | None = None) -> LoadAnswer:
    """Ask an engine what it is doing, on ``path`` if it is known; it waits as long as the engine takes."""
    profile, problem = engine.profile, ""
    for page in (path,) if path else profile.load_paths:
        try:
            status, body = await ask(engine, Ask(page))
        except GatewayError as error:
            absent = isinstance(error, EngineError) and error.absent
            return LoadAnswer(problem=error.detail or error.message, absent=absent)
        load = profile.load(page, body) if status == 200 else None
        if load is not None:
            return LoadAnswer(load, page)
        said = "says nothing of its load" if status == 200 else f"answers {status}"
        problem = problem or f"GET {page} {said}; {profile.hint}"
    return LoadAnswer(problem=problem)


async def ask_capacity(engine: Engine) -> int | None:
    """Ask an engine how many sequences it runs at once; None if it doesn't say. Waits as long as it takes."""
    if not engine.profile.capacity_path:
        return None
    try:
        status, body = await ask(engine, Ask(engine.profile.capacity_path))
    except GatewayError:
        return None
    return engine.profile.capacity(body) if status == 200 else None


class _Listed(msgspec.Struct):
    id: str


class _List(msgspec.Struct):
    data: list[_Listed]


@dataclass(frozen=True, slots=True)
class EngineModels:
    """An engine's own list of models, or why there is none."""

    names: tuple[str, ...] = ()
    problem: str | None = None


async def ask_models(engine: Engine) -> EngineModels:
    """Ask an engine for its own list of models."""
    try:
        status, body = await ask(engine, Ask(MODELS_PATH), fresh=True, most_bytes=_MOST_LIST_BYTES)
        if status != 200:
            return EngineModels(problem=f"answers {status} to GET {MODELS_PATH}")
        listed = msgspec.json.decode(body, type=_List).data
    except GatewayError as error:
        return EngineModels(problem=error.detail or error.message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return EngineModels(problem=f"GET {MODELS_PATH} gives no list of models")
    return EngineModels(tuple(model.id for model in listed[:_MOST_MODELS]))


async def _ask(engine: Engine, what: Ask, fresh: bool, most_bytes: int) -> tuple[int, bytes]:
    headers = to_engine([], engine.policy, Caller("", "http"), request_id="gateway", length=len(what.body))
    if what.body:
        headers.append((b"Content-Type", b"application/json"))
    call = Call(
        target=engine.target(what.path.encode("ascii"), b""),
        headers=headers,
        body=what.body,
        fresh=fresh,
        connected=lambda: None,
        method=what.method.encode("ascii"),
    )
    body = b""
    async with engine.open(call) as answer:
        while (data := await answer.receive()) and len(body) < most_bytes:
            body += data
        return answer.status, body
