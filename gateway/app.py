"""The data plane: Quart-Trio with a connection class of our own.

Quart-Trio gives each request a nursery for its watcher and its handler. Ours holds
watcher, reader and writer (:mod:`gateway.nursery`) and answers right there, so that a
relayed chunk passes as few layers as possible. Quart's own routing isn't used on this
plane; the control plane (:mod:`gateway.control`) is ordinary Quart-Trio.
"""

from __future__ import annotations

from typing import Any

import trio
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection

from gateway.bodies import BodyBudget
from gateway.client import AsgiClient, Receive, Send
from gateway.dialect import models_route
from gateway.gateway import Gateway
from gateway.headers import Caller
from gateway.models import Models
from gateway.nursery import infer, serve
from gateway.request import Request
from gateway.response import Response
from gateway.server.words import STREAM_KEY


class RequestConnection(TrioASGIHTTPConnection):
    """One HTTP request of the data plane."""

    app: DataPlane
    scope: Any

    async def __call__(self, receive: Receive, send: Send) -> None:
        """Run the request's nursery."""
        await self.app.handle(self.scope, receive, send)


class DataPlane(QuartTrio):
    """The ASGI application that serves the API."""

    asgi_http_class = RequestConnection

    def __init__(self, gateway: Gateway) -> None:
        super().__init__("gateway.app", static_folder=None)
        self.gateway = gateway
        self.models = Models(gateway)
        self.budget = BodyBudget(gateway.config.server.bodies_bytes)

    async def handle(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request, given as an ASGI HTTP scope."""
        headers = scope["headers"]
        request = Request(
            method=scope["method"],
            path=scope["path"],
            query=scope["query_string"],
            headers=headers,
            caller=Caller((scope.get("client") or ("",))[0], scope["scheme"]),
        )
        stream = scope.get("state", {}).get(STREAM_KEY)
        if stream is not None:
            stream.left = request.client_left
            stream.stalled = request.client_stalled
        client = AsgiClient(
            receive,
            send,
            headers=headers,
            limits=self.gateway.config.server,
            budget=self.budget,
            stream=stream,
        )

        async def compose(nursery: trio.Nursery) -> Response:
            self.gateway.look_at_head(request)
            tenant = self.gateway.identify(request)
            if models_route(request.path):
                return await request.unless_stopped(self.models.answer(request, tenant))
            return await infer(nursery, request, client, self.gateway, tenant)

        await serve(request, client, self.gateway, compose)
