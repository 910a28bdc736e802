#!/bin/sh
# Ollama, started so that it fits the gateway: sh deploy/engines/ollama.sh
#
# The gateway's table for it:
#
#     [[engine]]
#     name = "ollama"
#     kind = "ollama"
#     url = "http://127.0.0.1:11434"
#     slots = 4
#     models = ["auto"]
#
# slots is OLLAMA_NUM_PARALLEL: with more, requests wait inside Ollama. No kv_tokens: Ollama allots
# OLLAMA_CONTEXT_LENGTH to each sequence, so that four always fit. It can't be asked whether an aborted request has
# stopped: its slot is free after reclaim_seconds (1).
set -eu

# This machine alone: whoever reaches Ollama past the gateway is load that isn't counted.
export OLLAMA_HOST="${OLLAMA_HOST:-127.0.0.1:11434}"

# Sequences at once of a loaded model: the gateway's slots. For some models Ollama takes fewer, whatever stands here; its log
# says so.
export OLLAMA_NUM_PARALLEL="${SLOTS:-4}"

# One model in memory. With several, each has its own OLLAMA_NUM_PARALLEL, and the gateway's slots count them together:
# then slots may be that, times the models that fit.
export OLLAMA_MAX_LOADED_MODELS="${OLLAMA_MAX_LOADED_MODELS:-1}"

# The longest request, prompt and answer. What is longer loses its beginning, without a word. Memory: this, times
# OLLAMA_NUM_PARALLEL.
export OLLAMA_CONTEXT_LENGTH="${CONTEXT:-8192}"

# Ollama's own queue. The gateway keeps it empty, but for a moment after requests that were cut short; small, so that it
# shows (503) if somebody comes past the gateway.
export OLLAMA_MAX_QUEUE="${OLLAMA_MAX_QUEUE:-16}"

# How long a model stays in memory without requests: for ever. By default it is five minutes, and whoever comes after them
# waits until it is loaded (stream.first_byte_seconds has to allow for that).
export OLLAMA_KEEP_ALIVE="${OLLAMA_KEEP_ALIVE:--1}"

exec ollama serve
