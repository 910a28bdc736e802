"""Every key of `config.toml`: its name, type, range, default and meaning.

The ranges and formats in these types are what `walk` checks and what `show` masks by; `config.toml` at the
top of the repository shows the same keys to operators, and a test holds the two together. Durations are in
keys that end in `_seconds`, sizes in keys that end in `_bytes`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from gateway.config import formats
from gateway.config.formats import Format

MASK: Final = "********"
"""Stands for a secret wherever one would be printed."""

YEAR_SECONDS = 365 * 24 * 3600
"""More than a year is a slip of the unit, milliseconds mostly."""
MAX_DAYS = 36_500
MAX_BYTES = 2**40
MAX_COUNT = 1_000_000
MAX_TOKENS = 10**12
MIN_SPOOL_BYTES = 4096

Kind = Literal["vllm", "sglang", "llamacpp", "ollama", "openai"]
Reclaim = Literal["off", "observe", "enforce"]
AskUsage = Literal["no", "end", "each"]
Priority = Literal["high", "normal", "low"]

Days = Annotated[int, Meta(ge=0, le=MAX_DAYS)]
Seconds = Annotated[float, Meta(ge=0, le=YEAR_SECONDS)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=YEAR_SECONDS)]
Bytes = Annotated[int, Meta(ge=1, le=MAX_BYTES)]
SpoolBytes = Annotated[int, Meta(ge=MIN_SPOOL_BYTES, le=MAX_BYTES)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Weight = Annotated[float, Meta(gt=0, le=MAX_COUNT)]

Text = Annotated[str, Meta(extra={"format": Format(formats.check_text)})]
Name = Annotated[str, Meta(extra={"format": Format(formats.check_name)})]
Address = Annotated[str, Meta(extra={"format": Format(formats.check_address)})]
Url = Annotated[str, Meta(extra={"format": Format(formats.check_url, quiet=True)})]
OutputPath = Annotated[str, Meta(extra={"format": Format(formats.check_text, path=True, made=True)})]
FilePath = Annotated[str, Meta(extra={"format": Format(formats.check_text, path=True)})]
ApiKey = Annotated[str, Meta(extra={"format": Format(formats.check_api_key, secret=True)})]
HeaderName = Annotated[str, Meta(extra={"format": Format(formats.check_header_name)})]
HeaderValue = Annotated[str, Meta(extra={"format": Format(formats.check_header_value, secret=True)})]

Digest = Annotated[str, Meta(extra={"format": Format(formats.check_digest, quiet=True)})]

Digests = Annotated[tuple[Digest, ...], Meta(min_length=1)]
Addresses = Annotated[tuple[Address, ...], Meta(min_length=1)]
Models = Annotated[tuple[Text, ...], Meta(min_length=1)]


class ReclaimSeconds(NamedTuple):
    """What `reclaim_seconds` is for one kind of engine."""

    default: float
    minimum: float


RECLAIM_SECONDS: Final[dict[Kind, ReclaimSeconds]] = {
    # Aborts within a step of the engine when the socket closes; a second covers one long prefill chunk.
    "vllm": ReclaimSeconds(10.0, 1.0),
    # Sleeps 2 s before it looks for leavers and then looks every 4 s: less would call a good abort late.
    "sglang": ReclaimSeconds(10.0, 5.0),
    # Notices a closed socket only after one quiet second, and looking at it sooner starts that second again.
    "llamacpp": ReclaimSeconds(1.5, 1.5),
    # These two can't be asked what they are running: each abort costs the slot for all of it. Ollama stops
    # at the next token; of a generic engine nothing is known, not even that there is something to wait for.
    "ollama": ReclaimSeconds(1.0, 0.0),
    "openai": ReclaimSeconds(0.0, 0.0),
}
PER_KIND: Final = -1.0
"""Default of `reclaim_seconds`, replaced by its kind's as soon as that is known; no `Engine` has it."""


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
    """The model names it answers for; ["*"] = any."""
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
    usage: Usage = msgspec.field(default_factory=Usage)
    """What requests took."""
    engine: Annotated[tuple[Engine, ...], Meta(min_length=1)]
    """The engines, in the file's order; at least one."""
    tenant: tuple[Tenant, ...] = ()
    """The tenants; none: open to everybody."""

    @property
    def engines(self) -> tuple[Engine, ...]:
        """`engine` under the name that reads right in code."""
        return self.engine
