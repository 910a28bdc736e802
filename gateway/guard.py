"""Who may use the control plane.

On an address of this machine alone, whoever is on it may. But a browser there sends what any page tells it
to, also one whose name its owner has pointed at 127.0.0.1 (DNS rebinding): so ``Host`` has to be a name of
this machine. Where a token is configured it is demanded instead, in ``Authorization`` or in the cookie that
the page's login sets; a page of another origin has neither. What changes something has to come from the page
itself or from no page at all: browsers say which (``Sec-Fetch-Site``, ``Origin``).

Pure; ``now`` is a reading of a monotonic clock, in seconds.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

COOKIE = "gateway_session"

SESSION_SECONDS = 12 * 3600
"""How long a login lasts; the end of the process ends it too."""

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""What may be asked without a token and under any name: supervisors ask by address."""

LOGIN_PATHS = frozenset({"/login", "/assets/style.css"})
"""What whoever has no token yet may use."""

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request to the control plane, as far as it matters here; a header that is missing is empty."""

    method: str
    path: str
    host: str = ""
    origin: str = ""
    fetch_site: str = ""
    fetch_mode: str = ""
    authorization: str = ""
    cookie: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is refused: 401 for want of a token, 403 for where it comes from."""

    status: int
    message: str


class Guard:
    """Decides about each request. ``token`` returns what is configured, empty if nothing is.

    ``by_name`` is off for a plane on a unix socket: no browser comes there.
    """

    def __init__(self, token: Callable[[], str], *, by_name: bool = True) -> None:
        self._token = token
        self._by_name = by_name
        self._key = secrets.token_bytes(32)

    def refuse(self, ask: Ask, now: float) -> Refusal | None:
        """Say why a request is refused; None if it isn't."""
        if ask.path in OPEN_PATHS:
            return None
        if not (_same_origin(ask) if ask.method not in _SAFE_METHODS else _not_embedded(ask)):
            return Refusal(403, "This request was made by a page of another origin.")
        if self._token():
            if ask.path in LOGIN_PATHS or self._known(ask, now):
                return None
            return Refusal(401, "The control plane wants the token that server.admin_token names.")
        if self._by_name and not names_this_machine(ask.host):
            return Refusal(
                403,
                f"The control plane isn't to be reached as {ask.host[:100]!r}: without server.admin_token it"
                " answers to localhost and loopback addresses only.",
            )
        return None

    def login(self, token: str, now: float) -> str | None:
        """Return the cookie's value for who knows the token; None for who doesn't."""
        expected = self._token()
        if not expected or not _equal(token, expected):
            return None
        until = f"{now + SESSION_SECONDS:.0f}"
        return f"{until}.{self._signature(until)}"

    def _known(self, ask: Ask, now: float) -> bool:
        scheme, _, credentials = ask.authorization.partition(" ")
        if scheme.lower() == "bearer" and _equal(credentials.strip(), self._token()):
            return True
        until, _, signature = ask.cookie.partition(".")
        return (
            until.isascii()
            and until.isdigit()
            and len(until) <= 20
            and (_equal(signature, self._signature(until)) and now < int(until))
        )

    def _signature(self, until: str) -> str:
        # The token is in it: with another token all logins are over.
        message = f"{until}\0{self._token()}".encode()
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()


def names_this_machine(host: str) -> bool:
    """Whether a ``Host`` field (RFC 9110, 7.2) is a name of loopback; a missing one comes from no browser."""
    if not host:
        return True
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost"):  # RFC 6761, 6.3
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _not_embedded(ask: Ask) -> bool:
    """Whether who only looks is no page of another origin: a link that somebody follows is all right."""
    return ask.fetch_site in ("", "same-origin", "none") or ask.fetch_mode == "navigate"


def _same_origin(ask: Ask) -> bool:
    if ask.fetch_site and ask.fetch_site not in ("same-origin", "none"):
        return False
    if not ask.origin:
        return True
    # A proxy in front may have ended TLS: the scheme is the browser's, not ours.
    return ask.origin.partition("://")[2].lower() == ask.host.lower() != ""


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
