"""The end of an HTTP/2 connection: GOAWAY at a quiet moment, however far away the client is."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gateway.server.parting import QUIET_SECONDS, READ_SECONDS, Parting
from gateway.server.pings import Pings


class Client:
    """It answers pings after a round trip, and notes when it is told GOAWAY."""

    def __init__(self, nursery: trio.Nursery, round_trip: float) -> None:
        self.highest_inbound_stream_id = 1
        self.terminated = trio.Event()
        self.holding = True
        self.asked = 0
        self.told: float | None = None
        self._nursery, self._round_trip = nursery, round_trip
        frames: Any = self
        self.pings = Pings(frames, lambda: None)
        self.parting = Parting(frames, self, self.pings)

    def ping(self, _payload: bytes) -> None:
        self.asked += 1
        self._nursery.start_soon(self._answer)

    async def _answer(self) -> None:
        await trio.sleep(self._round_trip)
        assert self.pings.answer()

    def close_connection(self) -> None:
        self.told = trio.current_time()

    def asks(self, streams: int, *, whole: int) -> None:
        for number in range(streams):
            self.highest_inbound_stream_id += 2
            assert self.parting.keeps_back(self.highest_inbound_stream_id, beside_others=True)
            if number < whole:
                self.parting.is_whole(self.highest_inbound_stream_id)


@pytest.mark.parametrize("round_trip", [0.001, 0.1, 0.25])
async def test_each_task_that_waits_has_read_before(round_trip: float, autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        client = Client(nursery, round_trip)
        client.asks(30, whole=30)
        await client.parting.say_goodbye()
        assert client.told == trio.current_time()
        assert client.asked == 1 + 31
        assert trio.current_time() > 32 * round_trip + 2 * max(QUIET_SECONDS, 2 * round_trip) - 1e-9


async def test_of_one_that_doesnt_answer_it_is_said_after_a_while(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        client = Client(nursery, 1000)
        await client.parting.say_goodbye()
        assert client.told == READ_SECONDS
        nursery.cancel_scope.cancel()


async def test_a_request_that_doesnt_arrive_isnt_waited_for_long(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        client = Client(nursery, 0.01)
        client.asks(200, whole=199)
        await client.parting.say_goodbye()
        assert client.told == pytest.approx(READ_SECONDS + 0.08)
        assert client.asked == 1, "there are no others while nothing has changed"


async def test_one_who_asks_again_behind_the_last_ping_is_waited_for(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        client = Client(nursery, 0.01)
        client.asks(3, whole=3)
        nursery.start_soon(client.parting.say_goodbye)
        await trio.sleep(0.12)
        assert client.asked == 1 + 4
        client.asks(1, whole=1)
        await trio.sleep(0.06)
        too_early = client.told
    assert (too_early, client.told is None) == (None, False)
    assert client.asked == 1 + 4 + 5


async def test_when_all_ends_it_is_said_at_once(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        client = Client(nursery, 0.3)
        nursery.start_soon(client.parting.say_goodbye)
        await trio.sleep(0.1)
        client.terminated.set()
        await trio.sleep(0.001)
        assert client.told is not None


async def test_an_answer_that_wasnt_asked_for_is_none() -> None:
    frames: Any = None
    assert not Pings(frames, lambda: None).answer()
