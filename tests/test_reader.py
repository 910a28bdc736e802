"""The reader: the engine's side of a request, from the slot to how the answer ended."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.errors import Code, EngineError
from gateway.words import Outcome, Phase
from tests.fakes import (
    BODY,
    CHAT,
    CONNECTED,
    END,
    EVENT,
    HALF,
    LAST,
    OPENING,
    WELL,
    Body,
    FakeClient,
    Head,
    Script,
    broke_off,
    make_rig,
    stale,
)

JSON = Head(media=b"application/json")
NO_ENGINE = EngineError(Code.NO_ENGINE, "The engine can't be reached: refused.")
HEARTBEAT = b": heartbeat\n\n"


async def test_answer_passes_and_the_call_says_what_was_asked() -> None:
    rig = make_rig(WELL)
    client = FakeClient()
    request = await rig.serve(client, headers=[(b"Content-Type", b"application/json"), (b"X-Mine", b"1")])
    assert (client.status, client.got, client.finished) == (200, EVENT + EVENT + LAST, True)
    assert client.header(b"cache-control") == b"no-cache"
    assert client.header(b"x-request-id") == request.id.encode()
    (call,) = rig.transport.calls
    assert (call.call.method, call.call.target, call.call.body) == (b"POST", CHAT.encode(), BODY)
    assert (b"X-Mine", b"1") in call.call.headers
    assert (b"Content-Length", b"%d" % len(BODY)) in call.call.headers
    assert not call.call.fresh
    assert client.dropped_body
    assert rig.record["outcome"] == "completed"
    rig.assert_idle()


# The commit point: the first body bytes.


@pytest.mark.parametrize(
    ("script", "status", "code", "outcome"),
    [
        ([NO_ENGINE], 503, "no_engine", Outcome.SHED),
        ([CONNECTED, broke_off()], 502, "engine_failed", Outcome.ENGINE_FAILED),
        ([*OPENING, broke_off()], 502, "engine_failed", Outcome.ENGINE_FAILED),
    ],
    ids=["unreachable", "before the head", "between head and body"],
)
async def test_failure_before_the_first_byte_is_an_answer(
    script: Script, status: int, code: str, outcome: Outcome
) -> None:
    rig = make_rig(script)
    client = FakeClient()
    await rig.serve(client)
    assert (client.status, client.finished) == (status, True)
    assert b'"code":"%s"' % code.encode() in client.got
    assert client.header(b"content-type") == b"application/json"
    assert (client.header(b"retry-after") is not None) == (status == 503)
    assert (rig.record["outcome"], rig.record["status"], rig.record["code"]) == (outcome, status, code)
    assert len(rig.transport.calls) == 1
    rig.assert_idle()


async def test_head_is_held_back_until_the_first_byte(autojump_clock: MockClock) -> None:
    rig = make_rig([*OPENING, 5.0, EVENT, 5.0, LAST, END])
    client = FakeClient()
    async with trio.open_nursery() as nursery:
        await rig.come(nursery, client)
        await trio.sleep(4.9)
        before = client.status
        await trio.sleep(0.2)
        assert (before, client.status, client.sent) == (None, 200, [EVENT])
    assert client.sent_at == [5, 10]
    assert rig.record["ttft_ms"] == 5000


async def test_clean_end_of_an_empty_body_commits_too() -> None:
    rig = make_rig([CONNECTED, Head(204, b""), END])
    client = FakeClient()
    await rig.serve(client)
    assert (client.status, client.got, client.finished) == (204, b"", True)
    assert rig.record["outcome"] == "completed"


async def test_error_answer_of_the_engine_passes_as_it_is() -> None:
    head = Head(429, b"application/json", ((b"Retry-After", b"7"),))
    rig = make_rig([CONNECTED, head, b'{"detail":"busy"}', END])
    client = FakeClient()
    await rig.serve(client)
    assert (client.status, client.got, client.finished) == (429, b'{"detail":"busy"}', True)
    assert client.header(b"retry-after") == b"7"
    assert (rig.record["outcome"], rig.record["status"], rig.record["code"]) == ("completed", 429, None)


@pytest.mark.parametrize("failure", [broke_off(), END], ids=["broken off", "no marker"])
async def test_failure_after_it_is_told_in_band_and_not_retried(failure: Any) -> None:
    rig = make_rig([*OPENING, EVENT, failure])
    client = FakeClient()
    await rig.serve(client)
    assert client.status == 200
    assert client.got.startswith(EVENT + b'data: {"error":')
    assert b'"code":"engine_failed"' in client.got
    assert not client.finished
    assert (rig.record["outcome"], rig.record["status"]) == ("engine_failed", 502)
    assert rig.record["phase"] == "streaming"
    assert len(rig.transport.calls) == 1
    rig.assert_idle()


async def test_failure_inside_an_event_only_cuts() -> None:
    rig = make_rig([*OPENING, EVENT, HALF, broke_off()])
    client = FakeClient()
    await rig.serve(client)
    assert (client.got, client.finished) == (EVENT + HALF, False)


async def test_stale_error_after_the_commit_is_not_retried() -> None:
    rig = make_rig([*OPENING, EVENT, stale()])
    await rig.serve(FakeClient())
    assert len(rig.transport.calls) == 1
    assert rig.record["outcome"] == "engine_failed"


# The slot: given back when the engine has ended, and only then.


async def test_slot_is_free_while_a_slow_client_still_reads(autojump_clock: MockClock) -> None:
    rig = make_rig(WELL)
    slow = FakeClient()
    slow.stop_reading()
    async with trio.open_nursery() as nursery:
        await rig.come(nursery, slow)
        assert rig.engine.ledger.free == 1
        assert slow.request.phase is Phase.DRAINING
        other = await rig.come(nursery)
        assert other.finished
        await trio.sleep(100)
        slow.read_on()
    assert slow.got == EVENT + EVENT + LAST
    assert slow.finished
    rig.assert_idle()


async def test_upstream_is_closed_before_the_slot_is_granted_on(autojump_clock: MockClock) -> None:
    rig = make_rig([*OPENING, EVENT], WELL)
    rig.transport.close_seconds = 0.5
    async with trio.open_nursery() as nursery:
        first = await rig.come(nursery)
        await rig.come(nursery)
        first.leave()
    assert rig.happened[:4] == ["e0 call 0", "client left", "e0 closed 0", "e0 call 1"]
    assert rig.transport.peak == 1
    rig.assert_idle()


async def test_body_without_events_ends_with_its_framing() -> None:
    rig = make_rig([CONNECTED, JSON, b'{"choices":', b"[]}", END])
    client = FakeClient(b'{"model":"m"}')
    await rig.serve(client)
    assert (client.got, client.finished) == (b'{"choices":[]}', True)


async def test_body_without_events_that_breaks_off_is_cut() -> None:
    rig = make_rig([CONNECTED, JSON, b'{"choices":', broke_off()])
    client = FakeClient(b'{"model":"m"}')
    await rig.serve(client)
    assert (client.got, client.finished) == (b'{"choices":', False)
    assert rig.record["outcome"] == "engine_failed"


async def test_spool_is_bounded_and_the_engine_feels_it() -> None:
    piece = b"data: %s\n\n" % (b"x" * 2000)
    rig = make_rig([*OPENING, *[piece] * 50, LAST, END], stream={"spool_bytes": 4096})
    client = FakeClient()
    client.stop_reading()
    async with trio.open_nursery() as nursery:
        await rig.come(nursery, client)
        spool = client.request.spool
        assert spool is not None
        assert spool.limit <= spool.held < spool.limit + len(piece)
        assert rig.engine.ledger.free == 0
        client.read_on()
    assert client.got == piece * 50 + LAST


async def test_body_is_forgotten_at_the_commit() -> None:
    commit = trio.Event()
    rig = make_rig([*OPENING, commit, EVENT])
    async with trio.open_nursery() as nursery:
        client = await rig.come(nursery, FakeClient(Body(BODY)))
        rig.transport.calls[0].forget_call()
        await wait_all_tasks_blocked()
        assert Body.alive == 1, "a retry would need it"
        commit.set()
        await wait_all_tasks_blocked()
        assert Body.alive == 0
        client.leave()


# The engine's clocks.

CLOCKS = {"first_byte_seconds": 10.0, "idle_seconds": 3.0, "total_seconds": 60.0}


@pytest.mark.parametrize("script", [[CONNECTED], [*OPENING]], ids=["no head", "no byte"])
async def test_silence_before_the_first_byte_is_a_504(script: Script, autojump_clock: MockClock) -> None:
    rig = make_rig([2.0, *script], stream=CLOCKS)
    client = FakeClient()
    await rig.serve(client)
    assert trio.current_time() == 12, "it starts when there is a connection"
    assert client.status == 504
    assert b"first_byte_seconds (10)" in client.got
    assert (rig.record["outcome"], rig.record["phase"]) == ("engine_timeout", "prefill")
    rig.assert_idle()


async def test_silence_between_reads_is_told_in_band(autojump_clock: MockClock) -> None:
    rig = make_rig([*OPENING, 9.0, EVENT, 2.9, EVENT, 3.1, LAST, END], stream=CLOCKS)
    client = FakeClient()
    await rig.serve(client)
    assert trio.current_time() == pytest.approx(14.9, abs=3 / 64), "idle_seconds, and a 64th of it at most"
    assert client.sent[:2] == [EVENT, EVENT]
    assert b"silent for idle_seconds (3)" in client.sent[2]
    assert b'"code":"engine_timeout"' in client.sent[2]
    assert (rig.record["outcome"], rig.record["status"]) == ("engine_timeout", 504)
    rig.assert_idle()


@pytest.mark.parametrize("committed", [True, False])
async def test_total_clock_runs_through_everything(committed: bool, autojump_clock: MockClock) -> None:
    lively: Script = [2.0, EVENT] * 40
    script: Script = [*OPENING, *lively] if committed else [CONNECTED, 70.0]
    rig = make_rig(script, stream={**CLOCKS, "first_byte_seconds": 0.0})
    client = FakeClient()
    await rig.serve(client)
    assert trio.current_time() == 60
    assert client.status == (200 if committed else 504)
    assert b"total_seconds (60)" in client.got
    assert rig.record["outcome"] == "engine_timeout"
    rig.assert_idle()


async def test_idle_clock_stands_still_while_the_spool_is_full(autojump_clock: MockClock) -> None:
    piece = b"data: %s\n\n" % (b"x" * 5000)
    rig = make_rig(
        [*OPENING, piece, piece, 2.0, LAST, END], stream={**CLOCKS, "spool_bytes": 4096, "total_seconds": 0.0}
    )
    client = FakeClient()
    client.stop_reading()
    async with trio.open_nursery() as nursery:
        await rig.come(nursery, client)
        await trio.sleep(600)
        client.read_on()
    assert client.finished
    assert rig.record["outcome"] == "completed"


async def test_ten_minutes_of_prefill_survive_without_that_clock(autojump_clock: MockClock) -> None:
    rig = make_rig(
        [*OPENING, 600.0, EVENT, LAST, END],
        stream={**CLOCKS, "first_byte_seconds": 0.0} | {"total_seconds": 0.0},
    )
    client = FakeClient()
    await rig.serve(client)
    assert (client.got, client.sent_at[0]) == (EVENT + LAST, 600)


# Heartbeats.


async def test_first_heartbeat_commits_and_errors_are_in_band_from_then_on(autojump_clock: MockClock) -> None:
    rig = make_rig([2.0, *OPENING, 25.0, broke_off()], stream={"heartbeat_seconds": 10.0})
    client = FakeClient()
    await rig.serve(client)
    assert (client.status, client.sent[:2], client.sent_at[:2]) == (200, [HEARTBEAT] * 2, [12, 22])
    assert b'data: {"error":' in client.sent[2]
    assert (client.finished, rig.record["outcome"]) == (False, "engine_failed")
    assert rig.record["ttft_ms"] is None, "a heartbeat is no answer"


async def test_no_retry_once_a_heartbeat_has_gone_out(autojump_clock: MockClock) -> None:
    rig = make_rig([*OPENING, 25.0, stale()], stream={"heartbeat_seconds": 10.0})
    await rig.serve(FakeClient())
    assert len(rig.transport.calls) == 1


@pytest.mark.parametrize(
    ("script", "status"),
    [([CONNECTED, 25.0, broke_off()], 502), ([CONNECTED, Head(500), 25.0, broke_off()], 502)],
    ids=["no head yet", "an error's head"],
)
async def test_heartbeat_needs_the_head_of_a_stream(
    script: Script, status: int, autojump_clock: MockClock
) -> None:
    rig = make_rig(script, stream={"heartbeat_seconds": 10.0})
    client = FakeClient()
    await rig.serve(client)
    assert (client.status, client.finished, len(client.sent)) == (status, True, 1)


async def test_no_heartbeat_in_the_queue(autojump_clock: MockClock) -> None:
    rig = make_rig([*OPENING, EVENT, 50.0, LAST, END], WELL, stream={"heartbeat_seconds": 10.0})
    async with trio.open_nursery() as nursery:
        await rig.come(nursery)
        waiting = await rig.come(nursery)
        await trio.sleep(49)
        assert waiting.status is None
    assert (waiting.got, waiting.finished) == (EVENT + EVENT + LAST, True)


async def test_no_heartbeats_by_default(autojump_clock: MockClock) -> None:
    rig = make_rig([*OPENING, 100.0, EVENT, 100.0, LAST, END])
    client = FakeClient()
    await rig.serve(client)
    assert client.sent == [EVENT, LAST]
