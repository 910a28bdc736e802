"""What the reader does behind the last event: it frees the slot, and gives the engine a second more."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.fakes import CANCELLED, DRAINED, END, EVENT, LAST, OPENING, WELL, FakeClient, broke_off, make_rig


@pytest.mark.parametrize("marker", [LAST, b"data: [DONE]\n"])
async def test_last_event_frees_the_slot_at_once(marker: bytes, autojump_clock: MockClock) -> None:
    """The engine may take a second to end the response; what it still says passes."""
    rig = make_rig([*OPENING, EVENT, marker, 0.4, b"\n: bye\n\n", 60.0, END], WELL)
    async with trio.open_nursery() as nursery:
        client = await rig.come(nursery)
        assert rig.engine.ledger.free == 1
        assert (client.got, client.finished) == (EVENT + marker, False)
    assert trio.current_time() == 1
    assert (client.got, client.finished) == (EVENT + marker + b"\n: bye\n\n", True)
    assert rig.transport.calls[0].closed_at == 1
    assert rig.record["outcome"] == "completed"
    rig.assert_idle()


async def test_end_within_that_second_ends_the_response_then(autojump_clock: MockClock) -> None:
    rig = make_rig([*OPENING, LAST, 0.3, END])
    client = FakeClient()
    await rig.serve(client)
    assert trio.current_time() == pytest.approx(0.3)
    assert client.finished


async def test_an_end_that_is_there_is_seen_at_once_however_full_the_spool(
    autojump_clock: MockClock,
) -> None:
    rig = make_rig([*OPENING, b"data: %s\n\n" % (b"x" * 40_000) + LAST, END], stream={"spool_bytes": 4096})
    client = FakeClient()
    client.stop_reading()
    async with trio.open_nursery() as nursery:
        await rig.come(nursery, client)
        assert client.request.spool is not None
        assert client.request.spool.full
        assert rig.transport.calls[0].closed_at == 0, "its connection waits for no client"
        await trio.sleep(5)
        client.read_on()
    assert client.finished
    rig.assert_idle()


async def test_error_behind_the_last_event_is_no_failure() -> None:
    rig = make_rig([*OPENING, EVENT, LAST, broke_off()])
    client = FakeClient()
    await rig.serve(client)
    assert (client.got, client.finished) == (EVENT + LAST, True)
    assert rig.record["outcome"] == "completed"
    rig.assert_idle()


@pytest.mark.parametrize("reason", [CANCELLED, DRAINED])
async def test_stop_behind_the_last_event_only_hurries(reason: Any, autojump_clock: MockClock) -> None:
    rig = make_rig([*OPENING, LAST, 60.0, END])
    async with trio.open_nursery() as nursery:
        client = await rig.come(nursery)
        await trio.sleep(0.2)
        client.request.stop(reason)
    assert trio.current_time() == pytest.approx(0.2)
    assert (client.got, client.finished) == (LAST, True)
    assert rig.record["outcome"] == "completed"


async def test_total_clock_behind_the_last_event_is_no_failure(autojump_clock: MockClock) -> None:
    rig = make_rig([*OPENING, 9.5, LAST, 60.0, END], stream={"total_seconds": 10.0})
    client = FakeClient()
    await rig.serve(client)
    assert (client.got, client.finished) == (LAST, True)
    assert rig.record["outcome"] == "completed"
