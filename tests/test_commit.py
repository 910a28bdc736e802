"""The point of no return: who waits is told what comes before it, and who was stopped reaches no engine."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.commit import Commit
from gateway.engine import Call
from gateway.errors import Code, EngineError
from gateway.events import Tail
from gateway.response import Response
from gateway.spool import Spool
from tests.fakes import (
    CANCELLED,
    CONNECTED,
    END,
    LAST,
    OPENING,
    WELL,
    Body,
    FakeCall,
    FakeClient,
    FakeTransport,
    Rig,
    Script,
    broke_off,
    make_rig,
    stale,
)

BROKEN = EngineError(Code.ENGINE_FAILED, "It broke off.")


def response() -> Response:
    return Response(200, [], Spool(1000), Tail())


@pytest.mark.parametrize("tried", [False, True], ids=["first", "again"])
async def test_who_is_stopped_before_the_reader_has_begun_reaches_no_engine(
    tried: bool, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the step in which it is started: there is no scope of the reader's yet that could be cancelled."""
    rig, client = make_rig([stale()], WELL), FakeClient()
    begin, commits = Commit.__init__, list[Commit]()

    def stopping(commit: Commit) -> None:
        begin(commit)
        commits.append(commit)
        if len(commits) == 1 + tried:
            client.request.stop(CANCELLED)

    monkeypatch.setattr(Commit, "__init__", stopping)
    await rig.serve(client)
    assert (client.status, client.finished, client.aborted_at) == (503, True, None)
    assert (rig.record["outcome"], rig.record["code"]) == ("cancelled", "cancelled")
    assert len(rig.transport.calls) == tried
    rig.assert_idle()


async def test_who_waits_gets_the_response_or_the_failure(autojump_clock: MockClock) -> None:
    commit = Commit()
    commit.response = response()
    commit()
    assert await commit.reached() is commit.response
    commit = Commit()
    commit.failed(BROKEN)
    with pytest.raises(EngineError):
        await commit.reached()
    assert not commit.done


async def test_silence_commits_unless_it_is_over_before(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        commit = Commit()
        commit.response = response()
        commit.later(5, nursery)
        assert await commit.reached() is commit.response
        assert trio.current_time() == 5
    async with trio.open_nursery() as nursery:
        commit = Commit()
        commit.later(5, nursery)
        commit.failed(BROKEN)
        commit.over()
        with pytest.raises(EngineError):
            await commit.reached()
    assert trio.current_time() == 5, "nobody waits on"
    assert not commit.done


# A stream that has said all, and still is no answer: what runs on behind it is a try of its own.

QUESTION = (
    b'{"model":"m","messages":[{"role":"user","content":"x"}]}'  # Not streamed: llama.cpp's is gathered.
)
LOADING = b'data: {"error":{"code":503,"message":"Loading model"}}\n\n'
SILENCE = 3600.0


def first_says(said: bytes, then: Script) -> Rig:
    """Two engines, whichever is asked first says the one thing, the other one does the other."""
    rig, asked = make_rig(engines=2, kind="llamacpp", stream={"first_byte_seconds": 10.0}), list[Call]()

    def scripted(transport: FakeTransport) -> Callable[[Call], AbstractAsyncContextManager[FakeCall]]:
        opened = transport.open

        def open_one(call: Call) -> AbstractAsyncContextManager[FakeCall]:
            transport.scripts = [then if asked else [*OPENING, said, END]]
            asked.append(call)
            return opened(call)

        return open_one

    for transport in rig.transports:
        transport.open = scripted(transport)  # type: ignore[method-assign,assignment]
    return rig


SAID = {"error": LOADING, "error and end": LOADING + LAST, "nothing, and end": LAST}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
@pytest.mark.parametrize("how", ["stopped", "first byte", "left"])
async def test_what_one_engine_said_is_not_taken_for_what_the_next_says(
    how: str, said: bytes, autojump_clock: MockClock
) -> None:
    rig, client = first_says(said, [CONNECTED, SILENCE]), FakeClient(QUESTION)
    async with trio.open_nursery() as nursery:
        await rig.come(nursery, client)
        since = trio.current_time()
        if how == "stopped":
            client.request.stop(CANCELLED)
        elif how == "left":
            client.leave()
        with trio.fail_after(60):
            await client.ended.wait()
    # Of two failures the engine's own answer says most.
    in_vain = ("engine_timeout", 504, 10) if said is LAST else ("completed", 503, 10)
    wanted = {"stopped": ("cancelled", 503, 0), "first byte": in_vain, "left": ("client_gone", 499, 0)}
    assert (rig.record["outcome"], rig.record["status"], trio.current_time() - since) == wanted[how]
    assert client.request.reclaim is not None, "the second engine may still be at it"


async def test_a_last_event_whose_line_has_no_end_does_not_keep_its_client(autojump_clock: MockClock) -> None:
    said = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
    script: Script = [*OPENING, said, b"data: [DONE]\r", SILENCE]
    rig, client = make_rig(script, kind="llamacpp", stream={"idle_seconds": 5.0}), FakeClient(QUESTION)
    with trio.fail_after(60):
        await rig.serve(client)
    assert (client.status, client.finished, rig.record["code"]) == (504, True, "engine_timeout")


async def test_a_failure_that_is_not_told_holds_no_body(autojump_clock: MockClock) -> None:
    """Neither does one that is. They know the frames they came through, and these know the request."""
    for tries in ([stale], [broke_off], [broke_off, broke_off], [stale, stale]):
        failing: list[Script] = [[CONNECTED, make()] for make in tries]
        rig = make_rig(*failing, WELL, ended=lambda _: None)
        gc.collect()
        gc.disable()
        try:
            await rig.serve(FakeClient(Body(b'{"model":"m","stream":true}')))
            for call in rig.transport.calls:
                call.forget_call()
            await wait_all_tasks_blocked()
            assert Body.alive == 0
        finally:
            gc.enable()
