"""Answers that don't go out as they come: errors that are kept, and streams that are added up."""

from __future__ import annotations

import trio

from gateway.engine import Answer
from gateway.errors import Code, EngineError, RefusedError
from gateway.events import Tail
from gateway.request import Request
from gateway.response import Response
from gateway.words import RawHeaders

_OF_THE_STREAM = frozenset({b"content-type", b"content-length", b"cache-control", b"x-accel-buffering"})
"""What an engine says of its stream isn't so of the answer that is added up of it."""

GATHERED_ERRORS = frozenset({429, 500, 502, 503, 504})
"""What an error in a stream becomes when its answer is added up: the engine said 200, and failed then."""

_MOST_KEPT_BYTES = 64 * 1024
"""Of an error answer, while another engine is tried."""

_KEEP_SECONDS = 1.0
"""How long the rest of an error answer is waited for."""


async def refused(answer: Answer, response: Response) -> EngineError:
    """Keep an error answer, if it is short and comes soon, for the case that nobody does better."""
    body, whole = bytearray(), False
    with trio.move_on_after(_KEEP_SECONDS):
        try:
            while len(body) <= _MOST_KEPT_BYTES and not whole:
                data = await answer.receive()
                body += data
                whole = not data
        except EngineError:
            pass
    if not whole:
        # Half of an answer is none. That it is an error has been counted already.
        return EngineError(Code.ENGINE_FAILED, f"The engine answered {answer.status}.", blames=False)
    headers = [(name, value) for name, value in response.headers if name.lower() != b"content-length"]
    headers.append((b"Content-Length", b"%d" % len(body)))
    return RefusedError(response.status, headers, bytes(body))


def plain(response: Response | None, length: int) -> RawHeaders:
    """The head of a stream, for an error answer in its place."""
    assert response is not None
    headers = [(name, value) for name, value in response.headers if name.lower() not in _OF_THE_STREAM]
    return [*headers, (b"Content-Type", b"application/json"), (b"Content-Length", b"%d" % length)]


def gathered(response: Response, request: Request, status: int, body: bytes) -> Response:
    """Make the whole answer of one that was streamed to us; its head is the engine's but for the content."""
    request.tail = Tail()
    request.passed(body)
    response.spool.push(body)
    headers = [(name, value) for name, value in response.headers if name.lower() not in _OF_THE_STREAM]
    headers.append((b"Content-Type", b"application/json; charset=utf-8"))
    headers.append((b"Content-Length", b"%d" % len(body)))
    return Response(status, headers, response.spool, request.tail, response.route)
