"""One call of an engine: what goes up, and what becomes of the slot when it is cut short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from math import inf
from types import TracebackType

import msgspec
import trio

from gateway.clocks import EngineClock
from gateway.engine import Answer, Call
from gateway.errors import EngineError
from gateway.events import NdjsonTail, SseTail, Tail, error_in
from gateway.headers import Fields, find, to_engine
from gateway.intake import Intake
from gateway.ledger import Slot
from gateway.profiles import AS_IT_IS, AskUsage, Work
from gateway.profiles.unasked import ask_usage
from gateway.reclaim import Reclaimer
from gateway.request import Request
from gateway.splice import set_fields
from gateway.usage import Meter
from gateway.words import Phase, RawHeaders, ReclaimedBy

REST_SECONDS = 1.0
"""How long an engine is left alone that answers 429 and doesn't say how long."""


_NOT_MADE_FOR_IT = frozenset({501, 505})
"""A request's own doing: llama.cpp gives 501 to embeddings unless it was started for them."""


def _retry_after(headers: RawHeaders) -> float | None:
    """Read ``Retry-After`` in seconds (RFC 9110, 10.2.3); a date is taken for not said: clocks differ."""
    value = (find(headers, b"retry-after") or b"").strip()
    return float(value) if value.isdigit() else None


