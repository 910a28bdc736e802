"""The reader: the engine's side of one request.

It holds the slot, and it alone: from before the engine is called until the engine
has ended or the request has. The blocks are nested in the order in which things
must be let go: the engine's response inside the slot, so that the next request
never meets the last one's connection.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import trio

from gateway.answers import GATHERED_ERRORS, gathered, plain, refused
from gateway.attempt import Attempt
from gateway.clocks import EngineClock
from gateway.commit import Commit
from gateway.dialect import tail_for
from gateway.engine import Answer
from gateway.errors import Code, EngineError, GatewayError, RefusedError
from gateway.events import NdjsonTail, SseTail, Tail, error_in, may_begin_error
from gateway.headers import list_size, to_client
from gateway.intake import Intake
from gateway.passing import Passing
from gateway.response import Response
from gateway.spool import PIECE_BYTES, Spool
from gateway.words import Phase
from gateway.work import Work

_BEYOND_BYTES = PIECE_BYTES + 16 * 1024
"""What a response has in memory beyond its spool's limit: one piece, and what the heap loses between
pieces."""

MOST_HEAD_BYTES = 32 * 1024
"""An engine's head as HTTP/2 counts it. HTTP/2 clients end the connection, with all that runs
on it, when they are sent more than they announced; the libraries' defaults begin at 64 KiB."""

RETRIED = frozenset({429, 502, 503, 504})
"""Answers that another engine may not give. A 500 may be the request's own doing."""

_FIRST_EVENT_BYTES = 4096
"""Of an error that much is waited for: they are short."""

LET_GO_SECONDS = 1.0
"""How long an engine may take to end its response after it has said that was all."""


async def read(work: Work, fresh: bool, commit: Commit) -> None:
    """Hold a slot, call the engine, fill the spool: the reader.

    Commits with the response once its first body bytes are there (or its clean end). What fails
    before that, the commit is told; after it, how the answer ended goes into the spool.
    """
    request, settings = work.request, work.gateway.config.stream
    work.at, work.goes_on, request.tail = None, False, Tail()  # Nothing has been said in this try.
    spool = Spool(max(settings.spool_bytes - _BEYOND_BYTES, min(settings.spool_bytes, _BEYOND_BYTES)))
    clock = EngineClock(settings)
    request.reading = clock.scope
    try:
        request.go_on()
        with clock.scope:
            async with AsyncExitStack() as afterwards:
                async with work.gateway.admission.slot(work.ticket, waiting=request.queued) as (engine, slot):
                    work.at = engine, slot
                    # Who has left, or was stopped, in the same tick as it got here isn't dispatched any more.
                    await trio.lowlevel.checkpoint_if_cancelled()
                    with work.attempt() as attempt:
                        clock.called(request.dispatched_at)
                        async with AsyncExitStack() as call:
                            answer = await call.enter_async_context(attempt.open(work.body, fresh, clock))
                            open_still = await _take_in(work, attempt, answer, spool, clock, commit)
                            # The engine has ended. Its connection may outlive the slot for a moment.
                            afterwards.push_async_exit(call.pop_all())
                if request.tail.complete():
                    request.phase = Phase.DRAINING
                if open_still:
                    await _let_go(answer, attempt, spool, clock)
        ended = request.tail.done or request.phase is Phase.DRAINING
        if clock.scope.cancelled_caught and not (commit.done and ended):
            raise request.stopped_by or clock.ran_out()
        if not (commit.done and request.tail.complete()):
            raise _unfinished()
    except GatewayError as error:
        work.failed(error, begun=commit.done)
        if commit.done:
            spool.end(error.bare())
        else:
            commit.failed(error)
    else:
        spool.end()
    finally:
        commit.over()
        work.over(committed=commit.done)


async def _take_in(
    work: Work, attempt: Attempt, answer: Answer, spool: Spool, clock: EngineClock, commit: Commit
) -> bool:
    """Bring the answer into the spool until the engine has ended; say whether its response is open still."""
    request, seconds = work.request, work.gateway.config.stream.heartbeat_seconds
    commit.response = _head(work, answer, spool)
    intake = attempt.answered(answer, request.tail)
    if answer.status in RETRIED and (work.goes_elsewhere() or work.has_better(answer.status)):
        clock.stand_still()
        raise await refused(answer, commit.response)
    if intake.gathers:
        await _gather(work, answer, attempt, intake, clock)
        status, body = intake.answer()
        if status in GATHERED_ERRORS and work.goes_elsewhere():
            raise RefusedError(status, plain(commit.response, len(body)), body)
        commit.response = gathered(commit.response, request, status, body)
        commit()
        return True
    if seconds and isinstance(request.tail, SseTail):
        commit.later(seconds, work.nursery)
    return await _relay(work, answer, attempt, spool, clock, commit)


def _look_for_error(work: Work, attempt: Attempt, data: bytes, commit: Commit) -> None:
    """Look whether a stream begins with an error: what has a status of 200 may be one all the same."""
    if (said := error_in(data, at_first=True)) is not None:
        attempt.told_an_error()
        if not commit.done and work.goes_elsewhere():
            raise RefusedError(502, plain(commit.response, len(said)), said)


