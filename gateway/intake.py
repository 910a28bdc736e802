"""What is done to an engine's bytes on their way to the client: mostly nothing.

The closed list of it is short (docs/life-of-a-request.md): chunks that only tell the prefill's
progress are kept from clients that didn't ask, and an engine that has to stream is listened to
until its answer can be given whole.
"""

from __future__ import annotations

from gateway.errors import Code, EngineError
from gateway.profiles import Rewrite
from gateway.profiles.gathered import Gathered, GatheredError
from gateway.profiles.progress import WithoutProgress


class Intake:
    """One answer's bytes, from what the engine sent to what may pass."""

    def __init__(self, rewrite: Rewrite, path: str) -> None:
        self._progress = WithoutProgress(throughout=rewrite.throughout) if rewrite.without_progress else None
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
        return data

    def rest(self) -> bytes:
        """Return what was held back, at the end."""
        return self._progress.rest() if self._progress is not None else b""

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
