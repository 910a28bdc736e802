"""The client in ASGI's terms: its body is bounded in size, time and memory, and somebody always receives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.bodies import SMALL_BYTES, BodyBudget
from gateway.client import AsgiClient, Lane
from gateway.config import Server
from gateway.errors import Code, GatewayError
from gateway.request import Request
from gateway.words import Outcome
from tests.fakes import Body, make_request

MOST = 1_000_000
DISCONNECT = {"type": "http.disconnect"}


def piece(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


class Stream:
    """What our own server offers."""

    def __init__(self) -> None:
        self.aborted = 0
        self.wanted = 0
        self.abort: Callable[[], None] = self._abort
        self.wants_body: Callable[[], None] = self._wants_body
        self.there: list[Any] = []
        self.receive_now: Callable[[], Any] = lambda: self.there.pop(0) if self.there else None
        self.send_now: Callable[[bytes], bytes | None] = lambda _data: None
        self.settled: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        self.lane: Lane | None = None

    def _abort(self) -> None:
        self.aborted += 1

    def _wants_body(self) -> None:
        self.wanted += 1


class Visit:
    """One request: what its client sends, and what it gets."""

    def __init__(
        self,
        *,
        length: bytes | None = None,
        budget: BodyBudget | None = None,
        most: int = MOST,
        stream: Stream | None = None,
    ) -> None:
        self.request: Request = make_request()
        self.sent: list[Any] = []
        self.budget = budget or BodyBudget(10 * MOST)
        self.stream = stream
        self._inbox, self._outbox = trio.open_memory_channel[Any](inf)
        self.client = AsgiClient(
            self._outbox.receive,
            self._send,
            headers=[] if length is None else [(b"Host", b"h"), (b"Content-Length", length)],
            limits=Server(max_body_bytes=most, body_seconds=30.0),
            budget=self.budget,
            stream=stream,
        )

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    def comes(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            self._inbox.send_nowait(message)

    @property
    def unread(self) -> int:
        return self._outbox.statistics().current_buffer_used

    async def watch(self) -> None:
        """As the nursery does it."""
        try:
            with trio.CancelScope() as self.request.whole:
                if self.client.needs_watching():
                    await self.client.watch(self.request)
        finally:
            self.client.drop_body()

    async def body(self) -> bytes:
        """Ask for the body, and let the request end."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.watch)
            try:
                return await self.client.body()
            finally:
                nursery.cancel_scope.cancel()

    async def refusal(self) -> Code:
        with pytest.RaisesGroup(GatewayError, flatten_subgroups=True) as caught:
            await self.body()
        (error,) = caught.value.exceptions
        assert isinstance(error, GatewayError)
        return error.code


@pytest.mark.parametrize("length", [b"6", None, b"six", b"+6", b"9999999999999999", b""])
async def test_pieces_make_the_body(length: bytes | None) -> None:
    """A length that isn't digits is none. (The server below has refused such a head.)"""
    visit = Visit(length=length)
    visit.comes(piece(b"one"), piece(b""), piece(b"two"), piece(b"", more=False))
    assert await visit.body() == b"onetwo"
    assert visit.budget.held == 0


async def test_body_of_one_piece_is_not_copied() -> None:
    visit = Visit()
    data = bytes(1000)
    visit.comes(piece(data), piece(b"", more=False))
    assert await visit.body() is data


async def test_body_that_came_with_its_head_takes_no_turn() -> None:
    stream = Stream()
    stream.there = [piece(b"whole"), piece(b"", more=False), {"type": "http.disconnect"}]
    visit = Visit(length=b"5", stream=stream)
    with trio.testing.assert_no_checkpoints():
        assert not visit.client.needs_watching()
        assert await visit.client.body() == b"whole"
    assert visit.budget.held == 5
    assert stream.there == [{"type": "http.disconnect"}]  # That is told otherwise.


@pytest.mark.parametrize(
    ("there", "length"),
    [([piece(b"ha")], b"5"), ([], None), ([piece(b"large", more=False)], b"%d" % (MOST + 1))],
    ids=["half of it", "nothing", "too large"],
)
async def test_what_is_to_come_of_a_body_is_taken_in(there: list[Any], length: bytes | None) -> None:
    stream = Stream()
    stream.there = there
    assert Visit(length=length, stream=stream).client.needs_watching()


async def test_a_server_that_tells_of_no_leaving_is_watched() -> None:
    visit = Visit(length=b"5")
    visit.comes(piece(b"whole", more=False))
    assert visit.client.needs_watching()


async def test_first_half_is_there_and_the_second_comes() -> None:
    stream = Stream()
    stream.there = [piece(b"first ")]
    visit = Visit(length=b"12", stream=stream)
    visit.comes(piece(b"second"), piece(b"", more=False))
    assert await visit.body() == b"first second"


async def test_body_that_is_there_waits_for_room() -> None:
    budget = BodyBudget(MOST)
    assert budget.take_now(MOST, whole=MOST)
    stream = Stream()
    stream.there = [piece(b"12345"), piece(b"", more=False)]
    visit = Visit(length=b"5", stream=stream, budget=budget)
    with trio.move_on_after(1):
        await visit.client.body()
    assert len(stream.there) == 2


@pytest.mark.parametrize("length", [b"0", None])
async def test_no_body_is_an_empty_one(length: bytes | None) -> None:
    visit = Visit(length=length)
    visit.comes(piece(b"", more=False))
    assert await visit.body() == b""


# Its size.


async def test_announced_body_that_is_too_large_is_refused_unread() -> None:
    stream = Stream()
    visit = Visit(length=b"%d" % (MOST + 1), stream=stream)
    with trio.fail_after(1):
        assert await visit.refusal() is Code.BODY_TOO_LARGE
    assert visit.budget.held == 0
    assert stream.wanted == 0, "nobody is told to go on"


