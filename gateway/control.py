"""The control plane: is it alive, is it ready, what is going on, end that one.

Ordinary Quart-Trio on a listener of its own (``server.admin``).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import structlog
import trio
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Response, jsonify, redirect, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response as Redirection

from gateway.config import ConfigError
from gateway.dashboard import Board, add_pages
from gateway.enginesview import view_of
from gateway.errors import Code, GatewayError
from gateway.gateway import Gateway
from gateway.guard import COOKIE, Ask, Guard
from gateway.reload import Reloader
from gateway.telemetry import Telemetry

log = structlog.get_logger("gateway.control")

_RESPONSE_SECONDS = 10
"""Everything here is read from memory; a response that takes longer has no reader."""

_MOST_BODY_BYTES = 64 * 1024

_NO = {"0", "false", "no"}

Answer = tuple[Any, int] | Response


_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self' data:; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""What keeps pages of other origins out of ours, and ours to what we serve ourselves."""


def control_plane(
    gateway: Gateway,
    telemetry: Telemetry,
    reloader: Reloader | None = None,
    *,
    guard: Guard | None = None,
    board: Board | None = None,
) -> QuartTrio:
    """Make the ASGI application of the control plane.

    ``guard`` decides who may use it; ``board``, which has to be running, tells the dashboard what to show.
    """
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

    @app.get("/admin/ledger")
    async def ledger() -> Answer:
        engines = {engine.name: asdict(engine.ledger.statement()) for engine in gateway.known_engines}
        return jsonify(engines=engines, balanced=all(each["balanced"] for each in engines.values())), 200

    @app.post("/admin/reload")
    async def reload() -> Answer:
        if reloader is None:
            return jsonify(error="This gateway can't reload."), 501
        try:
            report = await reloader.reload(dry_run=request.args.get("dry_run", "0") not in _NO)
        except ConfigError as error:
            return jsonify(error="Nothing is changed.", faults=str(error).splitlines()), 422
        said: dict[str, Any] = {"changes": [change.text for change in report.changes], "file": reloader.file}
        if report.down is not None:
            said["down"] = report.down
        return jsonify(said), 200

    guard = guard or Guard(lambda: "")
    _add_guard(app, guard)
    add_pages(app, board or Board(gateway, telemetry), guard)
    _add_requests(app, gateway)
    _add_engines(app, gateway)
    return app


def _add_guard(app: QuartTrio, guard: Guard) -> None:
    @app.before_request
    async def refuse() -> Answer | Redirection | None:
        headers = request.headers
        ask = Ask(
            method=request.method,
            path=request.path,
            host=headers.get("Host", ""),
            origin=headers.get("Origin", ""),
            fetch_site=headers.get("Sec-Fetch-Site", ""),
            fetch_mode=headers.get("Sec-Fetch-Mode", ""),
            authorization=headers.get("Authorization", ""),
            cookie=request.cookies.get(COOKIE, ""),
        )
        refusal = guard.refuse(ask, trio.current_time())
        if refusal is None:
            return None
        if refusal.status == 401 and request.path == "/":
            return redirect("/login", 303)
        response = jsonify(error=refusal.message)
        response.status_code = refusal.status
        if refusal.status == 401:
            response.headers["WWW-Authenticate"] = 'Bearer realm="gateway"'
        return response

    @app.errorhandler(HTTPException)
    async def fault(error: HTTPException) -> Answer:
        return jsonify(error=f"{error.name}: {request.method} {request.path[:100]}"), error.code or 500

    @app.after_request
    async def protect(response: Response) -> Response:
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response


def _add_requests(app: QuartTrio, gateway: Gateway) -> None:
    @app.get("/admin/requests")
    async def requests() -> Answer:
        live = [each.view() for each in gateway.requests]
        return jsonify(requests=live, queued=gateway.admission.waiting), 200

    @app.get("/admin/queue")
    async def queue() -> Answer:
        return jsonify(gateway.admission.view()), 200

    @app.delete("/admin/requests/<request_id>")
    async def cancel(request_id: str) -> Answer:
        live = gateway.requests.get(request_id)
        if live is None:
            return jsonify(error=f"There is no live request {request_id[:64]}."), 404
        live.stop(GatewayError(Code.CANCELLED, "The request was cancelled by an operator."))
        log.info("request cancelled by an operator", id=request_id)
        return jsonify(cancelled=request_id), 200


def _add_engines(app: QuartTrio, gateway: Gateway) -> None:
    @app.get("/admin/engines")
    async def engines() -> Answer:
        return jsonify(engines={engine.name: view_of(engine) for engine in gateway.known_engines}), 200

    @app.post("/admin/engines/<name>/drain")
    async def drain(name: str) -> Answer:
        return keep_free(name, True)

    @app.post("/admin/engines/<name>/resume")
    async def resume(name: str) -> Answer:
        return keep_free(name, False)

    def keep_free(name: str, free: bool) -> Answer:
        engine = next((engine for engine in gateway.engines if engine.name == name), None)
        if engine is None:
            return jsonify(error=f"There is no engine {name[:64]}."), 404
        gateway.keep_free(engine, free)
        log.info("engine is kept free" if free else "engine is used again", engine=name)
        return jsonify(engines={name: view_of(engine)}), 200