class Attempt:
    """A request's attempt at one engine, on a slot of it; ``fields`` are those of its body.

    ``ask`` is where a stream is to tell its usage, as far as this kind of engine can be asked for it;
    ``model`` is what the engine calls the model, if that isn't what the client wrote.

    Left by an exception, it hands the slot over to the engine's reclaimer: the engine may go on
    without us. Not if it has nothing of ours (the request wasn't written, or to a dead connection),
    has refused, or has sent its last event.
    """

    def __init__(
        self,
        request: Request,
        reclaimer: Reclaimer,
        slot: Slot,
        fields: Sequence[tuple[str, msgspec.Raw]],
        ask: AskUsage = "no",
        model: str | None = None,
    ) -> None:
        self._request = request
        self._reclaimer = reclaimer
        self.slot = slot
        self.engine = reclaimer.engine
        profile = self.engine.profile
        self._id = profile.upstream_id(request.id, request.attempts)
        self.marks = request.tried(self.engine.settings, model)
        self._refused = False
        self._meter: Meter | None = None
        self.intake: Intake | None = None
        """What is to be done to the bytes of the answer, if anything."""
        self._rewrite = AS_IT_IS
        self._asked, self._fields = b"", fields
        self._lengths: Sequence[tuple[str, int]] = ()
        if request.route in profile.rewrites:
            self._rewrite = profile.rewrite(request.route, bool(request.stream), _Fields(fields), self._id)
        how = min(ask, profile.tells_usage, key=("no", "end", "each").index)
        if request.stream and how != "no":
            self._rewrite = ask_usage(self._rewrite, request.route, _Fields(fields), how)
        self._values = dict(self._rewrite.fields)
        if model is not None:
            self._values["model"] = msgspec.json.encode(model)
        if self._values:
            self._lengths = [(name, len(memoryview(raw))) for name, raw in fields]

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        request = self._request
        self.marks.closed = trio.current_time()
        if isinstance(error, EngineError) and error.stale:
            request.meter = None  # The engine has had nothing of it.
            return
        if self.slot.written == inf:
            return
        if error is None and not self._refused and request.tail.complete():
            self.engine.health.completed()
        if error is None or self._refused or request.tail.done:
            self._reclaimer.ended.add(trio.current_time(), max(self.slot.cost, self.slot.sequences))
            return
        work = Work(request.route, self._id, self.slot.cost)
        decoding = request.phase is Phase.STREAMING and request.tail.content_seen
        request.reclaim = reclaim = self._reclaimer.take(self.slot, work, decoding=decoding)
        if reclaim.by is not ReclaimedBy.NONE:  # Else nobody waits for it.
            self.marks.reclaim = reclaim

    def open(self, body: bytes, fresh: bool, clock: EngineClock) -> AbstractAsyncContextManager[Answer]:
        """Call the engine. See :meth:`gateway.engine.Transport.open`."""
        request, engine = self._request, self.engine
        self._asked = body

        def connected() -> None:
            # The engine has the request already: what can be done meanwhile is done here.
            request.meter = self._measured()
            self.slot.written = self.marks.connected = trio.current_time()
            request.phase = Phase.PREFILL
            clock.connected()

        if self._rewrite.as_it_is:
            engine.as_they_are += 1
        body = set_fields(body, self._lengths, self._values)
        headers = to_engine(
            self._headers(), engine.policy, request.caller, request_id=self._id, length=len(body)
        )
        return engine.open(
            Call(
                target=engine.target(request.route.encode("ascii"), request.query),
                headers=headers,
                body=body,
                fresh=fresh,
                connected=connected,
            )
        )

    def _measured(self) -> Meter:
        if self._meter is None:
            request, kind = self._request, self.engine.settings.kind
            stream = bool(request.stream) or self._rewrite.gathered
            self._meter = Meter(request.route, kind, stream, self._asked, self._fields)
            self._asked, self._fields = b"", ()
        return self._meter

    def _headers(self) -> Fields:
        request = self._request
        if request.trace is None:
            return request.headers
        return [*request.headers, *request.trace.onward(self.marks.span_id or request.trace.span_id)]

    def answered(self, answer: Answer, tail: Tail) -> Intake:
        """The engine's head is there; return what is done to the bytes behind it, which ``tail`` watches."""
        meter = self._measured()
        self._refused = answer.status >= 400
        self.engine.answers[answer.status // 100] += 1
        self.marks.status = answer.status
        meter.answered(answer.status, tail)
        self._judge(answer)
        # An answer that isn't a stream is the engine's own word, whatever was asked for.
        rewrite = self._rewrite if isinstance(tail, SseTail) else AS_IT_IS
        self.intake = Intake(rewrite, self._request.route, meter)
        return self.intake

    def _judge(self, answer: Answer) -> None:
        """Take an error answer for what it says of the engine.

        A client's own fault (4xx) says nothing, nor does what this engine was never made for (501, 505).
        """
        now, health = trio.current_time(), self.engine.health
        if answer.status in (429, 503) and (pause := _retry_after(answer.headers)) is not None:
            health.rest(now, pause)
        elif answer.status == 429:
            health.rest(now, REST_SECONDS)
        if answer.status >= 500 and answer.status not in _NOT_MADE_FOR_IT:
            health.failed(self.slot, now, f"it answers {answer.status}")

    def told_an_error(self, *, begun: bool = False) -> None:
        """There is an error in the stream, though its status was 200; ``begun``: behind some output."""
        self._refused = True  # It has ended the work, and this is no success.
        self.marks.error = "error_event"
        reason = "it tells an error in its stream"
        self.engine.health.failed(self.slot, trio.current_time(), reason, begun=begun)

    def ended_with(self, end: bytes) -> None:
        """The stream has ended, with these bytes as its last: there may be an error in them."""
        of_events = isinstance(self._request.tail, SseTail | NdjsonTail)
        if of_events and not self._refused and error_in(end) is not None:
            self.told_an_error(begun=True)

    def begun(self) -> None:
        """The answer has begun: a stream is in the engine's gauges, a whole answer may be out of them."""
        if self.marks.begun is None:
            self.marks.begun = trio.current_time()
        if not self._refused:
            self.engine.health.succeeded(self.slot, self.slot.written, trio.current_time())
        if isinstance(self._request.tail, SseTail | NdjsonTail):
            self.slot.counted = self._request.tail.content_seen
        else:
            self.slot.held_back = True

    @contextmanager
    def holding_back(self) -> Iterator[None]:
        """Nothing is read of the answer meanwhile: the engine may be done with it unknown to us."""
        before, self.slot.held_back = self.slot.held_back, True
        try:
            yield
        finally:
            self.slot.held_back = before


class _Fields(Mapping[str, bytes]):
    """A body's fields by name. Of their values those are copied that are asked for: there are long ones."""

    def __init__(self, fields: Sequence[tuple[str, msgspec.Raw]]) -> None:
        self._raw = dict(fields)

    def __getitem__(self, name: str) -> bytes:
        return bytes(self._raw[name])

    def __contains__(self, name: object) -> bool:
        return name in self._raw

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)
