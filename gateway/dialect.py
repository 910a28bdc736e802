"""The APIs the gateway relays: which paths there are and how each one speaks.

The table is closed. What an engine can do beyond inference (pull, delete, load
adapters) has no row here and so can't be reached.

Sources: OpenAI API reference (chat, completions, embeddings, responses and their
streaming events), Anthropic Messages API (streaming, errors), Ollama's
``docs/api.md``, vLLM's and llama.cpp's lists of server endpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from gateway.errors import Code, GatewayError
from gateway.events import NdjsonTail, SseTail, Tail


class Api(StrEnum):
    """Whose shape errors have."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"


@dataclass(frozen=True)
class Route:
    """One inference path.

    ``markers`` are the lines one of which ends its event stream, ``streams`` is what
    an absent ``stream`` field means, ``event_prefix`` stands before an error event.
    """

    path: str
    api: Api = Api.OPENAI
    markers: tuple[bytes, ...] = (b"data: [DONE]",)
    streams: bool = False
    event_prefix: bytes = b""


_RESPONSES_ENDS = ("response.completed", "response.failed", "response.incomplete", "response.cancelled")

ROUTES = {
    route.path: route
    for route in (
        Route("/v1/chat/completions"),
        Route("/v1/completions"),
        Route("/v1/embeddings"),
        Route("/v1/rerank"),
        Route("/tokenize"),
        Route(
            "/v1/responses",
            markers=(*(b"event: " + end.encode() for end in _RESPONSES_ENDS), b"data: [DONE]"),
            event_prefix=b"event: error\n",
        ),
        Route(
            "/v1/messages",
            api=Api.ANTHROPIC,
            markers=(b"event: message_stop",),
            event_prefix=b"event: error\n",
        ),
        Route("/api/chat", api=Api.OLLAMA, streams=True),
        Route("/api/generate", api=Api.OLLAMA, streams=True),
        Route("/api/embed", api=Api.OLLAMA),
    )
}

MODELS_PATH = "/v1/models"
TAGS_PATH = "/api/tags"


def models_route(path: str) -> str | None:
    """Return as what ``path`` is recorded if it asks for the list of models or one of it; else None."""
    if path == MODELS_PATH or path.startswith(MODELS_PATH + "/"):
        return MODELS_PATH
    return TAGS_PATH if path == TAGS_PATH else None


OPENAI_PATHS = frozenset(path for path, route in ROUTES.items() if route.api is not Api.OLLAMA)
"""The routes of engines with OpenAI's API (and Anthropic's messages)."""


def api_of_path(path: str) -> Api:
    """Return whose shape an error has for any path, known or not."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return Api.ANTHROPIC
    return Api.OLLAMA if path.startswith("/api/") else Api.OPENAI


def tail_for(route: Route, headers: Sequence[tuple[bytes, bytes]], status: int) -> Tail:
    """Choose what watches the body of an answer, by its status and content type.

    Error answers and encoded bodies are opaque: their framing alone tells the end.
    """
    kind = encoding = b""
    for name, value in headers:
        lowered = name.lower()
        if lowered == b"content-type":
            kind = value.partition(b";")[0].strip().lower()
        elif lowered == b"content-encoding":
            encoding = value.strip().lower()
    if status >= 400 or encoding not in (b"", b"identity"):
        return Tail()
    if kind == b"text/event-stream":
        return SseTail(route.markers)
    if kind == b"application/x-ndjson" and route.streams:
        return NdjsonTail()
    return Tail()


_ANTHROPIC_TYPE = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_OPENAI_TYPE = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error_body(api: Api, error: GatewayError) -> bytes:
    """Render ``error`` in the shape of the API that was called, as JSON."""
    return msgspec.json.encode(_error_object(api, error))


def error_event(route: Route, tail: Tail, error: GatewayError) -> bytes | None:
    """Render ``error`` as one more event of a stream, or None where none can be put in.

    It can be put in only between two events; a body without events has no place for it.
    """
    if not tail.at_boundary:
        return None
    if isinstance(tail, NdjsonTail):
        return error_body(route.api, error) + b"\n"
    shape: dict[str, object]
    if route.path == "/v1/responses":
        shape = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    else:
        shape = _error_object(route.api, error)
    return route.event_prefix + b"data: " + msgspec.json.encode(shape) + b"\n\n"


def _error_object(api: Api, error: GatewayError) -> dict[str, object]:
    status, code, message = error.status, str(error.code), error.message
    if api is Api.OLLAMA:
        return {"error": message, "code": code}
    if api is Api.ANTHROPIC:
        kind = _ANTHROPIC_TYPE.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message, "code": code}}
    kind = _OPENAI_TYPE.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": error.param, "code": code}}


def unknown_path(path: str, known_paths: Iterable[str]) -> GatewayError:
    """Build the 404 for a path that isn't one of ``known_paths``."""
    known = sorted(known_paths)
    others = f"POST to one of {', '.join(known)}; GET {MODELS_PATH} lists the models."
    if (plain := path.rstrip("/")) in {*known, MODELS_PATH}:
        return GatewayError(Code.NOT_FOUND, f"There is no {plain}/ here. Is {plain} meant? {others}")
    # A base URL without /v1, or with one too many: OpenAI's clients want it, Anthropic's add their own.
    meant = {"/v1" + path, path.removeprefix("/v1")} & {*known, MODELS_PATH}
    hint = f"Is {meant.pop()} meant, with another base URL? " if meant else ""
    return GatewayError(Code.NOT_FOUND, f"There is no {path[:200]} here. {hint}{others}")
