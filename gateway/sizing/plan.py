"""From a model and a GPU's memory to the tokens and requests that an engine has room for.

Source: vLLM, which takes ``gpu_memory_utilization`` of each GPU's memory for the weights, for what a
step needs, and for the KV cache, and hands the cache out in blocks of 16 tokens. With tensor
parallelism each GPU has a share of the KV heads, and at least one.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.sizing import dtypes, parameters
from gateway.sizing.families import FAMILIES
from gateway.sizing.fields import SizingError, shown
from gateway.sizing.model import Model
from gateway.sizing.parameters import Part

BLOCK = 16
"""Tokens in a block of the cache."""

OVERHEAD = 2 * 1024**3
"""Bytes a GPU needs beside weights and cache, if nothing else is said: the activations of a prefill, CUDA
graphs, the runtime. More than most models up to 70 B take with vLLM's own settings."""

UTILIZATION = 0.9
"""The share of a GPU's memory that vLLM takes by itself."""

TYPICAL = 2048
"""Tokens of a request, prompt and answer, if nothing else is said."""

MOST_SLOTS = 256
"""Slots that are proposed at most: what vLLM runs at once by itself (``--max-num-seqs``). With more,
computing is what there's too little of, not memory."""


@dataclass(frozen=True)
class Setup:
    """What the model shall run on, and how. Sizes are bytes a GPU, lengths tokens.

    ``dtype`` and ``kv_dtype`` are "auto" or of the tables in :mod:`gateway.sizing.dtypes`; ``weights``
    are the bytes of all weights, None to count them. ``context`` is the longest request, None for the
    model's; ``typical`` is one as most are, None for :data:`TYPICAL`.
    """

    gpu_memory: int
    gpus: int = 1
    dtype: str = "auto"
    weights: int | None = None
    kv_dtype: str = "auto"
    utilization: float = UTILIZATION
    overhead: int = OVERHEAD
    context: int | None = None
    typical: int | None = None


@dataclass(frozen=True)
class Plan:
    """The outcome. Bytes are a GPU's where the name says so; ``room`` may be less than nothing.

    ``dtype`` is None and ``parts`` are empty where the weights' size was given. ``fitting`` is how many
    typical requests there is room for, ``slots`` the same, but at most :data:`MOST_SLOTS`;
    ``at_context`` is how many of the longest.
    """

    dtype: str | None
    kv_dtype: str
    kv_heads_per_gpu: int
    bytes_per_token: int
    bytes_per_token_per_gpu: int
    parts: tuple[Part, ...]
    weights: int
    weights_per_gpu: int
    usable_per_gpu: int
    room_per_gpu: int
    blocks: int
    kv_tokens: int
    typical: int
    context: int
    typical_blocks: int
    context_blocks: int
    fitting: int
    at_context: int
    slots: int
    notes: tuple[str, ...]


