"""How reloads of the configuration went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Reloads:
    """Counts them."""

    well: int = 0
    badly: int = 0
    last_failed: bool = False

    def done(self) -> None:
        """One went well."""
        self.well, self.last_failed = self.well + 1, False

    def failed(self) -> None:
        """One has changed nothing."""
        self.badly, self.last_failed = self.badly + 1, True
