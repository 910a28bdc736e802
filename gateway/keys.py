"""``gateway key new``: make an API key, print it once, and the line for the configuration."""

from __future__ import annotations

import secrets

from gateway.tenants import digest_of

_BYTES = 32


def run(name: str) -> int:
    """Print a new key for the tenant ``name`` and what to write into the file. Returns the exit code."""
    key = f"sk-{name}-{secrets.token_urlsafe(_BYTES)}"
    print(f"The key, for whoever is to use it; it can't be shown again:\n\n    {key}\n")
    print(
        f'For config.toml, in the [[tenant]] with name = "{name}" (among its other keys, if it has some):\n'
    )
    print(f'    keys = ["{digest_of(key)}"]')
    return 0
