"""The point of no return: who waits is told what comes before it, and who was stopped reaches no engine."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from gateway.commit import Commit
from gateway.errors import Code, EngineError
from gateway.events import Tail
from gateway.response import Response
from gateway.spool import Spool
from tests.fakes import CANCELLED, WELL, FakeClient, make_rig, stale

BROKEN = EngineError(Code.ENGINE_FAILED, "It broke off.")


def response() -> Response:
    return Response(200, [], Spool(1000), Tail())


@pytest.mark.parametrize("tried", [False, True], ids=["first", "again"])
async def test_who_is_stopped_before_the_reader_has_begun_reaches_no_engine(
    tried: bool, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the step in which it is started: there is no scope of the reader's yet that could be cancelled."""
    rig, client = make_rig([stale()], WELL), FakeClient()
    begin, commits = Commit.__init__, list[Commit]()

    def stopping(commit: Commit) -> None:
        begin(commit)
        commits.append(commit)
        if len(commits) == 1 + tried:
            client.request.stop(CANCELLED)

    monkeypatch.setattr(Commit, "__init__", stopping)
    await rig.serve(client)
    assert (client.status, client.finished, client.aborted_at) == (503, True, None)
    assert (rig.record["outcome"], rig.record["code"]) == ("cancelled", "cancelled")
    assert len(rig.transport.calls) == tried
    rig.assert_idle()


async def test_who_waits_gets_the_response_or_the_failure(autojump_clock: MockClock) -> None:
    commit = Commit()
    commit.response = response()
    commit()
    assert await commit.reached() is commit.response
    commit = Commit()
    commit.failed(BROKEN)
    with pytest.raises(EngineError):
        await commit.reached()
    assert not commit.done


async def test_silence_commits_unless_it_is_over_before(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        commit = Commit()
        commit.response = response()
        commit.later(5, nursery)
        assert await commit.reached() is commit.response
        assert trio.current_time() == 5
    async with trio.open_nursery() as nursery:
        commit = Commit()
        commit.later(5, nursery)
        commit.failed(BROKEN)
        commit.over()
        with pytest.raises(EngineError):
            await commit.reached()
    assert trio.current_time() == 5, "nobody waits on"
    assert not commit.done
