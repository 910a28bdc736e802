"""The control plane: is it alive, is it ready, what is going on, end that one.

Ordinary Quart-Trio on a listener of its own (``server.admin``).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Response, jsonify
from quart_trio import QuartTrio

from gateway.errors import Code, GatewayError
from gateway.gateway import Gateway
from gateway.telemetry import Telemetry

log = structlog.get_logger("gateway.control")

_RESPONSE_SECONDS = 10
"""Everything here is read from memory; a response that takes longer has no reader."""

_MOST_BODY_BYTES = 64 * 1024

Answer = tuple[Any, int] | Response


def control_plane(gateway: Gateway, telemetry: Telemetry) -> QuartTrio:
    """Make the ASGI application of the control plane."""
    app = QuartTrio("gateway.control", static_folder=None)
    app.config["RESPONSE_TIMEOUT"] = _RESPONSE_SECONDS
    app.config["BODY_TIMEOUT"] = _RESPONSE_SECONDS
    app.config["MAX_CONTENT_LENGTH"] = _MOST_BODY_BYTES

    @app.get("/healthz")
    async def healthz() -> Answer:
        return jsonify(status="ok"), 200

    @app.get("/readyz")
    async def readyz() -> Answer:
        if gateway.draining:
            return jsonify(status="draining"), 503
        return jsonify(status="ready"), 200

    @app.get("/metrics")
    async def metrics() -> Answer:
        return Response(telemetry.metrics(), content_type=CONTENT_TYPE_LATEST)

    @app.get("/admin/requests")
    async def requests() -> Answer:
        live = [request.view() for request in gateway.requests]
        return jsonify(requests=live, queued=gateway.admission.waiting), 200

    @app.get("/admin/queue")
    async def queue() -> Answer:
        return jsonify(gateway.admission.view()), 200

    @app.delete("/admin/requests/<request_id>")
    async def cancel(request_id: str) -> Answer:
        request = gateway.requests.get(request_id)
        if request is None:
            return jsonify(error=f"There is no live request {request_id[:64]}."), 404
        request.stop(GatewayError(Code.CANCELLED, "The request was cancelled by an operator."))
        log.info("request cancelled by an operator", id=request_id)
        return jsonify(cancelled=request_id), 200

    @app.get("/admin/ledger")
    async def ledger() -> Answer:
        engines = {engine.name: asdict(engine.ledger.statement()) for engine in gateway.engines}
        return jsonify(engines=engines, balanced=all(each["balanced"] for each in engines.values())), 200

    return app
