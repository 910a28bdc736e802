"""Where Hypercorn isn't the one that we know, bodies take its ordinary way, and a line says so."""

from __future__ import annotations

from typing import Any

import h11
import pytest
from hypercorn.protocol.h11 import H11Protocol

from gateway.server import UnknownHypercornError, check_hypercorn, seam, why_ordinary
from tests.server.apps import begin, say, serving, stream_of
from tests.support.http1 import http1, request_bytes


@pytest.mark.usefixtures("short_way")
def test_the_installed_hypercorn_is_known() -> None:
    check_hypercorn()
    assert why_ordinary() is None


@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize("version", ["0.17.3", "0.19.0", "0.180.1", "1.0.0"])
def test_another_one_takes_the_ordinary_way_and_says_which(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seam, "version", lambda _: version)
    check_hypercorn()
    assert why_ordinary() == f"Hypercorn {version} is installed, and the short way is known to fit 0.18.*"


def test_one_without_what_is_built_upon_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(H11Protocol, "_maybe_recycle")
    with pytest.raises(UnknownHypercornError, match=r"no H11Protocol\._maybe_recycle.*constraints\.txt"):
        check_hypercorn()


@pytest.mark.usefixtures("short_way")
def test_an_h11_that_counts_chunks_takes_the_ordinary_way(monkeypatch: pytest.MonkeyPatch) -> None:
    send = h11.Connection.send

    def counted(self: Any, event: Any) -> Any:
        return b"" if isinstance(event, h11.EndOfMessage) else send(self, event)

    monkeypatch.setattr(h11.Connection, "send", counted)
    assert (why_ordinary() or "").startswith("h11 ")


@pytest.mark.parametrize("short", [True, False])
async def test_a_body_arrives_whole_over_either_way(short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "KNOWN_HYPERCORN", ("0.18.",) if short else ("another",))
    lanes = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await begin(send)
        lanes.append(stream_of(scope).lane)
        await say(send, b"one", more=True)
        await say(send, b"two", more=False)

    async with serving(app) as (_, url), http1(url) as client:
        for _ in range(2):  # Keep-alive holds on both.
            await client.send(request_bytes("/", method="GET"))
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"onetwo")
    assert [lane is not None for lane in lanes] == [short, short]
