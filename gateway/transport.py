"""The border to httpx's world of requests, responses and exceptions.

An engine is reached through a transport of httpx's kind alone: our own for plain HTTP
(:mod:`gateway.direct`), httpx's for https. httpx's client would add cookies, redirects,
decoding and headers of its own, none of which may touch a relayed byte. The pool is
given no limit: slots are the limit, and httpcore's own loses connections when waiting
requests are cancelled. HTTP/1.1 only: a cancelled HTTP/2 request of httpcore sends no
reset, and the engine would go on.

Foreign exceptions end here; above are only :class:`gateway.errors.EngineError` s.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx
import trio

from gateway import config
from gateway.arrivals import Arrivals
from gateway.direct import Body, DirectTransport
from gateway.engine import Answer, Call, Engine, relay_each
from gateway.errors import Code, EngineError, GatewayError
from gateway.words import RawHeaders

_KEEPALIVE_EXPIRY_SECONDS = 4.0
"""Idle connections are let go before engines close them: uvicorn (vLLM, SGLang) and
llama.cpp do after 5 s."""

_TCP_USER_TIMEOUT = 18
_SOCKET_OPTIONS: list[tuple[int, int, int]] = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # An engine that is gone without a FIN is found after 10 + 3 x 5 = 25 s, in a silent prefill too.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, 25_000),
    # What the kernel takes in for a slow reader; left to itself it would be megabytes a stream.
    (socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024),
]

_CONNECTED_EVENTS = frozenset({"connection.connect_tcp.complete", "connection.connect_unix_socket.complete"})
_NO_TLS_EVENT = "connection.start_tls.failed"
_WRITING_EVENT = "http11.send_request_headers.started"


def make_engine(
    settings: config.Engine,
    *,
    connect_seconds: float,
    arrivals: Arrivals | None = None,
    health: config.Health | None = None,
) -> Engine:
    """Build an engine of the configuration with its transport.

    ``connect_seconds`` of 0 means no limit. ``arrivals``, if given, has to be running. Raises
    OSError or ssl.SSLError if ``ca`` can't be read.
    """
    unix = settings.url.startswith("unix:")
    url = urlsplit("http://localhost" if unix else settings.url)
    transport = HttpxTransport(
        url,
        uds=settings.url.removeprefix("unix:") if unix else None,
        ca=settings.ca,
        connect_seconds=connect_seconds or None,
        arrivals=arrivals,
    )
    engine = Engine(
        settings,
        transport,
        host=url.netloc.encode("idna" if not url.netloc.isascii() else "ascii"),
        prefix=url.path.rstrip("/").encode("ascii"),
        health=health,
    )
    engine.tls = transport.tls
    return engine


class HttpxTransport:
    """Calls one engine over httpx's HTTP/1.1 transport."""

    def __init__(
        self,
        url: SplitResult,
        *,
        uds: str | None,
        ca: str | None,
        connect_seconds: float | None,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.tls = ssl.create_default_context(cafile=ca) if url.scheme == "https" else None
        verify: ssl.SSLContext | bool = self.tls or False
        options = _SOCKET_OPTIONS if uds is None else []

        def transport(keepalive: int | None) -> httpx.AsyncBaseTransport:
            if url.scheme == "http":
                return DirectTransport(
                    host=url.hostname or "",
                    port=url.port or 80,
                    uds=uds,
                    socket_options=options,
                    reuse=keepalive is None,
                    arrivals=arrivals,
                )
            limits = httpx.Limits(
                max_connections=None,
                max_keepalive_connections=keepalive,
                keepalive_expiry=_KEEPALIVE_EXPIRY_SECONDS,
            )
            return httpx.AsyncHTTPTransport(
                verify=verify, uds=uds, limits=limits, trust_env=False, socket_options=options
            )

        self._url = httpx.URL(f"{url.scheme}://{url.netloc}")
        self._timeout = {"connect": connect_seconds, "read": None, "write": None, "pool": None}
        self._kept = transport(None)
        self._fresh = transport(0)

    @asynccontextmanager
    async def open(self, call: Call) -> AsyncIterator[Answer]:
        """Send ``call``; see :meth:`gateway.engine.Transport.open`."""
        trace = _Trace(call.connected)
        transport = self._fresh if call.fresh else self._kept
        request = httpx.Request(
            call.method.decode("ascii"),
            self._url,
            headers=call.headers,
            stream=_Body(call.body),
            # The target goes past httpx's URL, which would quote it anew.
            extensions={"timeout": self._timeout, "trace": trace.event, "target": call.target},
        )
        del call  # It holds the body, and this frame lives as long as the answer.
        try:
            response = await transport.handle_async_request(request)
        except httpx.TransportError as error:
            raise _translated(error, trace) from None
        answer = _HttpxAnswer(response, trace)
        del request, response  # Some kilobytes that nobody needs for as long as the answer lasts.
        try:
            yield answer
        finally:
            await answer.aclose()

    def connect_within(self, seconds: float) -> None:
        """Take so long to make a connection; see :meth:`gateway.engine.Transport.connect_within`."""
        self._timeout = {**self._timeout, "connect": seconds or None}

    async def aclose(self) -> None:
        """Close the idle connections."""
        await self._kept.aclose()
        await self._fresh.aclose()


class _Body(httpx.AsyncByteStream):
    """A request's body, forgotten once it is sent: httpcore keeps its request while the answer is read."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __aiter__(self) -> _Body:
        return self

    async def __anext__(self) -> bytes:
        if not self._data:
            raise StopAsyncIteration
        data, self._data = self._data, b""
        return data


class _HttpxAnswer:
    def __init__(self, response: httpx.Response, trace: _Trace) -> None:
        self.status = response.status_code
        self.headers: RawHeaders = response.headers.raw
        assert isinstance(response.stream, httpx.AsyncByteStream)
        self._stream = response.stream
        self._body = response.stream.__aiter__()
        self._trace = trace
        trace.answered = True

    async def receive(self) -> bytes:
        try:
            async for data in self._body:
                if data:
                    return data
        except httpx.TransportError as error:
            raise _translated(error, self._trace) from None
        return b""

    async def relay(self, take: Callable[[bytes], int], most: int) -> bool:
        if isinstance(self._stream, Body):
            try:
                return await self._stream.relay(take, most)
            except httpx.TransportError as error:
                raise _translated(error, self._trace) from None
        return await relay_each(self, take)

    async def aclose(self) -> None:
        await self._stream.aclose()
        if isinstance(self._stream, Body):
            return
        # If the body was cut, httpcore's generators are still suspended in it. Reading on from what is
        # closed ends them here, and not in the garbage collector.
        with trio.CancelScope(shield=True), suppress(httpx.TransportError):
            async for _ in self._body:
                pass


class _Trace:
    """What httpcore tells about the connection of one request."""

    def __init__(self, when_connected: Callable[[], None]) -> None:
        self._when_connected = when_connected
        self._socket: Any = None
        self.new_connection = False
        self.connected = False
        self.answered = False

    async def event(self, name: str, info: dict[str, Any]) -> None:
        if name in _CONNECTED_EVENTS:
            self.new_connection = True
            self._socket = info["return_value"]
        elif name == _NO_TLS_EVENT:
            # A handshake that is cancelled: httpcore forgets the socket, open as it is.
            with trio.CancelScope(shield=True):
                await self._socket.aclose()
        elif name == _WRITING_EVENT:
            self.connected = True
            self._when_connected()


def _translated(error: httpx.TransportError, trace: _Trace) -> GatewayError:
    if isinstance(error, httpx.ConnectTimeout):
        return EngineError(Code.NO_ENGINE, "The engine didn't take the connection in time.")
    if isinstance(error, httpx.LocalProtocolError):
        # A field or target that another server let through (HTTP/2 allows more) can't be said in HTTP/1.1.
        what = f"The request's head can't be passed on to an engine: {error}."
        return GatewayError(Code.INVALID_REQUEST, what)
    return _engine_error(error, trace)


def _engine_error(error: httpx.TransportError, trace: _Trace) -> EngineError:
    reason = _reason(error)
    if not trace.connected:
        return _error(Code.NO_ENGINE, "The engine can't be reached", reason, absent=_is_absent(error))
    if trace.answered:
        return _error(Code.ENGINE_FAILED, "The engine's answer broke off", reason)
    broken_off = isinstance(error, httpx.ReadError | httpx.WriteError) or "disconnected" in reason
    return _error(
        Code.ENGINE_FAILED,
        "The engine failed before it answered",
        reason,
        stale=broken_off and not trace.new_connection,
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