def plan(model: Model, setup: Setup) -> Plan:
    """Compute it.

    Raises :class:`SizingError` if the weights can't be counted, a type isn't known, the heads can't be
    shared by the GPUs, or the lengths contradict each other.
    """
    notes = list(model.notes)
    context, typical = _lengths(model, setup, notes)
    kv_heads = _kv_heads_per_gpu(model, setup.gpus, notes)
    asked = None if setup.dtype == "auto" else setup.dtype
    kv_dtype = setup.kv_dtype
    if kv_dtype == "auto":
        kv_dtype = dtypes.of_cache(model.fields, model.outer, asked)
    dtype, parts, weights = _weights(model, setup, notes)
    of_a_head = model.layers * model.head_dim * 2 * dtypes.KV_DTYPES[kv_dtype]
    usable = int(setup.gpu_memory * setup.utilization)
    share = -(-weights // setup.gpus)
    room = usable - share - setup.overhead
    blocks = max(0, room) // (of_a_head * kv_heads * BLOCK)
    typical_blocks, context_blocks = _blocks(typical, model.window), _blocks(context, model.window)
    fitting = blocks // typical_blocks
    _remark(model, notes, fitting, blocks, context_blocks, typical)
    return Plan(
        dtype=dtype,
        kv_dtype=kv_dtype,
        kv_heads_per_gpu=kv_heads,
        bytes_per_token=of_a_head * model.kv_heads,
        bytes_per_token_per_gpu=of_a_head * kv_heads,
        parts=parts,
        weights=weights,
        weights_per_gpu=share,
        usable_per_gpu=usable,
        room_per_gpu=room,
        blocks=blocks,
        kv_tokens=blocks * BLOCK,
        typical=typical,
        context=context,
        typical_blocks=typical_blocks,
        context_blocks=context_blocks,
        fitting=fitting,
        at_context=blocks // context_blocks,
        slots=min(fitting, MOST_SLOTS),
        notes=tuple(notes),
    )


def _lengths(model: Model, setup: Setup, notes: list[str]) -> tuple[int, int]:
    context = setup.context or model.context
    if context is None:
        raise SizingError(f"{model.fields.prefix}max_position_embeddings: missing; give --context")
    if model.context is not None and context > model.context:
        notes.append(
            f"the file's own context is {model.context:,} tokens; "
            "engines take a longer one only if they're told how"
        )
    typical = setup.typical or min(TYPICAL, context)
    if typical > context:
        raise SizingError(
            f"--typical: a request of {typical:,} tokens is longer than the context of {context:,}; "
            "give less, or a longer --context"
        )
    return context, typical


def _kv_heads_per_gpu(model: Model, gpus: int, notes: list[str]) -> int:
    if model.heads % gpus:
        raise SizingError(
            f"--gpus: {model.heads} attention heads can't be shared by {gpus} GPUs; "
            "give a number that divides them"
        )
    if model.kv_heads % gpus and gpus % model.kv_heads:
        raise SizingError(
            f"--gpus: {model.kv_heads} KV heads can't be shared by {gpus} GPUs, nor copied to all alike; "
            "give a number that divides them, or a multiple"
        )
    if gpus > model.kv_heads:
        notes.append(f"{gpus} GPUs share {model.kv_heads} KV heads: each has a copy of one")
    return max(1, model.kv_heads // gpus)


def _weights(model: Model, setup: Setup, notes: list[str]) -> tuple[str | None, tuple[Part, ...], int]:
    if model.kind not in FAMILIES:
        notes.append(
            f"model_type {shown(model.kind)} isn't known here: its fields are taken to mean what Llama's mean"
        )
    if setup.weights is not None:
        return None, (), setup.weights
    parts = parameters.count(model)
    dtype = dtypes.of_weights(model.fields, model.outer) if setup.dtype == "auto" else setup.dtype
    if dtype == "float32" and setup.dtype == "auto":
        notes.append("vLLM runs weights stored as float32 in 16 bits by itself; --dtype float16 sizes that")
    rest = dtypes.HALF if dtype in dtypes.QUANTISED else dtypes.WEIGHT_DTYPES[dtype]
    exact = sum(part.count * (dtypes.WEIGHT_DTYPES[dtype] if part.matrices else rest) for part in parts)
    return dtype, parts, -int(-exact // 1)


def _blocks(tokens: int, window: int | None) -> int:
    """Of the cache, that a request of so many tokens holds."""
    blocks = -(-tokens // BLOCK)
    if window is None:
        return blocks
    # The window may begin anywhere in its first block.
    return min(blocks, -(-(window - 1) // BLOCK) + 1)


def _remark(
    model: Model, notes: list[str], fitting: int, blocks: int, context_blocks: int, typical: int
) -> None:
    if fitting > MOST_SLOTS:
        notes.append(
            f"there is memory for {fitting:,} requests; {MOST_SLOTS} is what vLLM runs at once by itself "
            "(--max-num-seqs), and with more it's computing that is short"
        )
    if fitting and blocks < context_blocks:
        notes.append(
            "not one request of the full context has room, and vLLM won't start like this: "
            f"give it --max-model-len {blocks * BLOCK} or less"
        )
    if model.window is None:
        return
    notes.append(
        f"every layer looks back at {model.window:,} tokens at most (sliding_window), and a request holds "
        "no more; while a prompt is read, the piece being read comes on top"
    )
    if _blocks(typical, model.window) < -(-typical // BLOCK):
        notes.append(
            "kv_tokens counts requests whole, beyond the window too, and lets fewer in than slots: "
            "leave it out to go by slots alone"
        )
