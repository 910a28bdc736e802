"""Ollama: it stops when the connection closes, and says nothing of what it is doing.

``/api/ps`` lists models, not requests. What is left is to wait a moment (``reclaim_seconds``).
Source: Ollama's docs/api.md.
"""

from __future__ import annotations

from gateway.dialect import ROUTES
from gateway.profiles.base import Profile


class Ollama(Profile):
    """Ollama."""

    kind = "ollama"
    paths = frozenset(ROUTES) - {"/v1/rerank", "/tokenize"}
    health_path = "/api/version"
