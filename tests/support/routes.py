"""The inference routes as a client asks for them and as an engine answers them, one row each.

`parts` gives an answer in the engine's own words: what opens it, one piece per token, and what closes it,
terminal marker last. Scripts play these; tests compare what arrived with what was written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True)
class Parts:
    opening: tuple[bytes, ...]
    token: Callable[[int], bytes]
    closing: tuple[bytes, ...]

    def all(self, tokens: int) -> bytes:
        return b"".join([*self.opening, *(self.token(i) for i in range(tokens)), *self.closing])


@dataclass(frozen=True)
class Route:
    path: str
    kind: str  # an engine kind that has the route
    content: Body  # the fields of a request besides model and stream
    media: str  # content type of a streamed answer
    parts: Parts | None  # None: this route never streams
    whole: Body  # the answer in one piece

    def __str__(self) -> str:
        return self.path

    def payload(self, stream: bool, **more: Any) -> Body:
        asked = {"stream": stream} if self.parts is not None else {}
        return {"model": "model", **self.content, **asked, **more}

    def whole_bytes(self) -> bytes:
        return json.dumps(self.whole).encode()


def _sse(data: Body, event: str | None = None) -> bytes:
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def _typed(kind: str, **data: Any) -> bytes:
    return _sse({"type": kind, **data}, event=kind)


def _line(**data: Any) -> bytes:
    return json.dumps({"model": "model", "created_at": "2026-01-01T00:00:00Z", **data}).encode() + b"\n"


DONE = b"data: [DONE]\n\n"


def _chat(delta: Body, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return _sse(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "model",
            "choices": [choice],
        }
    )


def _completion(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return _sse(
        {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "model", "choices": [choice]}
    )


USAGE = {"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6}
RESPONSE = {"id": "resp_1", "object": "response", "created_at": 1, "model": "model", "output": []}
MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "model": "model", "content": []}
TALK = {"messages": [{"role": "user", "content": "hello"}]}

CHAT = Route(
    "/v1/chat/completions",
    "openai",
    TALK,
    "text/event-stream",
    Parts(
        (_chat({"role": "assistant", "content": ""}),),
        lambda i: _chat({"content": f" tk{i}"}),
        (_chat({}, "stop"), DONE),
    ),
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "model",
        "usage": USAGE,
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": " tk0 tk1"}, "finish_reason": "stop"}
        ],
    },
)
COMPLETIONS = Route(
    "/v1/completions",
    "openai",
    {"prompt": "hello"},
    "text/event-stream",
    Parts((), lambda i: _completion(f" tk{i}"), (_completion("", "length"), DONE)),
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "model",
        "usage": USAGE,
        "choices": [{"index": 0, "text": " tk0 tk1", "finish_reason": "length"}],
    },
)
RESPONSES = Route(
    "/v1/responses",
    "openai",
    {"input": "hello"},
    "text/event-stream",
    Parts(
        (_typed("response.created", response={**RESPONSE, "status": "in_progress"}),),
        lambda i: _typed(
            "response.output_text.delta", item_id="msg_1", output_index=0, content_index=0, delta=f" tk{i}"
        ),
        (_typed("response.completed", response={**RESPONSE, "status": "completed"}),),
    ),
    {**RESPONSE, "status": "completed"},
)
MESSAGES = Route(
    "/v1/messages",
    "openai",
    {**TALK, "max_tokens": 16},
    "text/event-stream",
    Parts(
        (
            _typed("message_start", message=MESSAGE),
            _typed("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        ),
        lambda i: _typed("content_block_delta", index=0, delta={"type": "text_delta", "text": f" tk{i}"}),
        (
            _typed("content_block_stop", index=0),
            _typed("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 5}),
            _typed("message_stop"),
        ),
    ),
    {**MESSAGE, "content": [{"type": "text", "text": " tk0"}], "stop_reason": "end_turn"},
)
OLLAMA_CHAT = Route(
    "/api/chat",
    "ollama",
    TALK,
    "application/x-ndjson",
    Parts(
        (),
        lambda i: _line(message={"role": "assistant", "content": f" tk{i}"}, done=False),
        (_line(message={"role": "assistant", "content": ""}, done=True, done_reason="stop", eval_count=5),),
    ),
    {
        "model": "model",
        "message": {"role": "assistant", "content": " tk0"},
        "done": True,
        "done_reason": "stop",
    },
)
OLLAMA_GENERATE = Route(
    "/api/generate",
    "ollama",
    {"prompt": "hello"},
    "application/x-ndjson",
    Parts(
        (),
        lambda i: _line(response=f" tk{i}", done=False),
        (_line(response="", done=True, done_reason="stop"),),
    ),
    {"model": "model", "response": " tk0", "done": True, "done_reason": "stop"},
)
EMBEDDINGS = Route(
    "/v1/embeddings",
    "openai",
    {"input": "hello"},
    "application/json",
    None,
    {
        "object": "list",
        "model": "model",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -0.5]}],
        "usage": {"prompt_tokens": 1, "total_tokens": 1},
    },
)
OLLAMA_EMBED = Route(
    "/api/embed",
    "ollama",
    {"input": "hello"},
    "application/json",
    None,
    {"model": "model", "embeddings": [[0.5, -0.5]]},
)

ROUTES = [CHAT, COMPLETIONS, RESPONSES, MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE, EMBEDDINGS, OLLAMA_EMBED]
STREAMING = [route for route in ROUTES if route.parts is not None]
BY_PATH = {route.path: route for route in ROUTES}
