"""Everything the gateway answers in its own name.

One closed table says, for each code, the HTTP status and the outcome of the
request. An error carries whose fault it is and whether another try can help as
fields; nobody reads them out of the message.
"""

from __future__ import annotations

from enum import StrEnum

from gateway.words import Outcome, RawHeaders


class Code(StrEnum):
    """Machine-readable reason, the ``code`` of an error answer."""

    INVALID_JSON = "invalid_json"
    INVALID_REQUEST = "invalid_request"
    INVALID_API_KEY = "invalid_api_key"
    MODEL_NOT_ALLOWED = "model_not_allowed"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    BODY_TIMEOUT = "body_timeout"
    BODY_TOO_LARGE = "body_too_large"
    RATE_LIMITED = "rate_limited"
    QUEUE_FULL = "queue_full"
    NOT_SUPPORTED = "not_supported"
    ENGINE_FAILED = "engine_failed"
    NO_ENGINE = "no_engine"
    QUEUE_TIMEOUT = "queue_timeout"
    DRAINING = "draining"
    CANCELLED = "cancelled"
    ENGINE_TIMEOUT = "engine_timeout"


_MEANING: dict[Code, tuple[int, Outcome]] = {
    Code.INVALID_JSON: (400, Outcome.REJECTED),
    Code.INVALID_REQUEST: (400, Outcome.REJECTED),
    Code.INVALID_API_KEY: (401, Outcome.REJECTED),
    Code.MODEL_NOT_ALLOWED: (403, Outcome.REJECTED),
    Code.MODEL_NOT_FOUND: (404, Outcome.REJECTED),
    Code.NOT_FOUND: (404, Outcome.REJECTED),
    Code.BODY_TIMEOUT: (408, Outcome.REJECTED),
    Code.BODY_TOO_LARGE: (413, Outcome.REJECTED),
    Code.RATE_LIMITED: (429, Outcome.SHED),
    Code.QUEUE_FULL: (429, Outcome.SHED),
    Code.NOT_SUPPORTED: (501, Outcome.REJECTED),
    Code.ENGINE_FAILED: (502, Outcome.ENGINE_FAILED),
    Code.NO_ENGINE: (503, Outcome.SHED),
    Code.QUEUE_TIMEOUT: (503, Outcome.SHED),
    Code.DRAINING: (503, Outcome.DRAINED),
    Code.CANCELLED: (503, Outcome.CANCELLED),
    Code.ENGINE_TIMEOUT: (504, Outcome.ENGINE_TIMEOUT),
}

RETRY_AFTER_SECONDS = 1
"""What 429 and 503 say in ``Retry-After``. A slot usually frees within seconds, and
clients add their own growing pause to it."""


class GatewayError(Exception):
    """A request ends with an answer of the gateway's own.

    ``code`` is the machine-readable reason, ``message`` says what was wrong and what
    to do, ``param`` names the request's field if one is to blame. ``detail`` is for the
    access record alone: an engine's address, for instance, is nobody's business outside.
    ``retry_after`` is when another try makes sense, in seconds, if that is known.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        param: str | None = None,
        detail: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self._retry_after = retry_after
        self.code = code
        self.message = message
        self.param = param
        self.detail = detail

    @property
    def status(self) -> int:
        """HTTP status of the answer."""
        return _MEANING[self.code][0]

    @property
    def outcome(self) -> Outcome:
        """Outcome of the request that ends so."""
        return _MEANING[self.code][1]

    @property
    def retry_after(self) -> int | None:
        """Seconds for ``Retry-After``: 429 and 503 carry it (RFC 9110, 10.2.3)."""
        return max(self._retry_after or 0, RETRY_AFTER_SECONDS) if self.status in (429, 503) else None

    def bare(self) -> GatewayError:
        """Return it without the frames it came through, for keeping.

        They hold the request that holds it: a cycle, which only the garbage collector could free.
        """
        self.__traceback__ = self.__cause__ = self.__context__ = None
        return self


class EngineError(GatewayError):
    """The engine, or the way to it, failed.

    ``stale`` tells the one case in which asking the same engine again is safe and
    sensible: a kept-alive connection that the engine had closed already, found out
    before any byte of a response. ``absent`` tells that nobody listens at its address:
    its process has gone, and all its work with it. ``blames`` is False where nothing is said against the
    engine: the answer was long, and not late.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        detail: str | None = None,
        stale: bool = False,
        absent: bool = False,
        blames: bool = True,
    ) -> None:
        super().__init__(code, message, detail=detail)
        self.stale = stale
        self.absent = absent
        self.blames = blames


class RefusedError(EngineError):
    """The engine has answered with an error that another engine may not make.

    ``answer`` is that answer, whole, for the case that nobody does better. What it says of the engine
    has been judged by its status.
    """

    def __init__(self, status: int, headers: RawHeaders, body: bytes) -> None:
        super().__init__(Code.ENGINE_FAILED, f"The engine answered {status}.", blames=False)
        self.answer = (status, headers, body)
