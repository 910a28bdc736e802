"""An engine and a client in memory, and a gateway between them: what happens when is the test's to say.

A script is what one call of the engine does, step by step: `CONNECTED`, a `Head`, body bytes, a pause in
seconds, an event to wait for, `END`, an exception to raise. The client behaves as one of our server:
its leaving is told at once, and a write to it can be stuck, can be cancelled, and comes to nothing after it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import trio
from trio.testing import wait_all_tasks_blocked

from gateway import config
from gateway.engine import Call, Engine, relay_each
from gateway.errors import Code, EngineError, GatewayError
from gateway.gateway import Gateway
from gateway.headers import Caller
from gateway.nursery import infer, serve
from gateway.request import Request
from gateway.response import Response
from gateway.words import RawHeaders

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","stream":true}'
EVENT = b'data: {"x":1}\n\n'
LAST = b"data: [DONE]\n\n"
HALF = b'data: {"x":'

_LAST_WORDS = (b"[DONE]", b"message_stop", b"response.completed", b'"done":true')


class Word(Enum):
    """A step without data of its own."""

    CONNECTED = "there is a connection; the request is about to be written"
    END = "the body's clean end"


CONNECTED, END = Word.CONNECTED, Word.END


@dataclass(frozen=True)
class Head:
    """The head of the engine's answer."""

    status: int = 200
    media: bytes = b"text/event-stream"
    headers: tuple[tuple[bytes, bytes], ...] = ()


Step = Word | Head | bytes | float | trio.Event | Exception
Script = Sequence[Step]

OPENING: tuple[Step, ...] = (CONNECTED, Head())
WELL: tuple[Step, ...] = (*OPENING, EVENT, EVENT, LAST, END)
"""A short answer without fault."""


def broke_off() -> EngineError:
    return EngineError(Code.ENGINE_FAILED, "The engine's answer broke off: reset.")


def stale() -> EngineError:
    return EngineError(Code.ENGINE_FAILED, "The engine failed before it answered.", stale=True)


class Body(bytes):
    """A body whose end can be seen."""

    alive = 0

    def __init__(self, _: bytes) -> None:
        Body.alive += 1

    def __del__(self) -> None:
        Body.alive -= 1


class FakeCall:
    """One call of the engine, and its answer (`gateway.engine.Answer`)."""

    def __init__(self, transport: FakeTransport, call: Call, script: Script) -> None:
        self.call = call
        self.request_id = dict(call.headers)[b"X-Request-Id"].decode()
        self.order = 0  # its place in what happened
        self.closed_at: float | None = None
        self.working = True  # it still makes the answer: until its last word, or until it is cut off
        self.status = 0
        self.headers: RawHeaders = []
        self._transport = transport
        self._steps = list(script)

    async def until_head(self) -> None:
        while not isinstance(step := await self._next(), Head):
            assert step is CONNECTED, step
            self.call.connected()
        self.status = step.status
        self.headers = [(b"Content-Type", step.media), *step.headers]

    async def receive(self) -> bytes:
        step = await self._next()
        if step is END:
            self._steps.insert(0, END)
            self.worked()
            return b""
        assert isinstance(step, bytes), step
        if any(word in step for word in _LAST_WORDS):
            self.worked()
        return step

    async def relay(self, take: Callable[[bytes], int], most: int) -> bool:
        return await relay_each(self, take)

    async def _next(self) -> Step:
        await trio.lowlevel.checkpoint()
        while True:
            if not self._steps:
                await trio.Event().wait()  # Silent, until it is cut off.
            step = self._steps.pop(0)
            if isinstance(step, float | int):
                await trio.sleep(step)
            elif isinstance(step, trio.Event):
                await step.wait()
            elif isinstance(step, Exception):
                self.worked()
                raise step
            else:
                return step

    @property
    def unplayed(self) -> int:
        """How many steps are left."""
        return len(self._steps)

    def forget_call(self) -> None:
        """Let the body go, as a transport does that has sent it."""
        del self.call

    def worked(self) -> None:
        if self.working:
            self.working = False
            self._transport.working -= 1


