"""SGLang.

After a disconnect it waits 2 s before it aborts a stream, and looks at others every 4 s; so it is
told by id. It compares ids by their beginning: ours have one length. Sources: SGLang's docs
(native APIs, production metrics) and its source (0.5.23: tokenizer_manager, scheduler).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from gateway.dialect import OPENAI_PATHS
from gateway.profiles.base import AS_IT_IS, Ask, AskUsage, Load, Looks, Profile, Rewrite, Work
from gateway.profiles.exposition import STARTED, Samples, load_from

_WITH_RID = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})
_RESPONSES_PATH = "/v1/responses"
"""Its id is a field of another name."""

_ABORT_PATH = "/abort_request"

_METRICS = Samples(
    "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:generation_tokens_total", STARTED
)


class Sglang(Profile):
    """SGLang."""

    kind = "sglang"
    tells_usage: ClassVar[AskUsage] = "end"
    rewrites = OPENAI_PATHS
    health_path = "/health"
    load_paths: ClassVar[tuple[str, ...]] = ("/metrics",)
    hint = "run SGLang with --enable-metrics"
    looks = Looks(decode=0.05, prefill=0.05, confirm=0.05, busy=0.05, slowest=0.5, uncounted=1.0)
    abort_paths: ClassVar[tuple[str, ...]] = (_ABORT_PATH,)

    def rewrite(self, path: str, stream: bool, fields: Mapping[str, bytes], upstream_id: str) -> Rewrite:
        """Have the request run under our id, whatever id its client chose."""
        ours = msgspec.json.encode(upstream_id)
        if path == _RESPONSES_PATH:
            return Rewrite({"request_id": ours})
        if path in _WITH_RID or "rid" in fields:
            return Rewrite({"rid": ours})
        return AS_IT_IS

    def load(self, path: str, body: bytes) -> Load | None:
        """Read ``sglang:num_running_reqs`` and ``sglang:num_queue_reqs``."""
        return load_from(
            _METRICS.read(body),
            "sglang:num_running_reqs",
            "sglang:num_queue_reqs",
            "sglang:generation_tokens_total",
            "sglang:token_usage",
        )

    def aborts(self, path: str, works: Sequence[Work]) -> Sequence[Ask]:
        """Abort each by its ``rid``, and with it those of its sequences, which begin with it."""
        return [
            Ask(path, "POST", msgspec.json.encode({"rid": work.upstream_id}))
            for work in works
            if work.route in _WITH_RID or work.route == _RESPONSES_PATH
        ]
