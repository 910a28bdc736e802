"""Every key of `config.toml`: its name, type, range, default and meaning.

The ranges and formats in these types (`values`) are what `walk` checks and what `show` masks by;
`config.toml` at the top of the repository shows the same keys to operators, and a test holds the two
together. Durations are in keys that end in `_seconds`, sizes in keys that end in `_bytes`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.config.values import (
    MASK,
    PER_KIND,
    RECLAIM_SECONDS,
    Address,
    Addresses,
    ApiKey,
    AskUsage,
    Bytes,
    Count,
    Days,
    Digests,
    FilePath,
    HeaderName,
    HeaderValue,
    Kind,
    Models,
    Name,
    OutputPath,
    Policy,
    PositiveCount,
    PositiveSeconds,
    Priority,
    Reclaim,
    Seconds,
    Share,
    SpoolBytes,
    Text,
    Tokens,
    Url,
    Weight,
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
    """The control plane's address (health, metrics, admin); never one of `listen`."""
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


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[engine]]`: one inference server. `repr` masks its secrets."""

    name: Name
    """What logs, metrics and the admin API call it; unique."""
    kind: Kind
    """Whose HTTP API it speaks; "openai" is any other server with OpenAI's routes."""
    url: Url
    """http://host:port or https://host:port, with a path prefix or unix:/path; without the /v1."""
    slots: PositiveCount
    """How many sequences it can run at once: vLLM's max-num-seqs, llama.cpp's --parallel."""
    kv_tokens: Tokens = 0
    """How many tokens its KV cache holds, prompts and answers together; 0 = not counted."""
    models: Models
    """The model names it answers for; ["*"] = any, ["auto"] = those that it lists itself."""
    reclaim: Reclaim = "enforce"
    """Whether the slot of a request cut short waits for proof that the engine stopped ("enforce"), is given
    back while the proof is only measured ("observe"), or without any ("off")."""
    reclaim_seconds: Seconds = PER_KIND
    """How long that proof may take, in seconds; differs by kind. Then the work is a ghost and keeps its
    slot if the engine says that it goes on; if it can't say, the slot is free."""
    api_key: ApiKey | None = None
    """Secret. Sent to the engine as `Authorization: Bearer …`, in place of the client's."""
    headers: dict[HeaderName, HeaderValue] = msgspec.field(default_factory=dict)
    """Headers added to every request to this engine; the values are secrets."""
    ca: FilePath | None = None
    """PEM file of the authorities to trust for an https engine; without it the system's."""

    def __post_init__(self) -> None:
        if self.reclaim_seconds == PER_KIND:
            msgspec.structs.force_setattr(self, "reclaim_seconds", RECLAIM_SECONDS[self.kind].default)

    def __repr__(self) -> str:
        return f"Engine({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """What `repr` shows; rich would otherwise print the fields themselves, secrets and all."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["headers"] = dict.fromkeys(self.headers, MASK)
        if self.api_key is not None:
            shown["api_key"] = MASK
        return list(shown.items())


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of a route's `to`: a model of the engines."""

    model: Text
    """The model, as the engines call it; it is what goes up in the request's `model`."""
    weight: Weight = 1.0
    """Its part of the route's requests."""
    engines: tuple[Name, ...] = ()
    """The engines to use; none: all that have the model."""


class Route(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[route]]`: what a model's name stands for, and how its requests are spread."""

    model: Text
    """The name that clients write; unique."""
    to: tuple[Target, ...] = ()
    """What it stands for; none: the model of that name."""
    fallbacks: tuple[Text, ...] = ()
    """Models or other routes, tried in this order when no engine of those before is up."""
    policy: Policy = "least_loaded"
    """Which of several engines gets a request: the least loaded, the one that knows the beginning of its
    prompt ("prefix"), or always the same for a `session_header` ("session")."""
    session_header: HeaderName = "X-Session-Id"
    """The request header whose value is a session's."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[tenant]]`: the owner of some keys. Without any, whoever reaches the API may use it."""

    name: Name
    """What logs, metrics and the admin API call it; unique."""
    keys: Digests
    """Its API keys, each as `sha256:` and its hex digest; `gateway key new NAME` makes one."""
    models: Models = ("*",)
    """The models it may use, by the names that clients write; ["*"] = all."""
    weight: Weight = 1.0
    """Its part of the service among the waiting tenants of its priority."""
    priority: Priority = "normal"
    """A higher class goes first, always; but see `admission.promote_seconds`."""
    slots: Count = 0
    """How many slots it may hold at once; 0 = any."""
    queue: Count = 0
    """How many of its requests may wait; 0 = any (`admission.queue` holds for all together)."""
    requests_per_minute: Count = 0
    """How many requests it may make; 0 = any."""
    tokens_per_minute: Tokens = 0
    """How many tokens it may use, of prompts and answers; 0 = any."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole configuration file, checked: whoever holds one need not check anything again."""

    server: Server = msgspec.field(default_factory=Server)
    """Where clients connect."""
    stream: Stream = msgspec.field(default_factory=Stream)
    """Timeouts and buffers of one response."""
    admission: Admission = msgspec.field(default_factory=Admission)
    """The queue."""
    health: Health = msgspec.field(default_factory=Health)
    """When engines are ejected."""
    retry: Retry = msgspec.field(default_factory=Retry)
    """When another engine is tried."""
    usage: Usage = msgspec.field(default_factory=Usage)
    """What requests took."""
    engine: Annotated[tuple[Engine, ...], Meta(min_length=1)]
    """The engines, in the file's order; at least one."""
    route: tuple[Route, ...] = ()
    """Names for models; none: the engines' own."""
    tenant: tuple[Tenant, ...] = ()
    """The tenants; none: open to everybody."""

    @property
    def engines(self) -> tuple[Engine, ...]:
        """`engine` under the name that reads right in code."""
        return self.engine
