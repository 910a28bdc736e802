"""The tables of `config.toml` that are there once: what the whole gateway does.

See `schema` for how keys are described.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.config.values import (
    MASK,
    Address,
    Addresses,
    AdminToken,
    AskUsage,
    Bytes,
    CollectorUrl,
    Count,
    Days,
    FilePath,
    LogFormat,
    LogLevel,
    OutputPath,
    PositiveCount,
    PositiveSeconds,
    Seconds,
    Share,
    SpoolBytes,
    Text,
    UnixAddress,
    masked,
)


class Tls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[server.tls]`: TLS on every address of `server.listen`. The control plane stays plain."""

    certificate: FilePath
    """PEM file: the certificate, then its intermediates. A relative path starts at the configuration file."""
    key: FilePath
    """PEM file: the certificate's private key, not encrypted."""


class Server(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[server]`: where clients connect, and what one may cost before it is admitted."""

    listen: Addresses = ("127.0.0.1:8080",)
    """The API's addresses: "host:port", "[v6]:port", "unix:/path", "fd://3". Port 0 takes a free one."""
    admin: Address = "127.0.0.1:9090"
    """The control plane's address (dashboard, health, metrics, admin); never one of `listen`."""
    admin_token: AdminToken | None = None
    """Secret. What the control plane demands of whoever asks; needed unless `admin` is an address of this
    machine alone."""
    handover: UnixAddress | None = None
    """"unix:/path": where a gateway that is started asks the one that runs to hand over to it."""
    max_connections: PositiveCount = 4096
    """Client connections open at once, idle ones included."""
    drain_seconds: Seconds = 30.0
    """How long running streams may go on after SIGTERM, in seconds; 0 ends them at once."""
    max_body_bytes: Bytes = 33_554_432
    """Largest request body, in bytes; more is answered 413."""
    bodies_bytes: Bytes = 268_435_456
    """All request bodies held at one time together, in bytes; above it reading waits."""
    body_seconds: PositiveSeconds = 30.0
    """The whole request body must have arrived this many seconds after its head; else 408."""
    tls: Tls | None = None
    """Certificate and key; without this table the API is plain HTTP."""

    def __repr__(self) -> str:
        return f"Server({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return masked(self, admin_token=self.admin_token and MASK)


class Stream(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[stream]`: how long a response may be silent, and how much of it may wait for its reader."""

    connect_seconds: Seconds = 5.0
    """To open a connection to an engine, in seconds; 0 = off."""
    first_byte_seconds: Seconds = 300.0
    """Engine silent before its first body byte, in seconds (a long prefill is silent); 0 = off."""
    idle_seconds: Seconds = 120.0
    """Engine silent between two reads, in seconds; stands still while nothing is read; 0 = off."""
    total_seconds: Seconds = 3600.0
    """From the request's admission to the engine's last byte, in seconds; 0 = off."""
    stall_seconds: Seconds = 30.0
    """The client acknowledged nothing for so many seconds although there was something to send; 0 = off."""
    spool_bytes: SpoolBytes = 262_144
    """Bytes of one response held for a client slower than its engine; at least 4096."""
    heartbeat_seconds: Seconds = 0.0
    """After so many seconds of silence an event stream gets an SSE comment; 0 = off."""


class Admission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[admission]`: what happens to a request when no slot is free."""

    queue: Count = 512
    """Requests that may wait; 0 = refuse at once when no slot is free."""
    queue_seconds: PositiveSeconds = 60.0
    """How long one may wait for a slot, in seconds; then it is answered 503."""
    promote_seconds: Seconds = 30.0
    """Who has waited for so long goes with those of the next higher priority, in seconds; 0 = never."""
    max_tokens: PositiveCount = 1024
    """What a request is taken to ask for that doesn't say how long its answer may be, in tokens."""


class Health(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[health]`: when an engine is left alone, and when it is tried again."""

    failures: PositiveCount = 3
    """So many in a row, of requests or of probes, eject an engine; a refused connection does at once."""
    probe_seconds: Seconds = 5.0
    """Between two probes of an engine (a GET of its health page), in seconds; 0 = no probes."""
    probe_timeout_seconds: PositiveSeconds = 2.0
    """How long an engine may take to answer a probe, in seconds."""
    backoff_seconds: PositiveSeconds = 1.0
    """How long an ejected engine gets nothing, in seconds; doubled each time its trial fails."""
    backoff_most_seconds: PositiveSeconds = 60.0
    """The longest it can grow to, in seconds; also the most that is made of an engine's `Retry-After`."""


class Retry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[retry]`: what is asked of another engine, as long as the client has been sent nothing."""

    attempts: PositiveCount = 3
    """How many engines are called for one request at most; 1 = no retries."""
    budget: Share = 0.2
    """Retries in ten seconds, as a share of the requests that came in them, or are live if that is more."""
    floor: Count = 50
    """So many retries in ten seconds are always allowed."""


class Usage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[usage]`: the tokens of each request, kept in a file."""

    path: OutputPath | None = None
    """SQLite file, made if it isn't there; without it nothing is kept. A relative path starts at the
    configuration file."""
    flush_seconds: PositiveSeconds = 1.0
    """How many seconds a request's row may wait to be written: what a kill of the process may lose."""
    keep_days: Days = 400
    """Older rows are deleted; 0 = kept for ever."""
    ask_engine: AskUsage = "no"
    """Whether engines are asked to tell the usage of streams whose clients didn't ask: at their "end", or in
    "each" chunk where the engine can (vLLM). The clients don't see it."""


class Log(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[log]`: the gateway's own events, on standard error. Access records aren't events."""

    level: LogLevel = "info"
    """The least that is written: "debug", "info", "warning" or "error"."""
    format: LogFormat = "auto"
    """"json", one object a line; "console", for people; "auto": for people on a terminal, else JSON."""


class Traces(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[traces]`: OpenTelemetry, a span for each request. It needs the extra `otel`."""

    endpoint: CollectorUrl | None = None
    """The collector's address for OTLP over HTTP, without the /v1/traces; without it nothing is traced."""
    sample: Share = 1.0
    """The share of requests that is traced; who is asked with a `traceparent` does as that says."""
    service_name: Text = "gateway"
    """What the traces call the gateway (`service.name`)."""
