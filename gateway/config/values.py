"""The types of the configuration's values: their ranges and formats, and what differs by kind of engine."""

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
Policy = Literal["least_loaded", "prefix", "session"]
Priority = Literal["high", "normal", "low"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]

Days = Annotated[int, Meta(ge=0, le=MAX_DAYS)]
Seconds = Annotated[float, Meta(ge=0, le=YEAR_SECONDS)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=YEAR_SECONDS)]
Bytes = Annotated[int, Meta(ge=1, le=MAX_BYTES)]
SpoolBytes = Annotated[int, Meta(ge=MIN_SPOOL_BYTES, le=MAX_BYTES)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Share = Annotated[float, Meta(ge=0, le=1)]
Weight = Annotated[float, Meta(gt=0, le=MAX_COUNT)]

Text = Annotated[str, Meta(extra={"format": Format(formats.check_text)})]
Name = Annotated[str, Meta(extra={"format": Format(formats.check_name)})]
Address = Annotated[str, Meta(extra={"format": Format(formats.check_address)})]
UnixAddress = Annotated[str, Meta(extra={"format": Format(formats.check_unix)})]
Url = Annotated[str, Meta(extra={"format": Format(formats.check_url, quiet=True)})]
CollectorUrl = Annotated[str, Meta(extra={"format": Format(formats.check_collector, quiet=True)})]
OutputPath = Annotated[str, Meta(extra={"format": Format(formats.check_text, path=True, made=True)})]
FilePath = Annotated[str, Meta(extra={"format": Format(formats.check_text, path=True)})]
ApiKey = Annotated[str, Meta(extra={"format": Format(formats.check_api_key, secret=True)})]
AdminToken = Annotated[str, Meta(extra={"format": Format(formats.check_admin_token, secret=True)})]
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


def masked(table: msgspec.Struct, **instead: Any) -> list[tuple[str, Any]]:
    """Return what `repr` shows of a table; rich would otherwise print the fields, secrets and all."""
    shown = {name: getattr(table, name) for name in table.__struct_fields__}
    return list({**shown, **instead}.items())