def _head(work: Work, answer: Answer, spool: Spool) -> Response:
    request, route = work.request, work.route
    request.tail = tail_for(route, answer.headers, answer.status)
    request.spool = spool
    headers = to_client(
        answer.headers,
        bodiless=answer.status in (204, 304),
        request_id=request.caller_id or request.id,
        event_stream=isinstance(request.tail, SseTail),
    )
    if work.ticket.model is not None:
        headers.append((b"X-Gateway-Model", work.ticket.model.encode("utf-8")))
    if (size := list_size(headers)) > MOST_HEAD_BYTES:
        raise EngineError(
            Code.ENGINE_FAILED,
            "The head of the engine's answer is too large.",
            detail=f"The engine sent {len(headers)} fields, {size} bytes; at most {MOST_HEAD_BYTES} pass.",
        )
    return Response(answer.status, headers, spool, request.tail, route)


async def _relay(
    work: Work, answer: Answer, attempt: Attempt, spool: Spool, clock: EngineClock, commit: Commit
) -> bool:
    """Bring the body into the spool until the engine has ended: its last event, or the body's end.

    Returns whether the body's end is still to come.
    """
    request, intake = work.request, attempt.intake
    assert intake is not None

    more, data = await _beginning(work, answer, attempt, clock, commit)
    passing = Passing(request, intake, spool, clock)
    if data:
        passing.begin(data)
        _begun(work, attempt)
        clock.next_read()
    del data  # It would stay for as long as the stream.
    while more and not request.tail.done:
        if spool.full:
            clock.stand_still()
            with attempt.holding_back():
                await spool.room()
            clock.next_read()
        more = await answer.relay(passing.take, spool.piece_bytes)
    if rest := intake.rest():
        passing.pass_on(rest)
    attempt.ended_with(passing.end)
    return more


async def _beginning(
    work: Work, answer: Answer, attempt: Attempt, clock: EngineClock, commit: Commit
) -> tuple[bool, bytes]:
    """Commit with the first bytes, and return them; say also whether there may be more."""
    intake, of_events = attempt.intake, isinstance(work.request.tail, SseTail | NdjsonTail)
    assert intake is not None
    more, data = await _first(answer, intake, clock, of_events=of_events)
    if not more:
        data += intake.rest()
    if of_events:
        if not more and (not data or (_half_an_error(data) and error_in(data, at_first=True) is None)):
            raise _unfinished()  # Nothing of it has gone to the client.
        _look_for_error(work, attempt, data, commit)
    commit()
    return more, data


async def _first(
    answer: Answer, intake: Intake, clock: EngineClock, *, of_events: bool
) -> tuple[bool, bytes]:
    """Wait for the first bytes that are for the client; say also whether there may be more.

    An error at the beginning of a stream of events is waited for until it is whole.
    """
    first = b""
    while data := await answer.receive():
        intake.meter.feed(data)
        first += intake.sift(data)
        if first and not (of_events and _half_an_error(first)):
            return True, first
        # The response isn't committed yet, but the engine isn't silent.
        clock.next_read()
    return False, first


def _half_an_error(first: bytes) -> bool:
    if len(first) >= _FIRST_EVENT_BYTES or not may_begin_error(first):
        return False
    # What kind of error it is stands in the line behind its name.
    return first[-1:] not in b"\r\n" or (first.startswith(b"event") and b"data" not in first)


def _begun(work: Work, attempt: Attempt) -> None:
    attempt.begun()
    work.gateway.answer_begun(work.request, work.ticket, attempt.engine, attempt.slot)


async def _gather(work: Work, answer: Answer, attempt: Attempt, intake: Intake, clock: EngineClock) -> None:
    """Listen to a stream until its answer is whole. Raises EngineError if it doesn't become so."""
    request = work.request
    while not intake.whole:
        data = await answer.receive()
        if not data:
            raise _unfinished()
        clock.next_read()
        intake.meter.feed(data)
        if passing := intake.sift(data):
            begins, request.phase = request.phase is not Phase.STREAMING, Phase.STREAMING
            request.tail.feed(passing)
            if begins and error_in(passing, at_first=True) is not None:
                attempt.told_an_error()
            attempt.begun()
            if begins:
                _begun(work, attempt)
            intake.gather(passing)


async def _let_go(answer: Answer, attempt: Attempt, spool: Spool, clock: EngineClock) -> None:
    """Give the engine a moment to end the response, so that the connection can be used again.

    The answer is complete, so nothing that happens here is a failure.
    """
    clock.stand_still()
    gathers = attempt.intake is not None and attempt.intake.gathers
    with trio.move_on_after(LET_GO_SECONDS):
        try:
            while data := await answer.receive():
                if not gathers:
                    await spool.room()
                    spool.push(data)
        except EngineError:
            pass


def _unfinished() -> EngineError:
    return EngineError(Code.ENGINE_FAILED, "The engine's answer ended without its last event.")
