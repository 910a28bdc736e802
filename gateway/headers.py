"""Which header fields cross the gateway, in both directions.

Hop-by-hop fields and those that ``Connection`` names belong to one connection and
stop here (RFC 9110, 7.6.1). Framing is made anew on each side. Credentials and
request ids are the gateway's own towards engines.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from gateway.words import RawHeaders

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)

_NOT_UP = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"accept-encoding", b"x-request-id"}
"""Not sent to engines as they came: hop-by-hop, made anew, or (``Expect``) answered here."""

_FORWARDED = frozenset({b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto"})
_OF_THE_WAY = _FORWARDED | {b"host"}
CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"api-key", b"cookie"})
_NOT_DOWN = HOP_BY_HOP | {b"x-request-id", b"x-gateway-model"}
"""Not sent to clients as they came: these two are for us to say."""
_NOT_DOWN_OF_STREAMS = _NOT_DOWN | {b"cache-control", b"x-accel-buffering", b"content-length"}

_CALLER_ID = re.compile(rb"[\x21-\x7e]{1,128}")

_OF_NAMES = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NOT_IN_VALUES = b"\x00\r\n"
"""RFC 9110, 5.1 and 5.5. A client's field that came over HTTP/2 may hold what HTTP/1.1 can't say."""

Fields = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Caller:
    """Where a request came from: the client's address (empty on a unix socket) and scheme."""

    address: str
    scheme: str


@dataclass(frozen=True)
class EnginePolicy:
    """What an engine's requests carry: its ``Host``, key and fixed fields, and what it never gets."""

    host: bytes
    api_key: str | None = None
    fixed: tuple[tuple[bytes, bytes], ...] = ()
    withheld: frozenset[bytes] = frozenset()

    @cached_property
    def removed(self) -> frozenset[bytes]:
        """The fields that don't go up as a client sent them: its credentials too, if the engine has a key."""
        fixed = {name.lower() for name, _ in self.fixed}
        return (
            _NOT_UP
            | _FORWARDED
            | self.withheld
            | fixed
            | (CREDENTIALS if self.api_key is not None else set())
        )


def find(headers: Fields, name: bytes) -> bytes | None:
    """Return the first value of the field ``name`` (lower case), or None."""
    for key, value in headers:
        if key.lower() == name:
            return value
    return None


def field_lines(headers: Fields) -> bytes:
    """Write fields as they stand in a head of HTTP/1.1 (RFC 9112, 5).

    Raises ValueError if a reader would see other fields than these.

    >>> field_lines([(b"Server", b"vllm"), (b"X-Empty", b"")])
    b'Server: vllm\\r\\nX-Empty: \\r\\n'
    """
    names = [name for name, _ in headers]
    values = b"".join([value for _, value in headers])
    # (To take characters out is some ten times as quick as a pattern that looks at each.)
    if (
        b"" in names
        or b"".join(names).translate(None, _OF_NAMES)
        or len(values.translate(None, _NOT_IN_VALUES)) < len(values)
    ):
        raise ValueError("a header field has characters in it that it must not have")
    return b"".join([b"%b: %b\r\n" % (name, value) for name, value in headers])


def caller_id(headers: Fields) -> str | None:
    """Return the caller's own request id if it is fit for records and echoes.

    1 to 128 visible ASCII characters; anything else counts as none.
    """
    value = find(headers, b"x-request-id")
    return value.decode("ascii") if value is not None and _CALLER_ID.fullmatch(value) else None


def to_engine(
    headers: Fields, policy: EnginePolicy, caller: Caller, *, request_id: str, length: int
) -> RawHeaders:
    """Build the header of the request to the engine, with a body of ``length`` bytes.

    A client's own credentials go up only where the engine has no ``api_key``.
    """
    removed: Collection[bytes] = policy.removed
    if named := named_by_connection(headers):
        removed = policy.removed | named
    up: RawHeaders = [(b"Host", policy.host)]
    said: dict[bytes, bytes] = {}
    for name, value in headers:
        lowered = name.lower()
        if lowered in _OF_THE_WAY:
            if lowered == b"x-forwarded-for" and lowered in said:
                said[lowered] += b", " + value
            else:
                said.setdefault(lowered, value)
        if lowered not in removed:
            up.append((name, value))
    up.append((b"Accept-Encoding", b"identity"))
    up.append((b"X-Request-Id", request_id.encode("ascii")))
    hops = [hop for hop in (said.get(b"x-forwarded-for"), caller.address.encode("ascii")) if hop]
    if hops:
        up.append((b"X-Forwarded-For", b", ".join(hops)))
    up.append((b"X-Forwarded-Proto", said.get(b"x-forwarded-proto") or caller.scheme.encode("ascii")))
    if forwarded_host := said.get(b"x-forwarded-host") or said.get(b"host"):
        up.append((b"X-Forwarded-Host", forwarded_host))
    if policy.api_key is not None:
        up.append((b"Authorization", b"Bearer " + policy.api_key.encode("utf-8")))
    up.extend(policy.fixed)
    up.append((b"Content-Length", b"%d" % length))
    return up


def to_client(headers: Fields, *, request_id: str, event_stream: bool, bodiless: bool = False) -> RawHeaders:
    """Build the header of the response to the client.

    Repeated fields are kept in order. A ``bodiless`` response (204, 304) loses a length that
    isn't its own (RFC 9110, 8.6). An event stream is marked so that nothing on the
    way stores or gathers it (``X-Accel-Buffering`` is nginx's word).
    """
    removed: Collection[bytes] = _NOT_DOWN_OF_STREAMS if event_stream else _NOT_DOWN
    if bodiless:
        removed = {*removed, b"content-length"}
    if named := named_by_connection(headers):
        removed = {*removed, *named}
    down = [(name, value) for name, value in headers if name.lower() not in removed]
    if event_stream:
        down += [(b"Cache-Control", b"no-cache"), (b"X-Accel-Buffering", b"no")]
    down.append((b"X-Request-Id", request_id.encode("ascii")))
    return down


def list_size(headers: Fields) -> int:
    """Return the size of header fields as HTTP/2 counts it (RFC 9113, 6.5.2), in bytes."""
    return sum([len(name) + len(value) + 32 for name, value in headers])


def named_by_connection(headers: Fields) -> frozenset[bytes]:
    """Return the lower-case field names that ``Connection`` declares hop-by-hop."""
    values = [value for name, value in headers if name.lower() == b"connection"]
    if not values:
        return frozenset()
    return frozenset(token.strip().lower() for value in values for token in value.split(b","))
