#!/bin/sh
# llama.cpp's server, started so that it fits the gateway: MODEL=file.gguf sh deploy/engines/llamacpp.sh [FLAGS]
#
# The gateway's table for it:
#
#     [[engine]]
#     name = "llamacpp"
#     kind = "llamacpp"
#     url = "http://127.0.0.1:8081"
#     slots = 4
#     models = ["local"]
#
# slots is --parallel: with more, requests wait inside llama.cpp, and there they stay when their clients leave. No kv_tokens:
# each sequence has a part of the cache of its own, so that four always fit. (With --kv-unified they share it: then
# kv_tokens = CONTEXT.)
set -eu

MODEL="${MODEL:?the .gguf file}"
NAME="${NAME:-local}"
PORT="${PORT:-8081}"
SLOTS="${SLOTS:-4}"
CONTEXT="${CONTEXT:-32768}"

# --host          This machine alone: whoever reaches llama.cpp past the gateway is load that isn't counted.
# --alias         What clients write, and what stands in `models`.
# --parallel      Sequences at once: the gateway's slots.
# --ctx-size      Tokens of the KV cache, of all sequences together: each has --ctx-size / --parallel, 8,192 here, for prompt
#                 and answer.
# --metrics       GET /metrics, which the gateway asks whether an aborted request has stopped.
# --slots         GET /slots, which it asks where there are no metrics, and where you can see what each sequence does.
# -b, -ub         Tokens of a prompt that are read in one step. llama.cpp looks between steps whether a client has left: with
#                 512 in place of 2,048 a long prompt is given up four times as soon. On a GPU, larger ones read faster.
# --n-gpu-layers  Layers on the GPU: all of them. Without a GPU it means nothing.
#
# X-Conversation-Id of clients is kept from it by the gateway: it would go on for them after they have left.
exec llama-server \
    --model "$MODEL" \
    --host 127.0.0.1 \
    --port "$PORT" \
    --alias "$NAME" \
    --parallel "$SLOTS" \
    --ctx-size "$CONTEXT" \
    --metrics \
    --slots \
    -b 512 -ub 512 \
    --n-gpu-layers 999 \
    "$@"
