"""The border to httpx's world of requests, responses and exceptions.

An engine is reached through a transport of httpx's kind alone: our own for plain HTTP
(:mod:`gateway.direct`), httpx's for https. httpx's client would add cookies, redirects,
decoding and headers of its own, none of which may touch a relayed byte. The pool is
given no limit: slots are the limit, and httpcore's own loses connections when waiting
requests are cancelled. HTTP/1.1 only: a cancelled HTTP/2 request of httpcore sends no
reset, and the engine would go on.

Foreign exceptions end here; above are only :class:`gateway.errors.EngineError` s (:mod:`gateway.failures`).
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from urllib.parse import SplitResult, urlsplit

import httpx
import trio

from gateway import config
from gateway.arrivals import Arrivals
from gateway.direct import Body, DirectTransport
from gateway.encoding import encoded
from gateway.engine import Answer, Call, Engine, relay_each
from gateway.failures import Progress
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
    """Calls one engine over a transport of httpx's kind: our own, or httpx's for https."""

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

        def transport(keepalive: int | None) -> DirectTransport | httpx.AsyncHTTPTransport:
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

    def open(self, call: Call) -> AbstractAsyncContextManager[Answer]:
        """Send ``call``; see :meth:`gateway.engine.Transport.open`."""
        return _Opening(self, call)

    async def answer(self, call: Call) -> _Answer:
        """Send ``call``; return when the response's head is there. Raises GatewayError."""
        progress = Progress(call.connected)
        transport = self._fresh if call.fresh else self._kept
        try:
            if isinstance(transport, httpx.AsyncHTTPTransport):
                request = self._request(call, progress)
                del call  # It holds the body, which nobody needs once it is written.
                return _HttpxAnswer(await transport.handle_async_request(request), progress)
            pieces = encoded(call.method, call.target, call.headers, call.body)
            del call
            body = await transport.call(pieces, self._timeout["connect"], progress.writing)
            return _DirectAnswer(body, progress)
        except httpx.TransportError as error:
            raise progress.failure(error) from None

    def _request(self, call: Call, progress: Progress) -> httpx.Request:
        return httpx.Request(
            call.method.decode("ascii"),
            self._url,
            headers=call.headers,
            stream=_Body(call.body),
            # The target goes past httpx's URL, which would quote it anew.
            extensions={"timeout": self._timeout, "trace": progress.event, "target": call.target},
        )

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


class _Opening:
    """A call, from its sending to the end of its answer."""

    def __init__(self, transport: HttpxTransport, call: Call) -> None:
        self._transport = transport
        self._call = [call]  # Taken out when it is sent.
        self._answer: _Answer | None = None

    async def __aenter__(self) -> _Answer:
        self._answer = await self._transport.answer(self._call.pop())
        return self._answer

    async def __aexit__(self, *_: object) -> None:
        assert self._answer is not None
        await self._answer.aclose()


class _DirectAnswer:
    """What has come over our own transport."""

    def __init__(self, body: Body, progress: Progress) -> None:
        self.status, self.headers = body.status, body.headers
        self._body = body
        self._progress = progress
        progress.answered = True

    async def receive(self) -> bytes:
        try:
            return await self._body.read()
        except httpx.TransportError as error:
            raise self._progress.failure(error) from None

    async def relay(self, take: Callable[[bytes], int], most: int) -> bool:
        try:
            return await self._body.relay(take, most)
        except httpx.TransportError as error:
            raise self._progress.failure(error) from None

    async def aclose(self) -> None:
        await self._body.aclose()


class _HttpxAnswer:
    """What has come over httpx's transport."""

    def __init__(self, response: httpx.Response, progress: Progress) -> None:
        self.status = response.status_code
        self.headers: RawHeaders = response.headers.raw
        assert isinstance(response.stream, httpx.AsyncByteStream)
        self._stream = response.stream
        self._body = response.stream.__aiter__()
        self._progress = progress
        progress.answered = True

    async def receive(self) -> bytes:
        try:
            async for data in self._body:
                if data:
                    return data
        except httpx.TransportError as error:
            raise self._progress.failure(error) from None
        return b""

    async def relay(self, take: Callable[[bytes], int], most: int) -> bool:
        return await relay_each(self, take)

    async def aclose(self) -> None:
        await self._stream.aclose()
        # If the body was cut, httpcore's generators are still suspended in it. Reading on from what is
        # closed ends them here, and not in the garbage collector.
        with trio.CancelScope(shield=True), suppress(httpx.TransportError):
            async for _ in self._body:
                pass


_Answer = _DirectAnswer | _HttpxAnswer
