"""The page's files, its login, and the stream of events it lives on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources

import trio
from quart import Response, jsonify, redirect, request
from quart_trio import QuartTrio
from werkzeug.wrappers import Response as Redirection

from gateway.dashboard.board import Board
from gateway.guard import COOKIE, SESSION_SECONDS, Guard

MOST_PAGES = 32
"""Pages that may be open at once: each costs its own sending."""

FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/login": ("login.html", "text/html; charset=utf-8"),
    "/assets/style.css": ("style.css", "text/css; charset=utf-8"),
    "/assets/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/assets/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
}
"""What is served, by path."""


def add_pages(app: QuartTrio, board: Board, guard: Guard) -> None:
    """Add the dashboard to the control plane."""
    for path, (name, kind) in FILES.items():
        app.add_url_rule(path, name, _file(name, kind), methods=["GET"])

    @app.post("/login")
    async def login() -> Response | Redirection:
        form = await request.form
        cookie = guard.login(form.get("token", "").strip(), trio.current_time())
        if cookie is None:
            return redirect("/login?wrong", 303)
        response = redirect("/", 303)
        secure = request.headers.get("X-Forwarded-Proto", request.scheme) == "https"
        response.set_cookie(
            COOKIE, cookie, max_age=SESSION_SECONDS, httponly=True, samesite="Strict", secure=secure
        )
        return response

    @app.post("/logout")
    async def logout() -> Redirection:
        response = redirect("/login", 303)
        response.delete_cookie(COOKIE, httponly=True, samesite="Strict")
        return response

    @app.get("/admin/events")
    async def events() -> Response | tuple[Response, int]:
        if request.method == "HEAD":
            return Response(b"", content_type="text/event-stream")
        if board.pages >= MOST_PAGES:
            return jsonify(error=f"{MOST_PAGES} pages are open already."), 503
        response = Response(board.events(), content_type="text/event-stream")
        response.headers["X-Accel-Buffering"] = "no"
        response.timeout = None
        return response


def _file(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
    content = resources.files(__package__ or "").joinpath(name).read_bytes()

    async def send() -> Response:
        return Response(content, content_type=kind)

    return send
