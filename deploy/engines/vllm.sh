#!/bin/sh
# vLLM, started so that it fits the gateway: sh deploy/engines/vllm.sh [FLAGS]. Here: a 7 B model on one GPU of 24 GiB.
#
# The gateway's table for it:
#
#     [[engine]]
#     name = "vllm"
#     kind = "vllm"
#     url = "http://127.0.0.1:8000"
#     slots = 32
#     kv_tokens = 101376
#     models = ["qwen2.5-7b"]
#
# slots is --max-num-seqs: with more, requests wait inside vLLM. kv_tokens is "GPU KV cache size" of vLLM's log;
# this one is what `gateway size --gpu-memory 24GiB --context 16384` says beforehand.
set -eu

MODEL="${MODEL:-Qwen/Qwen2.5-7B-Instruct}"
NAME="${NAME:-qwen2.5-7b}"
PORT="${PORT:-8000}"
SLOTS="${SLOTS:-32}"
CONTEXT="${CONTEXT:-16384}"

# --host                    This machine alone: whoever reaches vLLM past the gateway is load that isn't counted.
# --served-model-name       What clients write, and what stands in `models`.
# --max-num-seqs            Sequences at once: the gateway's slots. About kv_tokens / the tokens of a usual request
#                           (3,072 here); longer ones wait in the gateway until kv_tokens has room for them. More than has
#                           room, and vLLM preempts: it throws away what it has computed and computes it again.
# --max-model-len           The longest request, prompt and answer. vLLM doesn't start if not one of that length fits.
# --gpu-memory-utilization  vLLM's part of the GPU's memory: what the weights and the work leave of it is the KV cache.
# --enable-prefix-caching   Prompts that begin alike share their cache (vLLM's default). With several engines,
#                           policy = "prefix" of a route sends them to the engine that has it.
#
# Left alone: GET /metrics, which the gateway asks whether an aborted request has stopped, is there by default.
# More than one GPU: --tensor-parallel-size 2, and `gateway size --gpus 2`. It stays one engine with one set of slots.
exec vllm serve "$MODEL" \
    --host 127.0.0.1 \
    --port "$PORT" \
    --served-model-name "$NAME" \
    --max-num-seqs "$SLOTS" \
    --max-model-len "$CONTEXT" \
    --gpu-memory-utilization 0.90 \
    --enable-prefix-caching \
    "$@"
