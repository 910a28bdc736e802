"""However putter and getter interleave and are interrupted, the bytes pass whole, in order and bounded."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from gateway.errors import Code, GatewayError
from gateway.spool import Spool

PLAIN = settings(deadline=None, derandomize=True, max_examples=200)


@dataclass(frozen=True)
class Put:
    """After a pause, wait for room for at most so long, then push; without room try again."""

    pause: int
    patience: int
    data: bytes


@dataclass(frozen=True)
class Get:
    """After a pause, wait for bytes for at most so long."""

    pause: int
    patience: int


TIMES = st.integers(0, 3)
PATIENCE = st.sampled_from([0, 1, 2, 10_000])
PUTS = st.lists(st.builds(Put, TIMES, PATIENCE, st.binary(min_size=1, max_size=6)), min_size=4, max_size=20)
GETS = st.lists(st.builds(Get, TIMES, PATIENCE), min_size=4, max_size=20)


class Run:
    """`sends` is how many bytes of a piece the outlet can send each time; None is that it can't."""

    def __init__(self, limit: int, sends: list[int | None]) -> None:
        self.spool = Spool(limit)
        self.limit = limit
        self.got: list[bytes] = []
        self.most = 0
        self.ended = False
        self._sends = cycle(sends)
        self._waiting = False
        if sends:
            self.spool.outlet = self.send_now

    def send_now(self, data: bytes) -> bytes | None:
        """The outlet: it must not get ahead of what the spool holds, nor of a getter that is busy."""
        assert self.spool.held == 0
        assert self._waiting
        most = next(self._sends)
        if most is None:
            return None
        self.got.append(data[:most])
        return data[most:]

    async def put(self, puts: list[Put], failure: GatewayError | None) -> None:
        for put in puts:
            await trio.sleep(put.pause)
            while True:
                with trio.move_on_after(put.patience):
                    await self.spool.room()
                if not self.spool.full:
                    break
                await trio.sleep(1)
            assert self.spool.held < self.limit
            self.spool.push(put.data)
            self.most = max(self.most, self.spool.held)
        self.spool.end(failure)

    async def get(self, gets: list[Get]) -> None:
        for get in gets:
            await trio.sleep(get.pause)
            with trio.move_on_after(get.patience):
                await self.take()
        while not self.ended:
            await self.take()
            await trio.lowlevel.checkpoint()

    async def take(self) -> None:
        self._waiting = True
        try:
            data = await self.spool.get()
        finally:
            self._waiting = False
        if self.spool.rest:
            assert data == b""
            self.got.append(self.spool.take_rest())
        elif data:
            assert self.spool.held == len(data)  # The writer has them in hand until it comes again.
            assert self.spool.empty
            self.got.append(data)
        else:
            assert self.spool.ended
            assert self.spool.held == 0
            self.ended = True


NO_OUTLET: list[int | None] = []
OUTLETS = st.one_of(
    st.just(NO_OUTLET), st.lists(st.one_of(st.none(), st.integers(0, 7)), min_size=1, max_size=5)
)


@PLAIN
@given(PUTS, GETS, st.integers(1, 8), OUTLETS, st.booleans())
def test_bytes_pass_whole_in_order_and_bounded(
    puts: list[Put], gets: list[Get], limit: int, sends: list[int | None], failing: bool
) -> None:
    run = Run(limit, sends)
    failure = GatewayError(Code.ENGINE_FAILED, "broke off") if failing else None

    async def main() -> None:
        with trio.fail_after(1000):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run.put, puts, failure)
                nursery.start_soon(run.get, gets)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert b"".join(run.got) == b"".join(put.data for put in puts)
    assert run.most < limit + 6
    assert run.spool.failure is failure
