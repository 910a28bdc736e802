"""Every key of `config.toml`: its name, type, range, default and meaning.

The ranges and formats in these types (`values`) are what `walk` checks and what `show` masks by;
`config.toml` at the top of the repository shows the same keys to operators, and a test holds the two
together. Durations are in keys that end in `_seconds`, sizes in keys that end in `_bytes`.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

import msgspec
import msgspec.inspect as ins
from msgspec import Meta

from gateway.config.sections import Admission, Health, Log, Retry, Server, Stream, Traces, Usage
from gateway.config.values import (
    MASK,
    PER_KIND,
    RECLAIM_SECONDS,
    ApiKey,
    Count,
    Digests,
    FilePath,
    HeaderName,
    HeaderValue,
    Kind,
    Models,
    Name,
    Policy,
    PositiveCount,
    Priority,
    Reclaim,
    Seconds,
    Text,
    Tokens,
    Url,
    Weight,
    masked,
)


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
        return masked(self, api_key=self.api_key and MASK, headers=dict.fromkeys(self.headers, MASK))


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
    log: Log = msgspec.field(default_factory=Log)
    """The gateway's own events."""
    traces: Traces = msgspec.field(default_factory=Traces)
    """A span for each request."""
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


@cache
def described() -> ins.StructType:
    """Return what the types of a whole configuration are, as msgspec tells it."""
    info = ins.type_info(Config)
    assert isinstance(info, ins.StructType)
    return info
