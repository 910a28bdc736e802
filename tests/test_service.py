"""A whole gateway: its start, its drain, and exact books whatever happens to many requests at once."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio._core import _run
from trio.testing import MockClock

from gateway import config, service
from gateway.server import BindError
from gateway.words import Outcome
from tests.fakes import (
    CANCELLED,
    CONNECTED,
    END,
    EVENT,
    HALF,
    LAST,
    OPENING,
    FakeClient,
    Head,
    Script,
    Step,
    broke_off,
    make_rig,
    stale,
)


async def test_drain_refuses_whoever_comes_and_lets_the_others_end(autojump_clock: MockClock) -> None:
    rig = make_rig([*OPENING, EVENT, 20.0, LAST, END], slots=2)
    async with trio.open_nursery() as nursery:
        streaming = await rig.come(nursery)
        rig.gateway.drain()
        late = await rig.come(nursery)
        assert (late.status, late.finished) == (503, True)
        assert b'"code":"draining"' in late.got
    assert streaming.finished
    assert [record["outcome"] for record in rig.records] == ["drained", "completed"]
    assert len(rig.transport.calls) == 1
    rig.assert_idle()


async def test_ending_the_process_ends_requests_with_a_record(autojump_clock: MockClock) -> None:
    rig = make_rig([*OPENING, EVENT])
    with trio.move_on_after(5):
        await rig.serve(FakeClient())
    assert rig.record["outcome"] == "engine_failed"
    rig.assert_idle()


# From start to end, on real sockets.


def on(listen: str, admin: str = "127.0.0.1:0", **server: Any) -> config.Config:
    return config.Config(
        server=config.Server(listen=(listen,), admin=admin, **server),
        engine=(config.Engine(name="e", kind="vllm", url="http://127.0.0.1:1", slots=1, models=("m",)),),
    )


def free_again(address: str) -> bool:
    host, _, port = address.removeprefix("http://").rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


async def test_idle_service_ends_as_soon_as_it_is_told_to_drain() -> None:
    async with trio.open_nursery() as nursery:
        running: service.Service = await nursery.start(service.run, on("127.0.0.1:0"))
        assert not free_again(running.listen[0])
        assert not free_again(running.admin)
        with trio.fail_after(2):
            running.drain()
            while nursery.child_tasks:
                await trio.lowlevel.checkpoint()
    assert running.gateway.draining
    assert free_again(running.listen[0])
    assert free_again(running.admin)


async def test_cancelled_service_leaves_no_socket() -> None:
    async with trio.open_nursery() as nursery:
        running: service.Service = await nursery.start(service.run, on("127.0.0.1:0"))
        nursery.cancel_scope.cancel()
    assert free_again(running.listen[0])
    assert free_again(running.admin)


async def test_busy_admin_address_leaves_the_other_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as free:
        free_port = free.getsockname()[1]
        free.close()
        with pytest.raises(BindError):
            await service.run(on(f"127.0.0.1:{free_port}", f"127.0.0.1:{other.getsockname()[1]}"))
    assert free_again(f"127.0.0.1:{free_port}")


# Random interleavings. Times are whole seconds, so that much of it falls into the same instant.

PLAYS = 2000
HORIZON_SECONDS = 8
MOST_AT_ONCE = 1 << 20


def random_script(pick: random.Random) -> Script:
    """What an engine might do, and what none should."""
    events: list[Step] = [EVENT] * pick.randrange(4)
    big = b"data: %s\n\n" % (b"x" * 6000)
    ends: list[list[Step]] = [
        [LAST, END],
        [LAST, broke_off()],
        [LAST],
        [END],
        [broke_off()],
        [HALF, broke_off()],
        [],
        [big, big, big, big, LAST, END],
    ]
    starts: list[list[Step]] = [
        [*OPENING],
        [*OPENING],
        [CONNECTED, stale()],
        [broke_off()],
        [CONNECTED, Head(500, b"application/json"), b"{}", END],
    ]
    script = [*pick.choice(starts), *events, *pick.choice(ends)]
    for _ in range(pick.randrange(4)):
        script.insert(pick.randrange(len(script) + 1), float(pick.randrange(3)))
    return script


class Play:
    """Some requests, and what happens to them when."""

    def __init__(self, seed: int) -> None:
        self.pick = pick = random.Random(seed)
        self.rig = make_rig(
            *[random_script(pick) for _ in range(6)],
            slots=pick.randrange(1, 3),
            engines=pick.randrange(1, 3),
            stream={
                "spool_bytes": 4096,
                "heartbeat_seconds": float(pick.choice([0, 0, 1])),
                "first_byte_seconds": 3.0,
                "idle_seconds": 2.0,
                "total_seconds": 6.0,
            },
            admission={"queue": pick.randrange(4), "queue_seconds": 3.0},
            ended=self.check_books,
        )
        for transport in self.rig.transports:
            transport.close_seconds = pick.choice([0.0, 0.0, 1.0])
        self.clients = [
            FakeClient(at_once=pick.choice([0, 5, MOST_AT_ONCE])) for _ in range(pick.randrange(1, 7))
        ]
        self._start = trio.current_time()
        self.left: set[FakeClient] = set()
        self.cancelled: set[FakeClient] = set()

    def check_books(self, _: Any = None) -> None:
        for engine in self.rig.gateway.engines:
            now = engine.ledger.statement()
            assert now.balanced
            assert now.running <= now.slots

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for client in self.clients:
                nursery.start_soon(self._live, client)
            if self.pick.random() < 0.3:
                nursery.start_soon(self._drain, self.pick.randrange(HORIZON_SECONDS))

    async def _live(self, client: FakeClient) -> None:
        async with trio.open_nursery() as nursery:
            await self._at(self.pick.randrange(3))
            deeds: list[Callable[[FakeClient], None]] = [self._leave, self._cancel, FakeClient.stop_reading]
            for deed in self.pick.sample(deeds, self.pick.randrange(3)):
                nursery.start_soon(self._do, deed, client, self.pick.randrange(HORIZON_SECONDS))
            nursery.start_soon(self._do, FakeClient.read_on, client, self.pick.randrange(2 * HORIZON_SECONDS))
            nursery.start_soon(self._do, self._leave, client, 4 * HORIZON_SECONDS)
            await self.rig.serve(client)
            nursery.cancel_scope.cancel()

    async def _do(self, deed: Callable[[FakeClient], None], client: FakeClient, seconds: int) -> None:
        await self._at(seconds)
        deed(client)
        self.check_books()

    async def _at(self, seconds: int) -> None:
        """Wait for an instant, and then for a place among those who do."""
        await trio.sleep_until(self._start + seconds)
        for _ in range(self.pick.randrange(8)):
            await trio.lowlevel.checkpoint()

    def _leave(self, client: FakeClient) -> None:
        self.left.add(client)
        if not hasattr(client, "request"):
            return
        client.leave()

    def _cancel(self, client: FakeClient) -> None:
        if hasattr(client, "request"):
            self.cancelled.add(client)
            client.request.stop(CANCELLED)

    async def _drain(self, seconds: int) -> None:
        await self._at(seconds)
        self.rig.gateway.drain()
        await trio.sleep(2)
        self.rig.gateway.end_streams()

    def check(self) -> None:
        """Nothing is held, each request has one record, and it tells the truth."""
        self.rig.assert_idle()
        by_request = {client.request: client for client in self.clients}
        assert len(self.rig.ended) == len(self.clients)
        assert set(self.rig.ended) == set(by_request)
        for request, client in by_request.items():
            self._check_outcome(request.outcome, client)
            calls = [call for call in self._calls() if call.request_id.endswith(request.id)]
            assert len(calls) == request.attempts <= 2 * len(self.rig.transports)
            if client.left_order is not None:
                assert all(call.order < client.left_order for call in calls), "dispatched for nobody"

    def _calls(self) -> list[Any]:
        return [call for transport in self.rig.transports for call in transport.calls]

    def _check_outcome(self, outcome: Outcome, client: FakeClient) -> None:
        if outcome is Outcome.COMPLETED:
            assert client.finished or LAST in client.got
        elif outcome is Outcome.CLIENT_GONE:
            assert client in self.left
        elif outcome is Outcome.CANCELLED:
            assert client in self.cancelled
        elif outcome is Outcome.DRAINED:
            assert self.rig.gateway.draining
        elif client.aborted_at is None and client not in self.left:
            told = b'"code":' in client.got
            assert told or client.got.endswith(HALF) or client.status == 500, client.got
        if client.finished:
            assert outcome in (Outcome.COMPLETED, Outcome.CANCELLED, Outcome.DRAINED) or client.status != 200


@pytest.mark.parametrize("part", range(10))
async def test_books_are_exact_in_every_interleaving(
    part: int, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tasks of one tick are shuffled, and a seed says how.
    monkeypatch.setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    for seed in range(part * PLAYS // 10, (part + 1) * PLAYS // 10):
        _run._r.seed(seed)
        play = Play(seed)
        try:
            with trio.fail_after(1000):
                await play.run()
            play.check()
        except BaseException as error:
            error.add_note(f"seed {seed}: {play.rig.records}")
            raise
