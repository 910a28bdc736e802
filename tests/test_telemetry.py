"""What is told of requests: one line each, and metrics whose labels a client can't multiply."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import UTC, datetime
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway import telemetry
from gateway.errors import Code, EngineError, GatewayError
from gateway.request import Request
from gateway.telemetry import Telemetry
from tests.fakes import (
    BODY,
    CHAT,
    END,
    EVENT,
    LAST,
    OPENING,
    FakeClient,
    Rig,
    make_request,
    make_rig,
)


def samples(metrics: bytes) -> dict[str, float]:
    """Every sample, by its line without the value."""
    lines = [line for line in metrics.decode().splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def watched(*scripts: Any, **settings: Any) -> tuple[Rig, Telemetry, list[dict[str, Any]]]:
    records: list[dict[str, Any]] = []
    told = Telemetry(sink=records.append)
    rig = make_rig(*scripts, **settings, ended=told.ended)
    told.watch(rig.gateway)
    return rig, told, records


def ended(told: Telemetry, request: Request | None = None) -> None:
    request = request or make_request()
    request.answered()
    told.ended(request)


# Records.


async def test_record_says_it_all(autojump_clock: MockClock) -> None:
    rig, told, records = watched([2.0, *OPENING, 3.0, EVENT, 5.0, LAST, END])
    client = FakeClient()
    await trio.sleep(1)
    async with told.writing():
        request = await rig.serve(client, headers=[(b"X-Request-Id", b"mine")])
        await trio.sleep(1)
    (record,) = records
    assert datetime.fromisoformat(record.pop("time")).tzinfo == UTC
    assert record == {
        "id": request.id,
        "caller_id": "mine",
        "client": "10.0.0.1",
        "tenant": None,
        "priority": None,
        "method": "POST",
        "route": CHAT,
        "path": None,
        "model": "m",
        "served_model": "m",
        "engine": "e0",
        "stream": True,
        "status": 200,
        "outcome": "completed",
        "phase": "draining",
        "code": None,
        "detail": None,
        "attempts": 1,
        "reserved_tokens": 1024,
        "queue_ms": 0.0,
        "ttft_ms": 5000.0,
        "duration_ms": 10000.0,
        "bytes": len(EVENT + LAST),
        "events": 2,
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "usage_source": "estimated",
        "teardown_ms": None,
        "reclaim_ms": None,
        "reclaimed_by": None,
    }


async def test_time_is_that_of_the_arrival(autojump_clock: MockClock) -> None:
    rig, told, records = watched([*OPENING, 100.0, LAST, END])
    async with told.writing():
        await rig.serve(FakeClient())
    arrived = datetime.fromisoformat(records[0]["time"])
    assert 99 < (datetime.now(UTC) - arrived).total_seconds() < 110


async def test_record_of_an_abort_has_its_teardown_and_queue_wait(autojump_clock: MockClock) -> None:
    rig, told, records = watched([*OPENING, EVENT])
    rig.transport.close_seconds = 0.25
    await trio.sleep(1)
    async with told.writing(), trio.open_nursery() as nursery:
        first = await rig.come(nursery)
        second = await rig.come(nursery)
        await trio.sleep(2)
        first.leave()
        await trio.sleep(0.25)
        await wait_all_tasks_blocked()
        assert second.sent == [EVENT]
        second.leave()
    assert [(r["outcome"], r["status"], r["teardown_ms"], r["queue_ms"]) for r in records] == [
        ("client_gone", 499, 250.0, 0.0),
        ("client_gone", 499, 250.0, 2250.0),
    ]


async def test_unknown_path_is_in_the_record_but_cut() -> None:
    rig, told, records = watched()
    async with told.writing():
        await rig.serve(FakeClient(), "/" + "x" * 5000)
    assert records[0]["route"] == "other"
    assert records[0]["path"] == "/" + "x" * 255


async def test_detail_is_for_the_record_and_not_for_the_client() -> None:
    error = EngineError(Code.NO_ENGINE, "The engine can't be reached.", detail="10.1.2.3:8000 refused.")
    rig, told, records = watched([error])
    client = FakeClient()
    async with told.writing():
        await rig.serve(client)
    assert (records[0]["code"], records[0]["detail"]) == ("no_engine", "10.1.2.3:8000 refused.")
    assert b"10.1.2.3" not in client.got


async def test_many_ends_at_once_are_written_together_and_late(autojump_clock: MockClock) -> None:
    """The engines are told first, the paperwork is done after."""
    records: list[dict[str, Any]] = []
    told = Telemetry(sink=records.append)
    async with told.writing():
        for _ in range(500):
            ended(told)
        await wait_all_tasks_blocked()
        assert records == []
        await trio.sleep(0.05)
        assert len(records) == 500
        ended(told)
        await trio.sleep(0.05)
        assert len(records) == 501


async def test_what_is_left_is_written_at_the_end() -> None:
    records: list[dict[str, Any]] = []
    told = Telemetry(sink=records.append)
    with trio.CancelScope() as scope:
        async with told.writing():
            ended(told)
            scope.cancel()
            await trio.lowlevel.checkpoint()
    assert len(records) == 1


# Where they go.


async def test_each_record_is_one_line_of_json_on_standard_output(
    capfd: pytest.CaptureFixture[str],
) -> None:
    told = Telemetry()
    async with told.writing():
        request = make_request('/a\n"b"\u2028\U0001f600/\x00')
        request.failed(GatewayError(Code.NOT_FOUND, "There is\nnothing."))
        told.ended(request)
        ended(told)
    lines = capfd.readouterr().out.split("\n")
    assert lines.pop() == ""
    first, second = (json.loads(line) for line in lines)
    assert (first["event"], first["status"], first["outcome"]) == ("request", 404, "rejected")
    assert first["path"] == '/a\n"b"\u2028\U0001f600/\x00'
    assert (second["outcome"], second["id"]) != (first["outcome"], first["id"])


@contextmanager
def stdout_pipe() -> Iterator[int]:
    """Standard output is a pipe; its reading end."""
    reading, writing = os.pipe()
    with open(writing, "w") as stream, redirect_stdout(stream):
        yield reading


async def test_reader_of_the_records_that_goes_away_ends_nothing() -> None:
    told = Telemetry()
    with trio.fail_after(10), stdout_pipe() as reading:
        os.close(reading)
        async with told.writing():
            for _ in range(3):
                ended(told)
            while told.dropped < 3:
                await wait_all_tasks_blocked(0.001)
            ended(told)
    assert told.dropped == 4
    assert b"gateway_records_dropped_total" not in told.metrics(), "it is a gateway's"


async def test_full_pipe_holds_up_neither_requests_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_LAST_FLUSH_SECONDS", 0.05)
    told = Telemetry()
    with trio.fail_after(10), stdout_pipe() as reading:
        async with told.writing():
            for _ in range(1000):
                ended(told)
            await trio.sleep(0.1)
            ended(told)
        # Let the thread go that is still in it.
        got = b""
        while got.count(b"\n") < 1000:
            got += await trio.to_thread.run_sync(os.read, reading, 1 << 20)
        os.close(reading)
    assert all(json.loads(line)["event"] == "request" for line in got.splitlines())


async def test_records_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_MOST_UNWRITTEN", 10)
    _, told, _ = watched()
    for _ in range(15):
        ended(told)
    assert told.dropped == 5
    assert samples(told.metrics())["gateway_records_dropped_total"] == 5


# Metrics.

NAMES = {
    "gateway_requests_total",
    "gateway_slots",
    "gateway_slots_acquired_total",
    "gateway_slots_released_total",
    "gateway_queue_depth",
    "gateway_queue_wait_seconds_bucket",
    "gateway_ttft_seconds_bucket",
    "gateway_teardown_seconds_bucket",
    "gateway_ghosts",
    "gateway_streams",
    "gateway_spooled_bytes",
}


async def test_metrics_have_the_names_that_were_promised() -> None:
    rig, told, _ = watched()
    await rig.serve(FakeClient())
    assert {name.partition("{")[0] for name in samples(told.metrics())} >= NAMES


async def test_gauges_are_read_when_they_are_asked_for(autojump_clock: MockClock) -> None:
    big = b"data: %s\n\n" % (b"x" * 5000)
    rig, told, _ = watched([*OPENING, *[big] * 5], slots=2, stream={"spool_bytes": 4096})
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            client = FakeClient()
            client.stop_reading()
            await rig.come(nursery, client)
        now = samples(told.metrics())
        assert now['gateway_slots{engine="e0",state="running"}'] == 2
        assert now['gateway_slots{engine="e0",state="free"}'] == 0
        assert now['gateway_slots{engine="e0",state="reclaiming"}'] == 0
        assert now['gateway_slots{engine="e0",state="ghost"}'] == 0
        assert now['gateway_slots_acquired_total{engine="e0"}'] == 2
        assert now['gateway_slots_released_total{engine="e0"}'] == 0
        assert (now["gateway_streams"], now["gateway_queue_depth"]) == (3, 1)
        assert now["gateway_spooled_bytes"] == 2 * len(big)
        for request in rig.gateway.requests:
            request.client_left()
    now = samples(told.metrics())
    assert now['gateway_slots{engine="e0",state="free"}'] == 2
    acquired = now['gateway_slots_acquired_total{engine="e0"}']
    assert acquired == now['gateway_slots_released_total{engine="e0"}'] >= 2
    assert (now["gateway_streams"], now["gateway_queue_depth"], now["gateway_spooled_bytes"]) == (0, 0, 0)
    totals = {name: value for name, value in now.items() if name.startswith("gateway_requests_total")}
    assert sum(totals.values()) == 3
    assert all(f'route="{CHAT}"' in name and 'outcome="client_gone"' in name for name in totals)


async def test_histograms_take_what_they_are_about(autojump_clock: MockClock) -> None:
    rig, told, _ = watched([*OPENING, 0.3, EVENT, 1.0, LAST, END], [*OPENING, EVENT])
    async with trio.open_nursery() as nursery:
        await rig.come(nursery)
        second = await rig.come(nursery)
        await trio.sleep(2)
        second.leave()
    now = samples(told.metrics())
    assert now["gateway_ttft_seconds_count"] == 2
    assert now["gateway_ttft_seconds_sum"] == pytest.approx(1.6)
    assert now["gateway_queue_wait_seconds_count"] == 2
    assert now["gateway_queue_wait_seconds_sum"] == pytest.approx(1.3)
    assert (now["gateway_teardown_seconds_count"], now["gateway_teardown_seconds_sum"]) == (1, 0)


async def test_clients_words_make_no_series() -> None:
    rig, told, _ = watched(models=("*",))
    for number in range(20):
        await rig.serve(FakeClient(b'{"model":"made-up-%d"}' % number))
        await rig.serve(FakeClient(), f"/made/up/{number}")
        await rig.serve(FakeClient(BODY), headers=[(b"X-Request-Id", b"made-up-%d" % number)])
    text = told.metrics().decode()
    assert "made" not in text
    series = [name for name in samples(told.metrics()) if name.startswith("gateway_requests_total")]
    assert len(series) == 2
    labels = {frozenset(re.findall(r"(\w+)=", name)) for name in series}
    assert labels == {frozenset({"route", "model", "engine", "outcome"})}
