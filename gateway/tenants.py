"""Whose a request is: keys, and what their owners may use and have used."""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway import config
from gateway.errors import Code, GatewayError
from gateway.fairness import CLASSES
from gateway.headers import CREDENTIALS, Fields
from gateway.lanes import Share
from gateway.limits import Rate
from gateway.words import RawHeaders

_BEARER = re.compile(rb"(?i:bearer) +([\x21-\x7e]+)")
_KEY = re.compile(rb"[\x21-\x7e]{1,512}")


@dataclass(frozen=True, slots=True)
class Charge:
    """What a request was charged: one request, and so many tokens."""

    tokens: int


class Tenant:
    """A tenant: its share of the queue, its rates, its models."""

    def __init__(self, settings: config.Tenant) -> None:
        self.name = settings.name
        self.share = Share(settings.name)
        self._requests: Rate | None = None
        self._tokens: Rate | None = None
        self.apply(settings)

    def __repr__(self) -> str:
        return f"<Tenant {self.name}>"

    def apply(self, settings: config.Tenant) -> None:
        """Have these settings from now on. A rate that stays the same remembers what was taken."""
        self.settings, share = settings, self.share
        share.weight, share.priority = settings.weight, CLASSES.index(settings.priority)
        share.slots, share.queue = settings.slots, settings.queue
        share.unpark()
        self._requests = _rate(self._requests, settings.requests_per_minute)
        self._tokens = _rate(self._tokens, settings.tokens_per_minute)

    def may_use(self, model: str | None) -> bool:
        """Whether it may use a model; None is a body that names none."""
        return self.settings.models == ("*",) or model in self.settings.models

    def charge(self, tokens: int, now: float) -> Charge:
        """Charge a request of so many tokens, as estimated.

        Raises GatewayError ``rate_limited``; then nothing is charged.
        """
        waits = {
            "requests_per_minute": self._requests.wait(1, now) if self._requests else 0.0,
            "tokens_per_minute": self._tokens.wait(tokens, now) if self._tokens else 0.0,
        }
        limit, longest = max(waits.items(), key=lambda item: item[1])
        if longest > 0:
            raise GatewayError(
                Code.RATE_LIMITED,
                f"The limit of {getattr(self.settings, limit)} {limit.replace('_', ' ')} is reached;"
                f" try again in {math.ceil(longest)} s.",
                retry_after=max(1, math.ceil(longest)),
            )
        if self._requests is not None:
            self._requests.take(1, now)
        if self._tokens is not None:
            self._tokens.take(tokens, now)
        return Charge(tokens)

    def refund(self, charge: Charge, now: float) -> None:
        """The request never reached an engine: it costs nothing."""
        self._settle(charge, 0, 0, now)

    def correct(self, charge: Charge, tokens: int | None, now: float) -> None:
        """The request has used so many tokens, and not what was charged; None: nobody knows."""
        self._settle(charge, 1, charge.tokens if tokens is None else tokens, now)

    def _settle(self, charge: Charge, requests: int, tokens: int, now: float) -> None:
        if self._requests is not None:
            self._requests.settle(1, requests, now)
        if self._tokens is not None:
            self._tokens.settle(charge.tokens, tokens, now)

    def rate_headers(self, now: float) -> RawHeaders:
        """Say what is left, in the words that OpenAI's clients read."""
        headers: RawHeaders = []
        for rate, what in ((self._requests, b"requests"), (self._tokens, b"tokens")):
            if rate is not None:
                headers.append((b"x-ratelimit-limit-" + what, b"%d" % rate.per_minute))
                headers.append((b"x-ratelimit-remaining-" + what, b"%d" % rate.left(now)))
                headers.append((b"x-ratelimit-reset-" + what, b"%.3fs" % rate.full_in(now)))
        return headers


class Tenants:
    """All tenants, by their keys."""

    def __init__(self, settings: Iterable[config.Tenant]) -> None:
        self._known: dict[str, Tenant] = {}
        """Also those that aren't configured any more, while they have something to end."""
        self.apply(settings)

    def apply(self, settings: Iterable[config.Tenant]) -> None:
        """Have these tenants from now on; who was there keeps his place and his debts."""
        tenants = []
        for each in settings:
            tenant = self._known.get(each.name)
            if tenant is None:
                tenant = Tenant(each)
            else:
                tenant.apply(each)
            tenants.append(tenant)
        self.all = tuple(tenants)
        self._names = {tenant.name: tenant for tenant in self.all}
        leaving = {name: each for name, each in self._known.items() if each.share.held or each.share.waiters}
        self._known = {**leaving, **self._names}
        self._owners = {
            bytes.fromhex(key.removeprefix("sha256:")): tenant
            for tenant in self.all
            for key in tenant.settings.keys
        }

    def __bool__(self) -> bool:
        return bool(self.all)

    def named(self, name: str) -> Tenant | None:
        """Return the tenant with this name."""
        return self._names.get(name)

    def identify(self, headers: Fields) -> Tenant:
        """Find whose key the request's head has. Raises GatewayError ``invalid_api_key``."""
        given = [(name.lower(), value) for name, value in headers if name.lower() in _WITH_KEYS]
        keys = {_key_of(name, value.strip(b" \t")) for name, value in given}
        if not keys:
            raise _refused("No API key: send one as `Authorization: Bearer KEY` or `x-api-key: KEY`.")
        if len(given) > 1:
            raise _refused("More than one API key: send one, in one header.")
        (key,) = keys
        if key is None:
            raise _refused(
                "The API key isn't well formed: send `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )
        digest, owner = hashlib.sha256(key).digest(), None
        for known, tenant in self._owners.items():  # All of them: how long it takes tells nothing.
            if hmac.compare_digest(known, digest):
                owner = tenant
        if owner is None:
            raise _refused("The API key isn't known.")
        return owner


_WITH_KEYS = frozenset({b"authorization", b"x-api-key"})


def _rate(before: Rate | None, per_minute: int) -> Rate | None:
    if before is not None and before.per_minute == per_minute:
        return before
    return Rate(per_minute) if per_minute else None


def without_keys(headers: Sequence[tuple[bytes, bytes]]) -> RawHeaders:
    """Return the header without what could be a client's credentials: they are the gateway's business."""
    return [(name, value) for name, value in headers if name.lower() not in CREDENTIALS]


def digest_of(key: str) -> str:
    """Return a key's digest, as the configuration has it."""
    return "sha256:" + hashlib.sha256(key.encode("ascii")).hexdigest()


def _key_of(name: bytes, value: bytes) -> bytes | None:
    if name == b"authorization":
        found = _BEARER.fullmatch(value)
        return found[1] if found else None
    return value if _KEY.fullmatch(value) else None


def _refused(message: str) -> GatewayError:
    return GatewayError(Code.INVALID_API_KEY, message)
