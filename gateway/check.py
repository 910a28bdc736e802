"""``gateway check``: show the effective configuration and ask every engine whether it answers."""

from __future__ import annotations

import os
import time

import msgspec
import trio

from gateway import config
from gateway.asking import EngineModels, LoadAnswer, ask, ask_capacity, ask_load, ask_models
from gateway.engine import Engine
from gateway.errors import GatewayError
from gateway.profiles import Ask
from gateway.resources import check_handover, make_engines, make_tls, make_tracing
from gateway.transport import make_engine
from gateway.usagefile import UsageFileError, examine

_ASK_SECONDS = 5.0


async def run(settings: config.Config) -> int:
    """Print the configuration and a line for each engine.

    Returns the exit code: 0 if every engine answered, 1 if one did not. Raises ConfigError for files
    that can't be used.
    """
    if settings.usage.path is not None:
        try:
            examine(settings.usage.path)
        except UsageFileError as error:
            fault = config.Fault("", "usage.path", f"the file {error}")
            raise config.ConfigError((fault,)) from None
    make_tls(settings)
    make_tracing(settings)
    check_handover(settings)
    engines = make_engines(settings)
    print(config.show(settings))
    answers: dict[str, bool] = {}
    said: dict[str, list[str]] = {engine.name: [] for engine in engines}
    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(_ask, engine, answers, said[engine.name])
    for engine in engines:
        await engine.transport.aclose()
        for line in said[engine.name]:
            print(f'engine "{engine.name}" ({engine.settings.kind}, {engine.settings.url}): {line}')
    if settings.tenant:
        print(f"Tenants: {', '.join(tenant.name for tenant in settings.tenant)}; every request needs a key.")
    else:
        print("No tenants are configured: whoever reaches server.listen may use every model.")
    return 0 if all(answers.values()) else 1


async def diff(settings: config.Config, file: str) -> int:
    """Ask the gateway that runs at ``server.admin`` what a reload would change, and print that.

    Returns the exit code: 0, or 1 if it doesn't answer, wouldn't take the configuration, or was started
    with another ``file``: it reads its own.
    """
    admin = settings.server.admin
    if admin.startswith("fd:"):
        print(f"server.admin is {admin}: that address can't be asked")
        return 1
    status, body = await _dry_run(settings)
    if not status:
        print(f"No gateway answers at {admin} (server.admin of {file}): {body.decode(errors='replace')}")
        return 1
    if status == 401:
        print(f"The gateway at {admin} has another server.admin_token: reload it by SIGHUP.")
        return 1
    if status not in (200, 422):
        print(f"The gateway at {admin} answers {status}: {body.decode(errors='replace').strip()}")
        return 1
    said = msgspec.json.decode(body)
    theirs = said.get("file", "")
    if theirs and not _same_file(theirs, file):
        print(f"The gateway at {admin} was started with {theirs}: that is what it reads, not {file}.")
        return 1
    for line in said["changes"] if status == 200 else said["faults"]:
        print(line)
    if status == 200 and not said["changes"]:
        print("no changes")
    return 0 if status == 200 else 1


def _same_file(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


async def _dry_run(settings: config.Config) -> tuple[int, bytes]:
    """Return the status and the body of the gateway's answer; 0 and why, if it doesn't answer."""
    admin = settings.server.admin
    gateway = config.Engine(
        name="gateway",
        kind="openai",
        url=admin if admin.startswith("unix:") else f"http://{admin}",
        slots=1,
        models=("*",),
        api_key=settings.server.admin_token,
    )
    running = make_engine(gateway, connect_seconds=_ASK_SECONDS)
    status, body = 0, b"no answer in time"
    try:
        with trio.move_on_after(_ASK_SECONDS):
            status, body = await ask(running, Ask("/admin/reload?dry_run=1", "POST"))
    except GatewayError as error:
        body = (error.detail or error.message).removeprefix("The engine can't be reached: ").encode()
    await running.transport.aclose()
    return status, body


async def _ask(engine: Engine, answers: dict[str, bool], said: list[str]) -> None:
    started = time.monotonic()
    found = EngineModels(problem=f"no answer within {_ASK_SECONDS:g} s")
    with trio.move_on_after(_ASK_SECONDS):
        found = await ask_models(engine)
    took = (time.monotonic() - started) * 1000
    answers[engine.name] = found.problem is None
    if found.problem is not None:
        said.append(found.problem)
        return
    said.append(f"answers in {took:.0f} ms, serves {', '.join(found.names) or 'no models'}")
    if engine.settings.reclaim != "off":
        said.append(await _whether_it_can_be_asked(engine))
    capacity = None
    with trio.move_on_after(_ASK_SECONDS):
        capacity = await ask_capacity(engine)
    if capacity is not None and capacity < engine.settings.slots:
        said.append(
            f"says that it runs {capacity} at once, and slots = {engine.settings.slots}: what is more waits"
            " inside it"
        )
    missing = (
        []
        if engine.serves_any or engine.learns
        else [m for m in engine.settings.models if m not in found.names]
    )
    if missing:
        said.append(f"doesn't list {', '.join(missing)}, named in its models")


async def _whether_it_can_be_asked(engine: Engine) -> str:
    """Say what the engine is doing, or what it costs that it doesn't say."""
    seconds = engine.settings.reclaim_seconds
    kept = f"keeps its slot for {seconds:g} s" if seconds else "gives its slot back at once"
    if engine.profile.looks is None:
        return f"can't be asked whether it has stopped; a request cut short {kept}"
    said = LoadAnswer(problem=f"no answer within {_ASK_SECONDS:g} s")
    with trio.move_on_after(_ASK_SECONDS):
        said = await ask_load(engine)
    if said.load is None:
        return f"doesn't say whether it has stopped ({said.problem}); a request cut short {kept}"
    if not said.load.busy:
        return "says that it is idle"
    return (
        f"says that it runs {said.load.running} and lets {said.load.waiting} wait; unless this gateway is"
        " running, that is somebody else's load"
    )
