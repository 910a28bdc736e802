"""The formats of the configuration's strings. A check returns what is wrong, or None when the text is right.

No message here repeats the text: whether it may be shown is for the caller to know (`Format`).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

UNIX_PATH_BYTES = 107
"""`sockaddr_un.sun_path` is 108 bytes on Linux, one of them the closing zero."""

FIRST_INHERITED_FD = 3
"""0, 1 and 2 are the standard streams; systemd's SD_LISTEN_FDS_START is 3 too."""

MIN_TOKEN_CHARACTERS = 16
"""`openssl rand -hex 16` makes twice as many."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VISIBLE = re.compile(r"[!-~]+")
_HEADER_VALUE = re.compile(r"[!-~](?:[\t -~]*[!-~])?")
_HOST_LABELS = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
_DOTTED_NUMBERS = re.compile(r"[0-9.]+")
_PORT = re.compile(r"[0-9]{1,5}")
_URL_PATH = re.compile(r"(?:/(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})*)*")

_HOP_BY_HOP = "it belongs to one connection (hop by hop)"
REFUSED_HEADERS: Final = {
    "connection": _HOP_BY_HOP,
    "keep-alive": _HOP_BY_HOP,
    "proxy-authenticate": _HOP_BY_HOP,
    "proxy-authorization": _HOP_BY_HOP,
    "proxy-connection": _HOP_BY_HOP,
    "te": _HOP_BY_HOP,
    "trailer": _HOP_BY_HOP,
    "transfer-encoding": _HOP_BY_HOP,
    "upgrade": _HOP_BY_HOP,
    "host": "it is taken from url",
    "content-length": "it follows from the body",
    "accept-encoding": "it is always identity, because the gateway reads the stream's end",
    "x-request-id": "it is the gateway's own, one for each request",
    # llama.cpp then keeps generating for a client that may come back: closing the connection stops nothing.
    "x-conversation-id": "it makes llama.cpp go on after the client has left",
}


@dataclass(frozen=True, slots=True)
class Format:
    """How a string is checked, and what may be done with it."""

    check: Callable[[str], str | None]
    secret: bool = False
    """May come from `file:/path`, is masked by `show`, and no message ever repeats it."""
    quiet: bool = False
    """No message repeats it, because a mistake may have put a secret there."""
    path: bool = False
    """Names a file that must be readable; relative to the configuration file."""
    made: bool = False
    """That file is made when it is needed, and need not be there."""


def check_text(text: str) -> str | None:
    """The least that is asked of every string."""
    if not text:
        return "expected text, not an empty string"
    if not text.isprintable() or text.strip() != text:
        return "expected printable text without spaces around it"
    return None


def check_name(text: str) -> str | None:
    """An engine's name: usable as a metric label and in a path without quoting."""
    if _NAME.fullmatch(text):
        return None
    return "expected 1 to 64 letters, digits, dots, dashes and underscores"


def check_api_key(text: str) -> str | None:
    """What may follow `Bearer `."""
    return None if _VISIBLE.fullmatch(text) else "expected visible ASCII characters, no spaces"


def check_admin_token(text: str) -> str | None:
    """What opens the control plane: it must not be guessed."""
    if _VISIBLE.fullmatch(text) and len(text) >= MIN_TOKEN_CHARACTERS:
        return None
    return f"expected at least {MIN_TOKEN_CHARACTERS} visible ASCII characters, no spaces"


def check_digest(text: str) -> str | None:
    """A key of a tenant, as `gateway key new` writes it."""
    if _DIGEST.fullmatch(text):
        return None
    return 'expected "sha256:" and 64 hex digits: the digest, not the key itself (gateway key new NAME)'


def check_header_name(text: str) -> str | None:
    """An HTTP token that is the operator's to set."""
    if not _TOKEN.fullmatch(text):
        return "not a valid header name"
    reason = REFUSED_HEADERS.get(text.lower())
    return f"can't be set: {reason}" if reason else None


def check_header_value(text: str) -> str | None:
    """A field value of RFC 9110, without the obsolete bytes above ASCII."""
    return None if _HEADER_VALUE.fullmatch(text) else "expected printable ASCII without spaces around it"


