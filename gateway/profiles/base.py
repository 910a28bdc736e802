"""The interface of a kind of engine, with what most of them have in common.

Everything here is pure: a profile says what to send and how to read what came, and others
send and receive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from gateway.dialect import OPENAI_PATHS

AskUsage = Literal["no", "end", "each"]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of the gateway's own to an engine. ``path`` is below the engine's prefix."""

    path: str
    method: str = "GET"
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Work:
    """A request as its engine knows it: its route, the id we gave it, and its number of sequences."""

    route: str
    upstream_id: str
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine says that it is doing: sequences ``running`` and ``waiting``.

    ``tokens`` counts what it has generated, ``started`` is its start (Unix time, seconds), ``kv_use`` the
    part of its KV cache in use (0 to 1); None where it doesn't say. A count that falls, or another start,
    is another process.
    """

    running: int
    waiting: int
    tokens: float | None = None
    started: float | None = None
    kv_use: float | None = None

    @property
    def busy(self) -> int:
        """All sequences that it has."""
        return self.running + self.waiting

    def is_after_restart(self, before: Load) -> bool:
        """Whether the engine was started anew since it said ``before``."""
        if self.started is not None and before.started is not None:
            return self.started > before.started
        return self.tokens is not None and before.tokens is not None and self.tokens < before.tokens


@dataclass(frozen=True, slots=True)
class Looks:
    """When an engine may be asked whether it has stopped. All in seconds.

    ``decode`` and ``prefill``: from the close of a request in that phase to the first look.
    ``confirm``: between two looks that find it stopped, at least one step of the engine.
    ``busy`` and ``slowest``: after a look that found it busy, growing from one to the other.
    ``uncounted``: how long it has to look stopped if it may not have counted the request yet
    (gauges are published by engine steps, and a request that was cut in its first step isn't in
    them). ``ghost``: between two looks for ghosts.
    """

    decode: float
    prefill: float
    confirm: float
    busy: float
    slowest: float
    uncounted: float
    ghost: float = 1.0

    def long_ago(self, now: float) -> float:
        """Return since when a request must have been there to be in the gauges for certain."""
        return now - 2 * self.uncounted


@dataclass(frozen=True, slots=True)
class Rewrite:
    """What is done to one request for its engine: ``fields`` (JSON, by name) set in its body.

    ``without_progress``: chunks that only tell the prefill's progress are kept from the client, and
    may come ``throughout`` the answer. ``without_usage``: so is what tells the usage. ``gathered``: the
    answer streams though its client wants it whole. ``as_it_is``: it would have been gathered, but
    can't be exactly.
    """

    fields: Mapping[str, bytes] = field(default_factory=dict)
    without_progress: bool = False
    throughout: bool = False
    gathered: bool = False
    as_it_is: bool = False
    without_usage: bool = False


AS_IT_IS = Rewrite()


class Profile:
    """A kind of engine. The defaults are those of an engine of which nothing is known."""

    kind: ClassVar[str]
    paths: ClassVar[frozenset[str]] = OPENAI_PATHS
    """The routes it has."""
    withheld: ClassVar[frozenset[bytes]] = frozenset()
    """Request fields (lower case) that it never gets."""
    rewrites: ClassVar[frozenset[str]] = frozenset()
    """The routes for which :meth:`rewrite` does anything."""
    health_path: ClassVar[str] = "/v1/models"
    """A cheap page that answers 200 while it is well."""
    load_paths: ClassVar[tuple[str, ...]] = ()
    """Pages that say what it is doing, asked in this order until one does; none: it can't be asked."""
    hint: ClassVar[str] = ""
    """What an operator can do if none of them says it."""
    capacity_path: ClassVar[str] = ""
    """A page that says how many sequences it runs at once; empty: it doesn't say."""
    tells_usage: ClassVar[AskUsage] = "no"
    """Where it can be had to tell its usage in a stream without changing the rest of it: at its end or in
    each chunk."""
    looks: ClassVar[Looks | None] = None
    """When it may be asked; None: never."""
    abort_paths: ClassVar[tuple[str, ...]] = ()
    """Pages that abort requests by id; the first of them that it has is used."""
    index_path: ClassVar[str] = ""
    """A page that names the pages it has; without one it is taken to have all of them."""

    def upstream_id(self, request_id: str, attempt: int) -> str:
        """Mint the id by which the engine knows the nth attempt at a request.

        No id is the beginning of another: engines compare by prefix (SGLang does).
        """
        return request_id if attempt == 1 else f"{attempt}-{request_id}"

    def rewrite(self, path: str, stream: bool, fields: Mapping[str, bytes], upstream_id: str) -> Rewrite:
        """Say what the request to ``path``, with these top-level ``fields`` (raw JSON), needs."""
        return AS_IT_IS

    def load(self, path: str, body: bytes) -> Load | None:
        """Read the answer of one of ``load_paths``; None if it doesn't say what the engine is doing."""
        return None

    def capacity(self, body: bytes) -> int | None:
        """Read how many sequences it runs at once from what ``capacity_path`` answers; None: not said."""
        return None

    def aborts(self, path: str, works: Sequence[Work]) -> Sequence[Ask]:
        """Say how to abort ``works`` at the abort page ``path``."""
        return ()
