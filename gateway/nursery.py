"""The heart: one request, one nursery, one cancel scope.

::

     client ─▶ server ─▶ ┌─ one request nursery ────────────────────────────────────────────────┐
                         │ watcher  the body, then the client's leaving ⇒ the scope is cancelled │
                         │ reader   a slot ▸ the engine's response ▸ bytes ──┐                   │
     engine ════════════▶│          ends when the engine has ended: slot free │                  │
                         │ writer   ◀═════ spool: bounded, all it holds in one go ◀═════════════╯│═▶ client
                         └───────────────────────────────────────────────────────────────────────┘

The reader holds the slot, never the writer: a write can be stuck for as long as the
client likes. The commit point is the first body bytes: the nursery's own task, which has
started the reader, waits for them (:mod:`gateway.commit`), and until then a failure of the
reader is raised there and may be tried again. After it, how the answer ended is the spool's
last item. The reader itself never raises, for that would cancel the writer and lose the spool.

Where the body is there already and the server itself tells of the client's leaving
(:meth:`gateway.request.Request.client_left`, which cancels the scope), the watcher needs no task.

Everything is released by leaving ``async with`` blocks, from the inside out: the
engine's response closes, then the slot is given back, then the nursery ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from typing import Protocol

import trio

from gateway.commit import Commit
from gateway.errors import Code, EngineError, GatewayError, RefusedError
from gateway.gateway import Gateway
from gateway.reader import read
from gateway.request import Request
from gateway.response import Response, kept, refusal
from gateway.tenants import Tenant
from gateway.work import Work
from gateway.writer import Writer, write

Compose = Callable[[trio.Nursery], Awaitable[Response]]
"""Makes the response of one request, in its nursery; raises GatewayError to refuse it."""


class Client(Writer, Protocol):
    """The client's side of one request, as the edge hands it in."""

    def needs_watching(self) -> bool:
        """Take in what is there of the body; return whether ``watch`` is needed for what is to come."""

    async def watch(self, request: Request) -> None:
        """Take in the body, then wait for the client to leave and tell ``request``."""

    async def body(self) -> bytes:
        """Return the whole body. Raises GatewayError; see :meth:`gateway.client.AsgiClient.body`."""

    def body_now(self) -> bytes | None:
        """Return the whole body if it has arrived."""

    def drop_body(self) -> None:
        """Forget the body: it isn't needed any more."""


async def serve(request: Request, client: Client, gateway: Gateway, compose: Compose) -> None:
    """Run one request from its head to its record."""
    gateway.begin(request)
    try:
        async with trio.open_nursery() as nursery:
            request.whole = nursery.cancel_scope
            if client.needs_watching():
                nursery.start_soon(client.watch, request)
            response = await _response(nursery, request, compose)
            if request.error is not None:
                gateway.settle(request)
            gateway.tell_rates(request, response)
            await write(request, client, response, gateway.config.stream.heartbeat_seconds or inf)
            if nursery.child_tasks:
                nursery.cancel_scope.cancel()
    finally:
        client.drop_body()
        gateway.end(request)


async def _response(nursery: trio.Nursery, request: Request, compose: Compose) -> Response:
    try:
        return await compose(nursery)
    except GatewayError as error:
        request.failed(error)
        return refusal(request, request.error or error)


async def infer(
    nursery: trio.Nursery,
    request: Request,
    client: Client,
    gateway: Gateway,
    tenant: Tenant | None = None,
) -> Response:
    """Take an inference request of ``tenant`` from its head to the first bytes of its answer.

    Until then what one engine fails at another may do: a retry is one more turn of a loop. A kept-alive
    connection that turns out to be dead is no failure: the engine is asked once more, over a new
    one. Raises GatewayError for what is to be refused; of several failures the most useful one.
    """
    route = gateway.route(request)
    body = client.body_now()
    if body is None:
        body = await request.unless_stopped(client.body())
    plan = gateway.plan(request, route, body)
    ticket = gateway.admit(request, plan, body, tenant)
    work = Work(nursery, request, gateway, route, ticket, body, plan.seen.fields)
    del plan
    response = await _tries(work)
    client.drop_body()
    work.forget_body()
    return response


async def _tries(work: Work) -> Response:
    failures = work.failures
    fresh = False
    while True:
        commit = Commit()
        work.nursery.start_soon(read, work, fresh, commit)
        try:
            return await commit.reached()
        except EngineError as error:
            error.bare()
            if error.stale and not fresh:
                fresh = True
                continue
            work.note(error)
            if not work.goes_on and not work.goes_elsewhere():
                break
        except GatewayError as error:
            # That no other engine had time for it, or is there, says less than what the first one said.
            if not failures or error.code not in _NOBODY_ELSE:
                raise
            error.bare()
            break
        fresh = False
    best = work.most_useful()
    if isinstance(best, RefusedError):
        return kept(work.request, work.route, best.answer)
    raise best


_NOBODY_ELSE = frozenset({Code.QUEUE_TIMEOUT, Code.QUEUE_FULL, Code.NO_ENGINE})
