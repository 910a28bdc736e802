"""What goes to the client: a head, and a spool that fills or is full already."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.dialect import Route, api_of_path, error_body
from gateway.errors import Code, GatewayError
from gateway.events import Tail
from gateway.headers import find
from gateway.request import Request
from gateway.spool import Spool
from gateway.words import RawHeaders


@dataclass(slots=True)
class Response:
    """A response on its way to the client. ``route`` is None for answers of the gateway's own."""

    status: int
    headers: RawHeaders
    spool: Spool
    tail: Tail
    route: Route | None = None
    length: bytes | None = field(init=False)

    def __post_init__(self) -> None:
        self.length = find(self.headers, b"content-length")

    def is_all(self) -> bool:
        """Whether the client has been sent the whole answer.

        It can know that before the response is ended: by the length, or by the last event.
        """
        if self.tail.done:
            return self.spool.empty
        return self.length is not None and self.length == b"%d" % self.spool.sent


def whole(request: Request, status: int, headers: RawHeaders, body: bytes) -> Response:
    """Make a response of the gateway's own, complete from the start."""
    spool = Spool(max(len(body), 1))
    if body:
        spool.push(body)
    spool.end()
    own = [
        (b"Content-Type", b"application/json"),
        (b"Content-Length", b"%d" % len(body)),
        (b"X-Request-Id", (request.caller_id or request.id).encode("ascii")),
    ]
    return Response(status, own + headers, spool, Tail())


def kept(request: Request, route: Route, answer: tuple[int, RawHeaders, bytes]) -> Response:
    """Make a response of an engine's own error answer that was kept until nobody did better."""
    status, headers, body = answer
    spool = Spool(max(len(body), 1))
    if body:
        spool.push(body)
    spool.end()
    request.tail, request.spool = Tail(), spool
    return Response(status, headers, spool, request.tail, route)


def refusal(request: Request, error: GatewayError) -> Response:
    """Make the error answer, in the shape of the API that was called."""
    retry = [(b"Retry-After", b"%d" % error.retry_after)] if error.retry_after is not None else []
    if error.code is Code.INVALID_API_KEY:
        retry.append((b"WWW-Authenticate", b"Bearer"))  # RFC 9110, 15.5.2
    if error.code is Code.CANCELLED:
        # OpenAI's clients try a 503 again by themselves; whoever cancelled it doesn't want it back.
        retry.append((b"x-should-retry", b"false"))
    return whole(request, error.status, retry, error_body(api_of_path(request.path), error))
