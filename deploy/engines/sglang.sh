#!/bin/sh
# SGLang, started so that it fits the gateway: sh deploy/engines/sglang.sh [FLAGS]. Here: a 7 B model on one GPU of 24 GiB.
#
# The gateway's table for it:
#
#     [[engine]]
#     name = "sglang"
#     kind = "sglang"
#     url = "http://127.0.0.1:30000"
#     slots = 32
#     kv_tokens = 80000
#     models = ["qwen2.5-7b"]
#
# slots is --max-running-requests: with more, requests wait inside SGLang. kv_tokens is max_total_num_tokens of
# SGLang's log; 80,000 is a guess on the safe side (24 GiB × 0.85 less 14.2 GiB of weights, at 57,344 bytes a token, and
# some for what else it takes). Put in what the log says.
set -eu

MODEL="${MODEL:-Qwen/Qwen2.5-7B-Instruct}"
NAME="${NAME:-qwen2.5-7b}"
PORT="${PORT:-30000}"
SLOTS="${SLOTS:-32}"
CONTEXT="${CONTEXT:-16384}"

# --host                  This machine alone: whoever reaches SGLang past the gateway is load that isn't counted.
# --served-model-name     What clients write, and what stands in `models`.
# --max-running-requests  Sequences at once: the gateway's slots.
# --context-length        The longest request, prompt and answer.
# --mem-fraction-static   The part of the GPU's memory for weights and KV cache; the rest is for activations and CUDA graphs.
#                         Less of it if SGLang runs out of memory, more if its log says that much is left.
# --enable-metrics        GET /metrics, which the gateway asks whether an aborted request has stopped. Without it each
#                         request that is cut short keeps its slot for reclaim_seconds.
#
# Left alone: the radix cache, by which prompts that begin alike share their cache, is on by default.
exec python3 -m sglang.launch_server \
    --model-path "$MODEL" \
    --host 127.0.0.1 \
    --port "$PORT" \
    --served-model-name "$NAME" \
    --max-running-requests "$SLOTS" \
    --context-length "$CONTEXT" \
    --mem-fraction-static 0.85 \
    --enable-metrics \
    "$@"
