"""The request's nursery: whoever ends it, in whatever phase, all is let go of, and there is one record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.words import Outcome, Phase
from tests.fakes import (
    BODY,
    CANCELLED,
    CONNECTED,
    END,
    EVENT,
    LAST,
    OPENING,
    WELL,
    FakeClient,
    Rig,
    Script,
    broke_off,
    make_rig,
    stale,
)

PIECE = b"data: %s\n\n" % (b"x" * 5000)
SILENCE = 3600.0

# Where a request can be: how the engine gets it there, and whether its client reads.
PHASES: dict[str, tuple[Script, bool, Phase]] = {
    "receiving": (WELL, True, Phase.RECEIVING),
    "queued": (WELL, True, Phase.QUEUED),
    "connecting": ([SILENCE], True, Phase.CONNECTING),
    "before the head": ([CONNECTED, SILENCE], True, Phase.PREFILL),
    "before the first byte": ([*OPENING, SILENCE], True, Phase.PREFILL),
    "streaming": ([*OPENING, EVENT, SILENCE], True, Phase.STREAMING),
    "spool full": ([*OPENING, *[PIECE] * 9], False, Phase.STREAMING),
    "draining": ([*OPENING, EVENT, LAST, END], False, Phase.DRAINING),
    "let go": ([*OPENING, LAST, SILENCE], False, Phase.DRAINING),
}
BEFORE_THE_COMMIT = list(PHASES)[:5]
UNDISPATCHED = list(PHASES)[:2]


class Stage:
    """A gateway with one slot and one request in a phase; `ahead` has the slot if it is queued."""

    def __init__(self, name: str, nursery: trio.Nursery) -> None:
        script, self.reads, self.phase = PHASES[name]
        queued = name == "queued"
        scripts: list[Script] = [[*OPENING, EVENT, SILENCE], script] if queued else [script]
        self.rig = make_rig(
            *scripts,
            stream={
                "spool_bytes": 4096,
                "idle_seconds": 0.0,
                "total_seconds": 0.0,
                "first_byte_seconds": 0.0,
            },
        )
        self.ahead = FakeClient() if queued else None
        self.client = FakeClient(arrives=trio.Event() if name == "receiving" else None)
        self._nursery = nursery

    async def set(self) -> None:
        if self.ahead is not None:
            await self.rig.come(self._nursery, self.ahead)
        if not self.reads:
            self.client.stop_reading()
        await self.rig.come(self._nursery, self.client)
        assert self.client.request.phase is self.phase

    async def over(self) -> dict[str, Any]:
        """The record, once the request and whoever was ahead have ended."""
        await self.client.ended.wait()
        if self.ahead is not None:
            self.ahead.leave()
            await self.ahead.ended.wait()
        self.rig.assert_idle()
        (record,) = [one.record() for one in self.rig.ended if one is self.client.request]
        return record


@pytest.mark.parametrize("name", PHASES)
async def test_leaving_lets_go_of_everything_at_once(name: str, autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        stage = Stage(name, nursery)
        await stage.set()
        await trio.sleep(0.5)
        calls = len(stage.rig.transport.calls)
        since = trio.current_time()
        stage.client.leave()
        await stage.client.ended.wait()
        assert trio.current_time() == since
        record = await stage.over()
        assert (record["outcome"], record["status"], record["code"]) == ("client_gone", 499, None)
        assert record["phase"] == stage.phase
        assert record["teardown_ms"] == (None if name in (*UNDISPATCHED, "draining") else 0)
        assert (stage.client.sent, stage.client.finished) == ([], False) or name == "streaming"
        await trio.sleep(2 * SILENCE)
        assert len(stage.rig.transport.calls) == calls, "something was dispatched for nobody"


async def test_leaving_while_the_engine_is_let_go_of_is_no_abort(autojump_clock: MockClock) -> None:
    rig = make_rig([*OPENING, LAST, SILENCE])
    async with trio.open_nursery() as nursery:
        client = await rig.come(nursery)
        assert client.got == LAST
        client.leave()
    assert trio.current_time() == 0
    assert rig.record["outcome"] == "completed"
    rig.assert_idle()


@pytest.mark.parametrize("how", ["operator", "drain"])
@pytest.mark.parametrize("name", PHASES)
async def test_stop_is_told_where_it_can_be_and_bounded(
    name: str, how: str, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        stage = Stage(name, nursery)
        await stage.set()
        since = trio.current_time()
        if how == "operator":
            stage.client.request.stop(CANCELLED)
        else:
            stage.rig.gateway.drain()
            await wait_all_tasks_blocked()
            assert stage.client.ended.is_set() == (name in UNDISPATCHED)
            stage.rig.gateway.end_streams()
        await wait_all_tasks_blocked()
        assert stage.rig.engine.ledger.free == (1 if how == "drain" or stage.ahead is None else 0)
        record = await stage.over()
        client = stage.client
    code = "cancelled" if how == "operator" else "draining"
    assert (record["outcome"], record["status"]) == ("cancelled" if how == "operator" else "drained", 503)
    assert (record["code"], record["phase"]) == (code, stage.phase)
    if name in BEFORE_THE_COMMIT:
        assert (client.status, client.finished, client.aborted_at) == (503, True, None)
        assert client.header(b"retry-after") is not None
        assert b'"code":"%s"' % code.encode() in client.got
        assert trio.current_time() == since
    elif stage.reads:
        assert client.got.startswith(EVENT + b'data: {"error":')
        assert b'"code":"%s"' % code.encode() in client.got
        assert (client.finished, client.aborted_at) == (False, None)
        assert trio.current_time() == since
    else:
        within = 1 if how == "operator" else 0.5
        assert (client.finished, client.aborted_at) == (False, since + within)


async def test_stopped_client_gets_what_the_spool_held_and_then_the_reason(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        stage = Stage("spool full", nursery)
        await stage.set()
        stage.client.request.stop(CANCELLED)
        await trio.sleep(0.9)
        stage.client.read_on()
        record = await stage.over()
    assert stage.client.got.startswith(PIECE + b'data: {"error":')
    assert stage.client.aborted_at is None
    assert record["outcome"] == "cancelled"


# Refusals before an engine is called.


@pytest.mark.parametrize(
    ("path", "body", "code", "status"),
    [
        ("/v1/nothing", BODY, "not_found", 404),
        ("/v1/chat/completions", b"{", "invalid_json", 400),
        ("/v1/chat/completions", b'{"model":"other"}', "model_not_found", 404),
        ("/v1/chat/completions", b'{"model":"m","n":2}', "invalid_request", 400),
    ],
)
async def test_refused_requests_never_reach_an_engine(path: str, body: bytes, code: str, status: int) -> None:
    rig = make_rig()
    client = FakeClient(body)
    await rig.serve(client, path)
    assert (client.status, client.finished) == (status, True)
    assert (rig.record["outcome"], rig.record["status"], rig.record["code"]) == ("rejected", status, code)
    assert rig.transport.calls == []
    rig.assert_idle()


async def test_full_queue_and_the_end_of_patience_are_answers(autojump_clock: MockClock) -> None:
    rig = make_rig([*OPENING, EVENT, 60.0, LAST, END], admission={"queue": 1, "queue_seconds": 5.0})
    async with trio.open_nursery() as nursery:
        await rig.come(nursery)
        waiting = await rig.come(nursery)
        third = await rig.come(nursery)
        assert (third.status, waiting.status) == (429, None)
        await trio.sleep(5.1)
        assert waiting.status == 503
        assert b'"code":"queue_timeout"' in waiting.got
    assert [(record["outcome"], record["code"]) for record in rig.records] == [
        ("shed", "queue_full"),
        ("shed", "queue_timeout"),
        ("completed", None),
    ]
    rig.assert_idle()


# A kept-alive connection that was dead.


async def test_stale_connection_is_tried_once_more_on_a_fresh_one() -> None:
    rig = make_rig([CONNECTED, stale()], WELL)
    client = FakeClient()
    request = await rig.serve(client)
    assert (client.status, client.finished) == (200, True)
    first, second = rig.transport.calls
    assert (first.call.fresh, second.call.fresh) == (False, True)
    assert second.call.body == first.call.body == BODY
    assert [one.request_id for one in (first, second)] == [request.id, f"2-{request.id}"]
    assert (rig.record["attempts"], rig.record["outcome"]) == (2, "completed")
    assert rig.happened == ["e0 call 0", "e0 closed 0", "e0 call 1", "e0 closed 1"]
    rig.assert_idle()


async def test_second_stale_connection_is_an_error() -> None:
    rig = make_rig([CONNECTED, stale()])
    client = FakeClient()
    await rig.serve(client)
    assert client.status == 502
    assert (rig.record["attempts"], rig.record["outcome"]) == (2, "engine_failed")
    rig.assert_idle()


async def test_retry_keeps_its_place_before_younger_ones(autojump_clock: MockClock) -> None:
    """Its slot may go to the one that waits; then it is next, and not behind who came later."""
    rig = make_rig([CONNECTED, 1.0, stale()], [*OPENING, 10.0, LAST, END], WELL, WELL)
    async with trio.open_nursery() as nursery:
        first = await rig.come(nursery)
        waiting = await rig.come(nursery)
        await trio.sleep(2)
        youngest = await rig.come(nursery)
        assert rig.gateway.admission.waiting == 2
    assert rig.ended == [one.request for one in (waiting, first, youngest)]
    assert {record["outcome"] for record in rig.records} == {"completed"}
    rig.assert_idle()


# Two ends at once: the first in the order of the outcomes that is true decides.


def leaves(_: Rig, client: FakeClient) -> None:
    client.leave()


def operator(_: Rig, client: FakeClient) -> None:
    client.request.stop(CANCELLED)


def drained(rig: Rig, _: FakeClient) -> None:
    rig.gateway.drain()
    rig.gateway.end_streams()


Deed = Callable[[Rig, FakeClient], None]


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("first_engine", [True, False])
@pytest.mark.parametrize(
    ("engine", "deeds", "outcome"),
    [
        (broke_off(), [leaves], Outcome.CLIENT_GONE),
        (broke_off(), [operator], Outcome.CANCELLED),
        (broke_off(), [drained], Outcome.DRAINED),
        (broke_off(), [drained, operator, leaves], Outcome.CLIENT_GONE),
        (None, [operator, leaves], Outcome.CLIENT_GONE),
        (None, [leaves, drained], Outcome.CLIENT_GONE),
        (None, [operator, drained], Outcome.CANCELLED),
        (broke_off(), [operator, lambda _, client: client.request.client_stalled()], Outcome.CLIENT_STALLED),
    ],
)
async def test_of_two_ends_the_first_in_order_decides(
    engine: Exception | None, deeds: list[Deed], outcome: Outcome, first_engine: bool, committed: bool
) -> None:
    go = trio.Event()
    rig = make_rig([*OPENING, *([EVENT] if committed else []), go, *([engine] if engine else [])])
    async with trio.open_nursery() as nursery:
        client = await rig.come(nursery)
        if first_engine:
            go.set()
        for deed in deeds:
            deed(rig, client)
        go.set()
    assert rig.record["outcome"] == outcome
    assert rig.record["status"] == 499 or f'"code":"{rig.record["code"]}"'.encode() in client.got
    rig.assert_idle()


async def test_leaving_as_a_clock_runs_out_is_never_the_engine_s_fault(autojump_clock: MockClock) -> None:
    rig = make_rig([*OPENING, EVENT], stream={"idle_seconds": 5.0})
    async with trio.open_nursery() as nursery:
        client = await rig.come(nursery)
        client.stop_reading()
        await trio.sleep(5)
        client.leave()
    assert rig.record["outcome"] == "client_gone"


@pytest.mark.parametrize("ends", [[LAST], [LAST, END]])
async def test_complete_answer_is_complete_whatever_comes_with_it(ends: list[Any]) -> None:
    go = trio.Event()
    rig = make_rig([*OPENING, EVENT, go, *ends])
    async with trio.open_nursery() as nursery:
        client = await rig.come(nursery)
        go.set()
        await wait_all_tasks_blocked()
        operator(rig, client)
        leaves(rig, client)
    assert rig.record["outcome"] == "completed"
    rig.assert_idle()


@pytest.mark.parametrize("granted_first", [True, False])
async def test_leaver_to_whom_a_slot_is_granted_in_the_same_tick_passes_it_on(granted_first: bool) -> None:
    rig = make_rig([*OPENING, EVENT], WELL)
    async with trio.open_nursery() as nursery:
        first, second, third = await rig.come(nursery), await rig.come(nursery), await rig.come(nursery)
        for client in (first, second) if granted_first else (second, first):
            client.leave()
    assert (third.finished, second.status) == (True, None)
    assert len(rig.transport.calls) == 2
    assert {one.request.id: one.request.outcome for one in (first, second, third)} == {
        first.request.id: Outcome.CLIENT_GONE,
        second.request.id: Outcome.CLIENT_GONE,
        third.request.id: Outcome.COMPLETED,
    }
    rig.assert_idle()


async def test_leaver_is_not_dispatched_though_its_body_is_complete() -> None:
    arrives = trio.Event()
    rig = make_rig(WELL)
    async with trio.open_nursery() as nursery:
        client = await rig.come(nursery, FakeClient(arrives=arrives))
        arrives.set()
        client.leave()
    assert rig.transport.calls == []
    assert (rig.record["attempts"], rig.record["outcome"]) == (0, "client_gone")


async def test_leaver_is_not_retried() -> None:
    go = trio.Event()
    rig = make_rig([CONNECTED, go, stale()], WELL)
    async with trio.open_nursery() as nursery:
        client = await rig.come(nursery)
        go.set()
        client.leave()
    assert len(rig.transport.calls) == 1
    assert (rig.record["attempts"], rig.record["outcome"]) == (1, "client_gone")


# A bug of ours.


def bug() -> Exception:
    return ValueError("a bug")


@pytest.mark.parametrize(
    "script",
    [[bug()], [CONNECTED, bug()], [*OPENING, bug()], [*OPENING, EVENT, bug()], [*OPENING, LAST, bug()]],
    ids=["opening", "before the head", "before a byte", "streaming", "let go"],
)
async def test_unexpected_exception_gives_the_slot_back_and_makes_one_record(script: Script) -> None:
    rig = make_rig(script, WELL)
    with pytest.RaisesGroup(ValueError, flatten_subgroups=True):
        await rig.serve(FakeClient())
    assert rig.record["outcome"] in ("engine_failed", "completed")
    rig.assert_idle()
    again = FakeClient()
    await rig.serve(again)
    assert again.finished
    assert len(rig.records) == 2


@pytest.mark.parametrize("where", ["body", "begin", "send", "finish", "watch"])
async def test_unexpected_exception_at_the_client_s_side_does_too(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise bug()

    rig = make_rig(WELL)
    monkeypatch.setattr(FakeClient, where, fails)
    with pytest.RaisesGroup(ValueError, flatten_subgroups=True):
        await rig.serve(FakeClient(arrives=trio.Event() if where == "body" else None))
    assert len(rig.records) == 1
    rig.assert_idle()
