"""A collector of traces: OTLP over HTTP on loopback, in the test's own loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import h11
import pytest
import trio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.scripted import Notes


@pytest.fixture(autouse=True)
def straight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to the collector is loopback, whatever proxies this machine has."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def to(collector: Collector | str, **more: Any) -> dict[str, Any]:
    """The section `[traces]`."""
    return {"endpoint": collector if isinstance(collector, str) else collector.url, **more}


KINDS = {1: "internal", 2: "server", 3: "client"}


@dataclass(frozen=True)
class Span:
    """A span as it came; times in nanoseconds since 1970."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    start: int
    end: int
    error: bool
    told: dict[str, Any]
    remote_parent: bool

    def within(self, other: Span) -> bool:
        return other.start <= self.start <= self.end <= other.end


@dataclass
class Collector:
    """What it got. ``status`` is what it answers."""

    url: str = ""
    status: int = 200
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    _notes: Notes = field(default_factory=Notes)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Span:
        (span,) = self.named(name)
        return span

    def below(self, parent: Span) -> list[str]:
        """The names of a span's children, in the order of their starts."""
        children = [span for span in self.spans if span.parent_id == parent.span_id]
        return [span.name for span in sorted(children, key=lambda span: (span.start, span.end))]

    async def until(self, count: int) -> None:
        """Until it has had so many requests."""
        await self._notes.until(lambda: len(self.paths) >= count)

    async def serve(self, stream: trio.SocketStream) -> None:
        connection = h11.Connection(h11.SERVER)
        body = b""
        async with stream:
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await stream.receive_some())
                elif isinstance(event, h11.Request):
                    self.paths.append(event.target.decode())
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    if self.status == 200:
                        self._take(body)
                    body = b""
                    head = h11.Response(status_code=self.status, headers=[("Content-Length", "0")])
                    await stream.send_all(connection.send(head) or b"")
                    connection.send(h11.EndOfMessage())
                    connection.start_next_cycle()
                    self._notes.changed()
                else:
                    return

    def _take(self, body: bytes) -> None:
        self.bodies.append(body)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(values(of_resource.resource.attributes))
            for of_scope in of_resource.scope_spans:
                self.spans += map(span_of, of_scope.spans)


def values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def span_of(span: Any) -> Span:
    return Span(
        name=span.name,
        kind=KINDS[span.kind],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        state=span.trace_state,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        error=span.status.code == 2,
        told=values(span.attributes),
        remote_parent=bool(span.flags & 0x200),
    )


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    """Run one. What a gateway inside has sent by its end is there when that has ended."""
    one = Collector()
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, one.serve, 0, host="127.0.0.1"))
        one.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        yield one
        nursery.cancel_scope.cancel()
