"""W3C Trace Context: which trace a request belongs to, as its head says, and what engines are told of it.

Pure, and without OpenTelemetry: this is all of tracing that the way of a request itself needs.

Source: W3C Trace Context (Recommendation, 23 November 2021), whose sections are named below; the second
flag is that of its level 2. The rule for shares is the OpenTelemetry SDK's ``TraceIdRatioBased``, so that
services with the same share choose the same traces.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.words import RawHeaders

Fields = Sequence[tuple[bytes, bytes]]

TRACEPARENT = b"traceparent"
TRACESTATE = b"tracestate"

SAMPLED = 0x01
"""The caller may have recorded its part of the trace (3.2.2.5.1)."""
RANDOM = 0x02
"""The trace's id is random (level 2, 3.2.2.5.2). It is handed on as it came."""

_MOST_MEMBERS = 32
"""Of a ``tracestate`` (3.3.1.1)."""

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_MEMBER = re.compile(
    rb"([a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    rb"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
"""``key=value`` (3.3.1.3), with a key of one part or of two."""

_IDS = 1 << 64


@dataclass(frozen=True, slots=True)
class Parent:
    """The caller's span: the ids in lower-case hexadecimal digits (32 and 16), never all zeros."""

    trace_id: str
    span_id: str
    flags: int

    @property
    def sampled(self) -> bool:
        """Whether the caller has recorded it, and wants us to."""
        return bool(self.flags & SAMPLED)


@dataclass(frozen=True, slots=True)
class Trace:
    """One request's place in a trace. ``span_id`` is its own span's, ``state`` a ``tracestate`` or empty.

    Whether it is ``sampled`` is decided once, when it comes: spans are made, and engines are told to.
    """

    trace_id: str
    span_id: str
    sampled: bool
    parent: Parent | None = None
    state: bytes = b""

    def onward(self, span_id: str) -> RawHeaders:
        """Return the fields that tell an engine of the trace; ``span_id`` is that of the call of it.

        Of a trace that isn't recorded the engine gets the caller's own word (4.2), or, if there is no
        caller, that it isn't: else the engine would begin a trace by itself.
        """
        flags = SAMPLED if self.sampled else 0
        if self.parent is not None:
            flags |= self.parent.flags & RANDOM
            if not self.sampled:
                span_id = self.parent.span_id
        fields = [(TRACEPARENT, traceparent(self.trace_id, span_id, flags))]
        if self.state:
            fields.append((TRACESTATE, self.state))
        return fields


def traceparent(trace_id: str, span_id: str, flags: int) -> bytes:
    """Write a ``traceparent`` of version 00 (3.2.2)."""
    return f"00-{trace_id}-{span_id}-{flags:02x}".encode("ascii")


def read_traceparent(value: bytes) -> Parent | None:
    """Read a ``traceparent`` (3.2.2, and 3.2.4 for versions to come); None if it is malformed."""
    found = _PARENT.fullmatch(value)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return Parent(trace_id.decode(), span_id.decode(), int(flags, 16))


def read_tracestate(values: Sequence[bytes]) -> bytes:
    """Put the values of all ``tracestate`` fields together (3.3.1); empty if anything is wrong with them.

    To drop one that can't be read is allowed (3.3), and to hand on a part of it isn't.
    """
    members = [member for value in values for each in value.split(b",") if (member := each.strip(b" \t"))]
    keys = {member.partition(b"=")[0] for member in members}
    if len(members) > _MOST_MEMBERS or len(keys) < len(members):
        return b""
    return b",".join(members) if all(map(_MEMBER.fullmatch, members)) else b""


def enter(headers: Fields, share: float) -> Trace:
    """Find a request's place: in its caller's trace, or in one that begins here (4.3).

    A caller's decision is followed. ``share`` is the part of all others that is sampled, from 0 to 1.
    """
    parents = [value for name, value in headers if name.lower() == TRACEPARENT]
    # More than one says nothing. Nor does a state without a parent (4.3, 2 and 3).
    parent = read_traceparent(parents[0].strip(b" \t")) if len(parents) == 1 else None
    if parent is None:
        trace_id = new_id(16)
        return Trace(trace_id, new_id(8), in_share(trace_id, share))
    state = read_tracestate([value for name, value in headers if name.lower() == TRACESTATE])
    return Trace(parent.trace_id, new_id(8), parent.sampled, parent, state)


def without_trace(headers: Fields) -> Fields:
    """Return header fields without those of Trace Context: an engine gets ours."""
    return [field for field in headers if field[0].lower() not in (TRACEPARENT, TRACESTATE)]


def in_share(trace_id: str, share: float) -> bool:
    """Whether a trace is in the ``share`` (0 to 1) of all: its id decides, alike everywhere."""
    return int(trace_id[16:], 16) < round(share * _IDS)


def new_id(size: int) -> str:
    """Make an id of ``size`` random bytes, in hexadecimal digits; all zeros are none (3.2.2.3, 3.2.2.4)."""
    while not int(made := os.urandom(size).hex(), 16):
        pass
    return made