@pytest.mark.parametrize("length", [b"%d" % MOST, None])
async def test_body_of_just_the_limit_passes(length: bytes | None) -> None:
    visit = Visit(length=length)
    visit.comes(piece(b"x" * (MOST - 1)), piece(b"x"), piece(b"", more=False))
    assert len(await visit.body()) == MOST


async def test_body_that_grows_too_large_is_refused_then_and_drained() -> None:
    visit = Visit()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(visit.watch)
        visit.comes(piece(b"x" * MOST), piece(b"x"))
        with pytest.raises(GatewayError) as caught:
            await visit.client.body()
        assert caught.value.code is Code.BODY_TOO_LARGE
        assert visit.budget.held == 0
        visit.comes(*[piece(b"x" * MOST)] * 20)
        await wait_all_tasks_blocked()
        assert (visit.unread, visit.budget.held) == (0, 0)
        nursery.cancel_scope.cancel()


# Its time.


async def test_body_that_does_not_arrive_in_time_is_refused_and_drained(autojump_clock: MockClock) -> None:
    visit = Visit(length=b"3")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(visit.watch)
        visit.comes(piece(b"on"))
        with pytest.raises(GatewayError) as caught:
            await visit.client.body()
        assert (caught.value.code, trio.current_time()) == (Code.BODY_TIMEOUT, 30)
        assert visit.budget.held == 0
        visit.comes(piece(b"e"), piece(b"", more=False))
        await wait_all_tasks_blocked()
        assert (visit.unread, visit.budget.held) == (0, 0)
        nursery.cancel_scope.cancel()


async def test_slow_body_within_the_time_is_fine(autojump_clock: MockClock) -> None:
    visit = Visit()

    async def trickle() -> None:
        for _ in range(29):
            await trio.sleep(1)
            visit.comes(piece(b"x"))
        visit.comes(piece(b"", more=False))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trickle)
        assert await visit.body() == b"x" * 29


# Its memory.


async def test_body_holds_its_length_until_it_is_dropped() -> None:
    visit = Visit(length=b"5000")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(visit.watch)
        await wait_all_tasks_blocked()
        assert visit.budget.held == 5000, "before the first byte is taken"
        visit.comes(piece(b"x" * 5000), piece(b"", more=False))
        await visit.client.body()
        assert visit.budget.held == 5000
        visit.client.drop_body()
        visit.client.drop_body()
        assert visit.budget.held == 0
        nursery.cancel_scope.cancel()


async def test_body_without_a_length_holds_at_least_what_it_has() -> None:
    visit = Visit(budget=BodyBudget(100 * MOST))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(visit.watch)
        for size in range(0, MOST, 60_000):
            await wait_all_tasks_blocked()
            assert visit.budget.held >= max(size, SMALL_BYTES)
            visit.comes(piece(b"x" * 60_000))
        nursery.cancel_scope.cancel()
    assert visit.budget.held == 0


async def test_body_for_which_there_is_no_room_is_not_read(autojump_clock: MockClock) -> None:
    budget = BodyBudget(SMALL_BYTES)
    first = Visit(length=b"%d" % SMALL_BYTES, budget=budget)
    second = Visit(length=b"5", budget=budget)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.watch)
        await wait_all_tasks_blocked()
        nursery.start_soon(second.watch)
        second.comes(piece(b"hello"), piece(b"", more=False))
        await wait_all_tasks_blocked()
        assert second.unread == 2
        first.client.drop_body()
        assert await second.client.body() == b"hello"
        assert budget.held == 5
        nursery.cancel_scope.cancel()
    assert budget.held == 0


async def test_a_body_kept_back_by_a_lack_of_room_is_no_slow_one(autojump_clock: MockClock) -> None:
    budget = BodyBudget(SMALL_BYTES)
    await budget.take(SMALL_BYTES, whole=SMALL_BYTES)
    visit = Visit(length=b"5", budget=budget)
    visit.comes(piece(b"hello"), piece(b"", more=False))
    assert await visit.refusal() is Code.QUEUE_TIMEOUT
    assert trio.current_time() == 30
    budget.give_back(SMALL_BYTES, whole=SMALL_BYTES)
    assert budget.held == 0, "who has given up takes no room any more"


# Its leaving.


@pytest.mark.parametrize(
    "before",
    [[], [piece(b"on")], [piece(b"one", more=False)]],
    ids=["before the body", "inside it", "after it"],
)
async def test_disconnect_is_told_at_any_time(before: list[dict[str, Any]]) -> None:
    visit = Visit(length=b"3")
    visit.comes(*before)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(visit.watch)
        await wait_all_tasks_blocked()
        visit.comes(DISCONNECT)
    assert visit.request.outcome is Outcome.CLIENT_GONE
    assert visit.request.whole is not None
    assert visit.request.whole.cancel_called
    assert visit.budget.held == 0


async def test_somebody_receives_also_when_nobody_wants_the_body() -> None:
    visit = Visit()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(visit.watch)
        visit.client.drop_body()
        visit.comes(*[piece(Body(b"x")) for _ in range(50)])
        await wait_all_tasks_blocked()
        assert visit.unread == 0
        assert Body.alive <= 1, "what nobody wants isn't kept"
        visit.comes(DISCONNECT)
    assert visit.request.outcome is Outcome.CLIENT_GONE


async def test_cancelled_request_holds_nothing() -> None:
    visit = Visit(length=b"5000")
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(visit.watch)
            visit.comes(piece(b"x" * 100))
            await wait_all_tasks_blocked()
            scope.cancel()
    assert visit.budget.held == 0
