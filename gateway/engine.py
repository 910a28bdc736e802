"""One configured engine: its ledger, and the way to call it.

How bytes travel to an engine is an edge's business (:mod:`gateway.transport`); here
is only what the request's nursery needs to know of it.
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from gateway import config
from gateway.headers import EnginePolicy
from gateway.health import Health
from gateway.ledger import Ledger, Slot
from gateway.profiles import PROFILES, Load
from gateway.words import RawHeaders

_grants = count(1)
"""Numbers the grants of all engines."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it goes up.

    ``fresh`` asks for a connection that has carried nothing yet. ``connected`` is called
    once there is a connection, in the step in which the first bytes are written or before it.
    """

    target: bytes
    headers: RawHeaders
    body: bytes
    fresh: bool
    connected: Callable[[], None]
    method: bytes = b"POST"


class Answer(Protocol):
    """An engine's response whose head has arrived."""

    status: int
    headers: RawHeaders

    async def receive(self) -> bytes:
        """Return the next bytes of the body, ``b""`` at its clean end.

        Raises EngineError when the body breaks off or breaks HTTP.
        """

    async def relay(self, take: Callable[[bytes], int], most: int) -> bool:
        """Give the body's bytes to ``take`` as they come, until it returns 0.

        ``most`` is how many bytes the first read may bring, and what ``take`` returns how many the
        next may: a wish, which not every connection can grant. ``take`` may be called in another
        task's turn. Returns False at the body's clean end, True when ``take`` has declined to go on
        (if that was at the end, either). Raises as :meth:`receive` does.
        """


async def relay_each(answer: Answer, take: Callable[[bytes], int]) -> bool:
    """Relay as :meth:`Answer.relay` says, by receiving: for answers that know no shorter way."""
    while data := await answer.receive():
        if not take(data):
            return True
    return False


class Transport(Protocol):
    """The way to one engine."""

    def open(self, call: Call) -> AbstractAsyncContextManager[Answer]:
        """Send ``call``; enter when the response's head is there.

        Leaving it before the body's clean end closes the connection. Raises EngineError.
        """

    def connect_within(self, seconds: float) -> None:
        """Take so long to make a connection, from now on; 0: as long as it takes."""

    async def aclose(self) -> None:
        """Close the idle connections."""


class Engine:
    """An engine, its capacity and its transport."""

    def __init__(
        self,
        settings: config.Engine,
        transport: Transport,
        *,
        host: bytes,
        prefix: bytes,
        health: config.Health | None = None,
    ) -> None:
        self.settings = settings
        self.name = settings.name
        self.ledger = Ledger(settings.slots, settings.kv_tokens)
        self.as_they_are = 0
        """Requests that went up unchanged though this kind of engine stops better if it streams."""
        self.health = Health(health or config.Health())
        self.load: Load | None = None
        """What it has said last that it is doing, if it can be asked."""
        self.learnt: tuple[str, ...] = ()
        """The models that it lists, if it is asked for them."""
        self.answers: Counter[int] = Counter()
        """How many it has given, by the first digit of their status."""
        self.last_granted = 0
        """The place of its last grant in the order of all."""
        self.profile = PROFILES[settings.kind]
        self.paths = self.profile.paths
        self._host = host
        self.policy = self._policy()
        self._elsewhere = (0, 0)
        self.shared = False
        """Another gateway uses it too, for a while: what runs on it that isn't ours is no stranger's."""
        self.retired = False
        """It isn't configured any more, and is let go when it is free."""
        self.tls: ssl.SSLContext | None = None
        """Whom it is believed to be by, where it is called over TLS."""
        self.transport = transport
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"<Engine {self.name} {self.ledger!r}>"

    def apply(self, settings: config.Engine, health: config.Health, *, connect_seconds: float) -> None:
        """Have other settings from now on; but name, kind and address, which make it what it is."""
        self.settings, self.health.settings = settings, health
        self.used_elsewhere(*self._elsewhere)
        self.policy = self._policy()
        self.transport.connect_within(connect_seconds)

    def used_elsewhere(self, slots: int, tokens: int) -> None:
        """Leave free so many slots, and tokens of its cache: the process before us uses them still."""
        self._elsewhere = (slots, tokens)
        self.shared = slots > 0
        settings = self.settings
        # A cache of 0 would be one that isn't counted.
        kv_tokens = max(1, settings.kv_tokens - tokens) if settings.kv_tokens else 0
        self.ledger.resize(max(0, settings.slots - slots), kv_tokens)

    def could_hold(self, cost: int, tokens: int) -> bool:
        """Whether a request of so many slots and tokens could ever fit, once it is all ours and free."""
        settings = self.settings
        return cost <= settings.slots and (not settings.kv_tokens or tokens <= settings.kv_tokens)

    def _policy(self) -> EnginePolicy:
        settings = self.settings
        return EnginePolicy(
            host=self._host,
            api_key=settings.api_key,
            fixed=tuple((name.encode(), value.encode()) for name, value in settings.headers.items()),
            withheld=self.profile.withheld,
        )

    def granted(self, slot: Slot, now: float) -> None:
        """One of its slots was granted."""
        self.last_granted = next(_grants)
        self.health.granted(slot, now)

    @property
    def in_use(self) -> bool:
        """Whether it may be given requests at all: it is configured, and no operator keeps it free."""
        return not (self.retired or self.health.drained)

    @property
    def serves_any(self) -> bool:
        """Whether it takes every model name (``models = ["*"]``)."""
        return self.settings.models == ("*",)

    @property
    def learns(self) -> bool:
        """Whether its models are those that it lists itself (``models = ["auto"]``)."""
        return self.settings.models == ("auto",)

    @property
    def models(self) -> Sequence[str]:
        """The models it has by name; none if it takes any."""
        if self.serves_any:
            return ()
        return self.learnt if self.learns else self.settings.models

    def serves(self, model: str | None) -> bool:
        """Whether a request for ``model`` can go here; None is a body that names no model."""
        return self.serves_any or model in self.models

    def target(self, raw_path: bytes, query: bytes) -> bytes:
        """Return the request target for a path of ours."""
        target = self._prefix + raw_path
        return target + b"?" + query if query else target

    def open(self, call: Call) -> AbstractAsyncContextManager[Answer]:
        """Call the engine. See :meth:`Transport.open`."""
        return self.transport.open(call)
