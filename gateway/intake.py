"""What is done with an engine's bytes on their way to the client: measured, they mostly pass as they are.

The closed list of what is done to them is short: chunks that only tell the prefill's progress, or
the usage, are kept from clients that didn't ask, and an engine that has to stream is listened to
until its answer can be given whole.
"""

from __future__ import annotations

from gateway.errors import Code, EngineError
from gateway.profiles import Rewrite
from gateway.profiles.gathered import Gathered, GatheredError
from gateway.profiles.progress import WithoutProgress
from gateway.profiles.unasked import WithoutUsage
from gateway.usage import Meter


class Intake:
    """One answer's bytes, from what the engine sent to what may pass."""

    def __init__(self, rewrite: Rewrite, path: str, meter: Meter) -> None:
        self.meter = meter
        """To be fed with all that comes, before it is sifted."""
        self._usage = WithoutUsage() if rewrite.without_usage else None
        self._progress = WithoutProgress(throughout=rewrite.throughout) if rewrite.without_progress else None
        self.sifts = self._usage is not None or self._progress is not None
        """Whether :meth:`sift` does anything to what may still come."""
        self._gathered = Gathered(path) if rewrite.gathered else None

    @property
    def gathers(self) -> bool:
        """Whether the answer goes out whole, when it has ended."""
        return self._gathered is not None

    def sift(self, data: bytes) -> bytes:
        """Return what of ``data`` counts."""
        if self._progress is not None:
            data = self._progress.feed(data)
            if self._progress.over:
                self._progress = None
                self.sifts = self._usage is not None
        return data if self._usage is None else self._usage.feed(data)

    def rest(self) -> bytes:
        """Return what was held back, at the end."""
        rest = self._progress.rest() if self._progress is not None else b""
        return rest if self._usage is None else self._usage.feed(rest) + self._usage.rest()

    def gather(self, data: bytes) -> None:
        """Add to the answer. Raises EngineError ``engine_failed``."""
        assert self._gathered is not None
        try:
            self._gathered.feed(data)
        except GatheredError as error:
            raise _not_understood(error) from None

    @property
    def whole(self) -> bool:
        """Whether the answer is all there."""
        return self._gathered is not None and self._gathered.done

    def answer(self) -> tuple[int, bytes]:
        """Return the whole answer's status and body. Raises EngineError ``engine_failed``."""
        assert self._gathered is not None
        try:
            return self._gathered.result()
        except GatheredError as error:
            raise _not_understood(error) from None


def _not_understood(error: GatheredError) -> EngineError:
    return EngineError(
        Code.ENGINE_FAILED, "The engine's answer can't be added up.", detail=f"Its stream: {error}."
    )