class FakeTransport:
    """The way to one engine: the nth call plays the nth script, further ones play the last again."""

    def __init__(self, scripts: Sequence[Script], happened: list[str], name: str) -> None:
        self.calls: list[FakeCall] = []
        self.scripts = list(scripts)
        self.close_seconds = 0.0  # how long closing takes; it can't be cancelled
        self.working = 0
        self.peak = 0
        self._happened = happened
        self._name = name

    @asynccontextmanager
    async def open(self, call: Call) -> AsyncIterator[FakeCall]:
        """Play the next script."""
        number = len(self.calls)
        one = FakeCall(self, call, self.scripts[min(number, len(self.scripts) - 1)])
        del call
        one.order = len(self._happened)
        self.calls.append(one)
        self._happened.append(f"{self._name} call {number}")
        self.working += 1
        self.peak = max(self.peak, self.working)
        try:
            await one.until_head()
            yield one
        finally:
            if self.close_seconds:
                with trio.CancelScope(shield=True):
                    await trio.sleep(self.close_seconds)
            one.worked()
            one.closed_at = trio.current_time()
            self._happened.append(f"{self._name} closed {number}")

    def connect_within(self, seconds: float) -> None: ...
    async def aclose(self) -> None: ...


class FakeClient:
    """The client's side of one request (`gateway.nursery.Client`), and what it got."""

    def __init__(self, body: bytes = BODY, *, arrives: trio.Event | None = None, at_once: int = 0) -> None:
        self.at_once = at_once  # so many bytes it takes without waiting
        self.request: Request
        self.status: int | None = None
        self.headers: RawHeaders = []
        self.sent: list[bytes] = []
        self.sent_at: list[float] = []
        self.finished = False
        self.aborted_at: float | None = None
        self.dropped_body = False
        self.ended = trio.Event()  # the request's nursery is closed
        self.happened: list[str] = []
        self.left_order: int | None = None  # when the gateway learnt of it: a place in what happened
        self._body = body
        self._arrives = arrives
        self._left = trio.Event()
        self._flowing = trio.Event()
        self._flowing.set()

    @property
    def got(self) -> bytes:
        return b"".join(self.sent)

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    def leave(self) -> None:
        self._left.set()
        self._flowing.set()  # Whatever is stuck on the way to it is let go of.
        if self.left_order is None:
            self.left_order = len(self.happened)
            self.happened.append("client left")
            self.request.client_left()

    def stop_reading(self) -> None:
        self._flowing = trio.Event()

    def read_on(self) -> None:
        self._flowing.set()

    def needs_watching(self) -> bool:
        return True  # No server tells of its leaving.

    async def watch(self, request: Request) -> None:
        await self._left.wait()
        request.client_left()

    async def body(self) -> bytes:
        assert self._arrives is not None, "else it is there at once"
        await self._arrives.wait()
        return self._body

    def body_now(self) -> bytes | None:
        return self._body if self._arrives is None or self._arrives.is_set() else None

    def drop_body(self) -> None:
        self.dropped_body = True
        self._body = b""

    async def begin(self, status: int, headers: RawHeaders) -> None:
        if await self._written():
            self.status, self.headers = status, headers

    async def send(self, data: bytes) -> None:
        if await self._written():
            self._take(data)

    def outlet(self) -> Callable[[bytes], bytes | None]:
        return self._take_now

    def _take_now(self, data: bytes) -> bytes | None:
        if now := self.at_once if self._flowing.is_set() and not self._gone() else 0:
            self._take(data[:now])
        return data[now:] if now else None

    send_rest = send

    async def settled(self) -> None:
        await self._written()

    async def finish(self) -> None:
        if await self._written():
            self.finished = True

    def abort(self) -> None:
        if self.aborted_at is None:
            self.aborted_at = trio.current_time()
        self._flowing.set()

    def _take(self, data: bytes) -> None:
        self.sent.append(data)
        self.sent_at.append(trio.current_time())

    async def _written(self) -> bool:
        if self._gone():
            await trio.lowlevel.checkpoint_if_cancelled()
            return False
        await self._flowing.wait()
        await trio.lowlevel.checkpoint()
        return not self._gone()

    def _gone(self) -> bool:
        return self._left.is_set() or self.aborted_at is not None


