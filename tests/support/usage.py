"""Answers of engines that tell their usage, and what a meter makes of them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec

from gateway.dialect import ROUTES, tail_for
from gateway.usage import Meter, Source, Usage, prompt_size

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SSE, NDJSON, JSON = "text/event-stream", "application/x-ndjson", "application/json"
E, C, G, U = Source.ENGINE, Source.COUNTED, Source.ESTIMATED, Source.UNKNOWN


def event(data: Any, name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def typed(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)


def chat(content: Any, **more: Any) -> bytes:
    return event({"id": "1", "choices": [{"index": 0, "delta": {"content": content}}], **more})


def line(**data: Any) -> bytes:
    return json.dumps(data).encode() + b"\n"


def fields_of(body: Any) -> list[tuple[str, msgspec.Raw]]:
    return list(msgspec.json.decode(json.dumps(body).encode(), type=dict[str, msgspec.Raw]).items())


DONE = b"data: [DONE]\n\n"
BODY = {"model": "m", "messages": [{"role": "user", "content": "x" * 64}], "prompt": "x" * 64}
PROMPT = prompt_size("/v1/chat/completions", b"", fields_of(BODY))[0]


def measured(
    path: str,
    pieces: list[bytes],
    *,
    media: str = SSE,
    kind: str = "openai",
    status: int = 200,
    body: Any = BODY,
    stream: bool = True,
) -> Usage:
    meter = Meter(path, kind, stream, json.dumps(body).encode(), fields_of(body))
    tail = tail_for(ROUTES[path], [(b"Content-Type", media.encode())], status)
    meter.answered(status, tail)
    for piece in pieces:
        meter.feed(piece)
        tail.feed(piece)
    return meter.usage()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def openai(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": 0, **more}


LONG = 'the long text of it, with \\ and " and {usage} ' * 200
