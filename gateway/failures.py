"""What goes wrong with httpx's transports, in the gateway's words.

Foreign exceptions end here; above are only :class:`gateway.errors.EngineError` s.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from typing import Any

import httpx
import trio

from gateway.errors import Code, EngineError, GatewayError

_CONNECTED_EVENTS = frozenset({"connection.connect_tcp.complete", "connection.connect_unix_socket.complete"})
_NO_TLS_EVENT = "connection.start_tls.failed"
_WRITING_EVENT = "http11.send_request_headers.started"


class Progress:
    """How far a call of an engine has come: what a failure means depends on it."""

    def __init__(self, when_connected: Callable[[], None]) -> None:
        self._when_connected = when_connected
        self._socket: Any = None
        self._new_connection = False
        self._connected = False
        self.answered = False

    def writing(self, new_connection: bool) -> None:
        """There is a connection, and the request is about to be written."""
        self._new_connection, self._connected = new_connection, True
        self._when_connected()

    async def event(self, name: str, info: dict[str, Any]) -> None:
        """Take what httpcore tells about its connection."""
        if name in _CONNECTED_EVENTS:
            self._new_connection = True
            self._socket = info["return_value"]
        elif name == _NO_TLS_EVENT:
            # A handshake that is cancelled: httpcore forgets the socket, open as it is.
            with trio.CancelScope(shield=True):
                await self._socket.aclose()
        elif name == _WRITING_EVENT:
            self.writing(self._new_connection)

    def failure(self, error: httpx.TransportError) -> GatewayError:
        """Say what ``error`` means."""
        if isinstance(error, httpx.ConnectTimeout):
            return EngineError(Code.NO_ENGINE, "The engine didn't take the connection in time.")
        if isinstance(error, httpx.LocalProtocolError):
            # A field or target that another server let through (HTTP/2 allows more) isn't one of HTTP/1.1.
            what = f"The request's head can't be passed on to an engine: {error}."
            return GatewayError(Code.INVALID_REQUEST, what)
        reason = _reason(error)
        if not self._connected:
            return _error(Code.NO_ENGINE, "The engine can't be reached", reason, absent=_is_absent(error))
        if self.answered:
            return _error(Code.ENGINE_FAILED, "The engine's answer broke off", reason)
        broken_off = isinstance(error, httpx.ReadError | httpx.WriteError) or "disconnected" in reason
        return _error(
            Code.ENGINE_FAILED,
            "The engine failed before it answered",
            reason,
            stale=broken_off and not self._new_connection,
        )


def _error(code: Code, what: str, reason: str, *, stale: bool = False, absent: bool = False) -> EngineError:
    detail = f"{what}: {reason.rstrip('.')}."
    return EngineError(code, f"{what}.", detail=detail, stale=stale, absent=absent)


def _is_absent(error: BaseException | None) -> bool:
    """Whether the connection was refused, or there is no such unix socket."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            return True
        if isinstance(error, BaseExceptionGroup):
            return all(map(_is_absent, error.exceptions))
        error = error.__cause__ or error.__context__
    return False


def _reason(error: BaseException) -> str:
    """Say what happened. The outer exceptions often have no words, but what they were raised upon has."""
    said: BaseException | None = error
    while said is not None:
        if isinstance(said, OSError) and said.errno and not isinstance(said, ssl.SSLError | socket.gaierror):
            return os.strerror(said.errno)
        if words := str(said):
            return words
        said = said.__cause__ or said.__context__
    return type(error).__name__