@dataclass
class Rig:
    """A gateway in front of fake engines. `happened` is what they saw, in order."""

    gateway: Gateway
    transports: list[FakeTransport]
    happened: list[str]
    ended: list[Request] = field(default_factory=list)

    @property
    def transport(self) -> FakeTransport:
        return self.transports[0]

    @property
    def engine(self) -> Engine:
        return self.gateway.engines[0]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [request.record() for request in self.ended]

    @property
    def record(self) -> dict[str, Any]:
        (record,) = self.records
        return record

    async def serve(self, client: FakeClient, path: str = CHAT, headers: RawHeaders | None = None) -> Request:
        """Run one request to its end."""
        client.request = make_request(path, headers)
        client.happened = self.happened

        async def compose(nursery: trio.Nursery) -> Response:
            return await infer(nursery, client.request, client, self.gateway)

        try:
            await serve(client.request, client, self.gateway, compose)
        finally:
            client.ended.set()
        return client.request

    async def come(
        self, nursery: trio.Nursery, client: FakeClient | None = None, path: str = CHAT
    ) -> FakeClient:
        """Start a request; returns when everything stands still."""
        client = client or FakeClient()
        nursery.start_soon(self.serve, client, path)
        await wait_all_tasks_blocked()
        return client

    def assert_idle(self) -> None:
        """Nothing is held, nobody is live, and no engine ever had more than its slots."""
        for engine, transport in zip(self.gateway.engines, self.transports, strict=True):
            now = engine.ledger.statement()
            assert now.balanced, now
            assert (now.running, now.free) == (0, now.slots), now
            assert now.acquired == now.released, now
            assert transport.peak <= now.slots
            assert all(call.closed_at is not None for call in transport.calls)
        assert len(self.gateway.requests) == 0
        assert self.gateway.admission.waiting == 0


def make_request(path: str = CHAT, headers: RawHeaders | None = None, *, method: str = "POST") -> Request:
    return Request(
        method=method, path=path, query=b"", headers=headers or [], caller=Caller("10.0.0.1", "http")
    )


def make_rig(
    *scripts: Script,
    slots: int = 1,
    engines: int = 1,
    kind: config.Kind = "vllm",
    models: tuple[str, ...] | list[tuple[str, ...]] = ("m",),
    stream: dict[str, Any] | None = None,
    admission: dict[str, Any] | None = None,
    ended: Callable[[Request], None] | None = None,
) -> Rig:
    happened: list[str] = []
    settings = config.Config(
        stream=config.Stream(**(stream or {})),
        admission=config.Admission(**(admission or {})),
        engine=tuple(
            config.Engine(name=f"e{n}", kind=kind, url="http://e", slots=slots, models=served, reclaim="off")
            for n, served in enumerate(models if isinstance(models, list) else [models] * engines)
        ),
    )
    transports = [FakeTransport(scripts or [WELL], happened, one.name) for one in settings.engines]
    made = [
        Engine(one, transport, host=b"e", prefix=b"")
        for one, transport in zip(settings.engines, transports, strict=True)
    ]

    def note(request: Request) -> None:
        rig.ended.append(request)
        if ended is not None:
            ended(request)

    rig = Rig(Gateway(settings, made, ended=note), transports, happened)
    return rig


CANCELLED = GatewayError(Code.CANCELLED, "The request was cancelled by an operator.")
DRAINED = GatewayError(Code.DRAINING, "The gateway is shutting down; this answer ends here.")
