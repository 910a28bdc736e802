"""Any engine with OpenAI's routes, of which nothing else is known."""

from __future__ import annotations

from gateway.profiles.base import Profile


class OpenAI(Profile):
    """A generic engine."""

    kind = "openai"
