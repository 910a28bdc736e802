"""vLLM, by its OpenAI-compatible server.

It aborts when the connection closes, at the end of the engine's step. Its gauges are published
by steps too: they lag by one, in both directions. Sources: vLLM's docs (Production metrics,
OpenAI-compatible server) and behaviour measured on 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from gateway.profiles.base import Ask, AskUsage, Load, Looks, Profile, Rewrite, Work
from gateway.profiles.exposition import STARTED, Samples, load_from

_ONE_ID = frozenset({"/v1/chat/completions", "/v1/messages"})
_ID_PER_PROMPT = "/v1/completions"
_RESPONSES_PATH = "/v1/responses"

_METRICS = Samples(
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total", STARTED
)


class Vllm(Profile):
    """vLLM."""

    kind = "vllm"
    tells_usage: ClassVar[AskUsage] = "each"
    health_path = "/health"
    load_paths: ClassVar[tuple[str, ...]] = ("/metrics",)
    hint = "vLLM serves GET /metrics unless it is run with --disable-log-stats"
    looks = Looks(decode=0.02, prefill=0.02, confirm=0.03, busy=0.03, slowest=0.25, uncounted=1.0)
    # The first with --enable-scale-out, the second with VLLM_SERVER_DEV_MODE=1.
    abort_paths: ClassVar[tuple[str, ...]] = ("/inference/v1/abort_requests", "/abort_requests")
    index_path = "/openapi.json"
    rewrites = frozenset({_RESPONSES_PATH})

    def rewrite(self, path: str, stream: bool, fields: Mapping[str, bytes], upstream_id: str) -> Rewrite:
        """Have a response run under our id: of other routes the header ``X-Request-Id`` says it."""
        return Rewrite({"request_id": msgspec.json.encode(upstream_id)})

    def load(self, path: str, body: bytes) -> Load | None:
        """Read ``vllm:num_requests_running`` and ``vllm:num_requests_waiting``."""
        return load_from(
            _METRICS.read(body),
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:generation_tokens_total",
            "vllm:kv_cache_usage_perc",
        )

    def aborts(self, path: str, works: Sequence[Work]) -> Sequence[Ask]:
        """Abort by the engine's own ids, which are made of ours.

        An id that names nothing does no harm; but an empty list would abort everything (at
        ``/abort_requests``).
        """
        ids = [each for work in works for each in _ids(work)]
        return [_abort(path, ids)] if ids else ()


def _ids(work: Work) -> list[str]:
    if work.route in _ONE_ID:
        return [f"chatcmpl-{work.upstream_id}"]
    if work.route == _RESPONSES_PATH:
        return [f"{work.upstream_id}_0"]
    if work.route == _ID_PER_PROMPT:
        # One id a prompt; of sequences there are as many or more.
        return [f"cmpl-{work.upstream_id}-{number}" for number in range(work.sequences)]
    return []


def _abort(path: str, ids: list[str]) -> Ask:
    return Ask(path, "POST", msgspec.json.encode({"request_ids": ids}))
