"""A Hypercorn that isn't known costs a line in the log and some time, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import structlog
import trio

from gateway.planes import ORDINARY_WAY
from gateway.server import seam, stream
from tests.support.gateway import running_gateway
from tests.support.http1 import http1, request_bytes
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Stream


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
async def test_streams_pass_and_leavers_are_seen(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "KNOWN_HYPERCORN", ("0.18.",) if known else ("another",))
    lanes = []
    let_go = stream.HttpStream._let_go

    def noted(self: Any) -> None:
        lanes.append(self.lane)
        let_go(self)

    monkeypatch.setattr(stream.HttpStream, "_let_go", noted)
    paused = Stream(tokens=3, pause_after=1, until=trio.Event())
    engine = ScriptedEngine(paused, slots=1, kind=CHAT.kind)
    engine.plan.append(Stream(tokens=3))
    ask = request_bytes(CHAT.path, CHAT.payload(stream=True))
    with structlog.testing.capture_logs() as lines:
        async with running_gateway(engine) as gateway:
            async with http1(gateway.url) as client:
                await client.send(ask)
                assert CHAT.parts is not None
                assert (await client.answer()).body == CHAT.parts.all(3)
                await client.send(ask)
                await client.head()
                await client.close()
            await engine.calls[1].closed()
            await gateway.record(outcome="client_gone")
    told = [line["reason"] for line in lines if line["event"] == ORDINARY_WAY]
    assert len(told) == (0 if known else 1)
    assert [lane is not None for lane in lanes[:2]] == [known, known]