def check_address(text: str) -> str | None:
    """What a listener can be bound to."""
    expected = 'expected "host:port", "[v6]:port", "unix:/path" or "fd://3"'
    if text.startswith("unix:"):
        return check_unix(text)
    if text.startswith("fd:"):
        number = text.removeprefix("fd://")
        fits = _PORT.fullmatch(number) is not None and int(number) >= FIRST_INHERITED_FD
        return None if fits else f"expected an inherited descriptor from fd://{FIRST_INHERITED_FD} on"
    host, colon, port = text.rpartition(":")
    if not colon or not _PORT.fullmatch(port) or not _is_host(host):
        return expected
    return None if int(port) <= 65535 else "expected a port from 0 to 65535"


def check_url(text: str) -> str | None:
    """Where an engine listens. Credentials have keys of their own, so that they are never shown."""
    if text.startswith("unix:"):
        return check_unix(text)
    if not text.startswith(("http://", "https://")):
        return "expected a URL that begins with http://, https:// or unix:/"
    return _check_http(text)


def check_collector(text: str) -> str | None:
    """Where traces go."""
    if not text.startswith(("http://", "https://")):
        return "expected a URL that begins with http:// or https://"
    if text.rstrip("/").endswith("/v1/traces"):
        return "expected a URL without /v1/traces at its end: it is added"
    return _check_http(text)


def _check_http(text: str) -> str | None:
    if not _VISIBLE.fullmatch(text):
        return "expected a URL of visible ASCII characters"
    if "?" in text or "#" in text:
        return "expected a URL without query and fragment"
    authority, slash, rest = text.partition("://")[2].partition("/")
    if "@" in authority:
        return "expected a URL without credentials: they go to api_key or headers"
    if not _is_authority(text):
        return "expected a URL with a valid host, and a port from 1 to 65535 if any"
    path = slash + rest
    if not _URL_PATH.fullmatch(path) or {".", ".."} & set(path.split("/")):
        return "expected a URL with a valid path"
    if path.rstrip("/").endswith("/v1"):
        return "expected a URL without /v1 at its end: the gateway adds the whole path of a request"
    return None


def same_socket(one: str, other: str) -> bool:
    """Whether two (valid) addresses can't both be bound. Port 0 is another port each time."""
    if one.startswith(("unix:", "fd:")) or other.startswith(("unix:", "fd:")):
        return _plain(one) == _plain(other)
    (host, port), (other_host, other_port) = _host_and_port(one), _host_and_port(other)
    if port == 0 or port != other_port:
        return False
    if (":" in host) != (":" in other_host):
        return False
    return host == other_host or bool({host, other_host} & {"0.0.0.0", "::"})


def stays_here(address: str) -> bool | None:
    """Whether only this machine reaches a (valid) address; None for an inherited one: who knows."""
    if address.startswith("unix:"):
        return True
    if address.startswith("fd:"):
        return None
    host, _ = _host_and_port(address)
    return host == "::1" or host.startswith("127.") or host.endswith(".localhost")


def _plain(address: str) -> str:
    if address.startswith("fd://"):
        return f"fd://{int(address.removeprefix('fd://'))}"
    return address


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if host.startswith("["):
        return str(ipaddress.IPv6Address(host[1:-1])), int(port)
    return {"localhost": "127.0.0.1"}.get(host.lower(), host.lower()), int(port)


def check_unix(text: str) -> str | None:
    """A unix socket."""
    path = text.removeprefix("unix:")
    if path == text or not path.startswith("/") or path.startswith("//") or path.endswith("/"):
        return 'expected "unix:/path" with an absolute path'
    if reason := check_text(path):
        return reason
    if len(path.encode()) > UNIX_PATH_BYTES:
        return f"expected a socket's path of at most {UNIX_PATH_BYTES} bytes"
    return None


def _is_host(host: str) -> bool:
    if host.startswith("[") and host.endswith("]"):
        return _is_ip(host[1:-1], ipaddress.IPv6Address)
    if _DOTTED_NUMBERS.fullmatch(host):
        return _is_ip(host, ipaddress.IPv4Address)
    return _HOST_LABELS.fullmatch(host) is not None


def _is_ip(text: str, version: type[ipaddress.IPv4Address | ipaddress.IPv6Address]) -> bool:
    try:
        version(text)
    except ValueError:
        return False
    return True


def _is_authority(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    host = parts.hostname or ""
    if parts.netloc.endswith(":") or port == 0:
        return False
    return _is_host(f"[{host}]" if "[" in parts.netloc else host)
