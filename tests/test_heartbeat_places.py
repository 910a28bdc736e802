"""Where a heartbeat may stand: between events, as the client has them."""

from __future__ import annotations

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.fakes import EVENT, LAST
from tests.test_writer import Answer


async def test_no_heartbeat_stands_inside_an_event(autojump_clock: MockClock) -> None:
    """Also not where the rest of an event comes at the very moment when the heartbeat is due."""
    for _ in range(30):
        answer = Answer()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer.write, 5)
            answer.put(EVENT[:7])
            await wait_all_tasks_blocked()
            due = trio.current_time() + 5
            await trio.sleep_until(due)
            answer.put(EVENT[7:])
            await trio.sleep(1)
            answer.put(LAST)
            answer.spool.end()
        assert b"".join(answer.client.sent) == EVENT + LAST
