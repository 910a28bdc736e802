"""llama.cpp's server.

It looks for departed clients only where it writes to them, and after a second in which it had no
result for anybody. So it is always asked to stream, with its prefill's progress, and it is asked
seldom what it is doing: each answer starts that second again. Sources: llama.cpp's
tools/server/README.md, tools/server/server-queue.cpp, and behaviour measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from gateway.profiles.base import AS_IT_IS, Load, Looks, Profile, Rewrite
from gateway.profiles.exposition import Samples, load_from
from gateway.profiles.gathered import EXTRA_FIELDS, can_gather

_TEXT_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
_GENERATING_PATHS = _TEXT_PATHS | {"/v1/responses", "/v1/messages"}
_PROGRESS = {"return_progress": b"true"}


class _SlotState(msgspec.Struct):
    is_processing: bool


class _Props(msgspec.Struct):
    total_slots: int


_METRICS = Samples("llamacpp:requests_processing", "llamacpp:requests_deferred", "llamacpp:n_decode_total")


class LlamaCpp(Profile):
    """llama.cpp."""

    kind = "llamacpp"
    # With this field llama.cpp keeps a stream for replay and goes on generating after its reader
    # has left (llama.cpp PR 23226).
    withheld = frozenset({b"x-conversation-id"})
    rewrites = frozenset(_GENERATING_PATHS)
    health_path = "/health"
    load_paths: ClassVar[tuple[str, ...]] = ("/metrics", "/slots")
    capacity_path = "/props"
    hint = "run llama-server with --metrics"
    looks = Looks(decode=0.1, prefill=1.2, confirm=0.1, busy=1.2, slowest=5.0, uncounted=0.1, ghost=5.0)

    def rewrite(self, path: str, stream: bool, fields: Mapping[str, bytes], upstream_id: str) -> Rewrite:
        """Have it stream, and tell its prefill's progress: then it notices who leaves."""
        if path not in _TEXT_PATHS:
            return Rewrite(as_it_is=not stream and path in _GENERATING_PATHS)
        if not stream:
            if can_gather(path, fields):
                return Rewrite(EXTRA_FIELDS, without_progress=True, gathered=True)
            return Rewrite(as_it_is=True)
        if fields.get("return_progress") == b"true":
            return AS_IT_IS
        return Rewrite(_PROGRESS, without_progress=True, throughout=_may_be_several(fields))

    def load(self, path: str, body: bytes) -> Load | None:
        """Read ``llamacpp:requests_processing`` and ``_deferred``, or which slots are processing."""
        if path == "/slots":
            try:
                slots = msgspec.json.decode(body, type=list[_SlotState])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return None
            return Load(sum(slot.is_processing for slot in slots), 0)
        # tokens_predicted_total moves only when a request has ended, n_decode_total while it runs.
        return load_from(
            _METRICS.read(body),
            "llamacpp:requests_processing",
            "llamacpp:requests_deferred",
            "llamacpp:n_decode_total",
        )

    def capacity(self, body: bytes) -> int | None:
        """Read ``total_slots``: its ``--parallel``."""
        try:
            return msgspec.json.decode(body, type=_Props).total_slots
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None


def _may_be_several(fields: Mapping[str, bytes]) -> bool:
    return "n" in fields or "n_cmpl" in fields or fields.get("prompt", b"").startswith(b"[")
