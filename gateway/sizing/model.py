"""What of a model's attention decides how much its KV cache takes, read from its `config.json`.

Only attention that keeps one key and one value for each KV head, layer and token (multi-head,
grouped-query, multi-query) is sized. What else there is shows in fields of its own, and the first
of those that is found is named.

Sources: the configuration classes of Hugging Face Transformers (field names and their defaults).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.sizing.fields import Fields, SizingError, named, shown

_INSTEAD = "take the number of tokens from the engine's own log"

_LATENT = "its attention is latent (MLA) and keeps no keys and values of heads"
_STATE = "it has layers that keep a state in place of keys and values"
_LINEAR = "it has layers of linear attention, which keep a state in place of keys and values"
_SHARED = "its layers share keys and values"
_UNEQUAL = "its layers, or their keys and values, have heads of different numbers or sizes"
_ENCODER = "it is an encoder, which keeps nothing from token to token"
_CROSS = "it has an encoder, or layers that attend to one, which keep something else"

_TELLING = {
    "is_encoder_decoder": _CROSS,
    "cross_attention_layers": _CROSS,
    "add_cross_attention": _CROSS,
    "type_vocab_size": _ENCODER,  # BERT and its kin
    "kv_lora_rank": _LATENT,
    "state_size": _STATE,
    "attention_hidden_size": _STATE,  # RWKV
    "attn_layer_period": _STATE,  # Jamba
    "attn_layer_indices": _STATE,  # Bamba
    "hybrid_override_pattern": _STATE,  # Nemotron-H
    "hybrid_layer_ids": _STATE,  # Zamba
    "block_types": _STATE,  # RecurrentGemma
    "lru_width": _STATE,
    "conv_L_cache": _STATE,  # LFM2
    "linear_num_value_heads": _LINEAR,  # Qwen3-Next
    "linear_conv_kernel_dim": _LINEAR,
    "linear_attn_config": _LINEAR,  # Kimi Linear
    "attn_type_list": _LINEAR,  # MiniMax
    "full_attention_interval": _LINEAR,
    "num_kv_shared_layers": _SHARED,  # Gemma 3n
    "use_cla": _SHARED,  # Hunyuan
    "cla_share_factor": _SHARED,
    "block_configs": _UNEQUAL,  # Nemotron-NAS
    "v_head_dim": _UNEQUAL,
    "global_head_dim": _UNEQUAL,
    "num_global_key_value_heads": _UNEQUAL,
    "swa_num_key_value_heads": _UNEQUAL,
    "swa_head_dim": _UNEQUAL,
}
_TELLING_BEGINNINGS = ("mamba_", "ssm_", "rwkv_")
_STATE_KINDS = ("mamba", "falcon_mamba", "rwkv", "jamba", "zamba", "xlstm", "bamba")
_KEEPING_ALL = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers that keep keys and values: of every token, of the last ones, or of one chunk."""

_WINDOW_IN_ALL = {"mistral", "mixtral", "phi3"}
"""Models whose ``sliding_window`` goes for each layer when nothing else is said."""

_OWN_HEAD_DIM = ("gemma", "qwen3")
"""Models whose ``head_dim``, where it's absent, is a number of the library's, not the hidden size divided."""


@dataclass(frozen=True)
class Model:
    """What the plan needs to know of a model.

    ``fields`` are those of the text model, ``outer`` those of the whole file (the same object, unless
    the file is a multimodal model's). ``context`` is the longest sequence in tokens, ``window`` the
    tokens that every layer looks back at most; None where the file doesn't say.
    """

    kind: str
    fields: Fields
    outer: Fields
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int | None
    window: int | None
    notes: tuple[str, ...]


def read(config: object) -> Model:
    """Read a `config.json`, decoded.

    Raises :class:`SizingError` if its attention isn't of a kind whose cache can be computed, or a
    field is missing or makes no sense.
    """
    if not isinstance(config, dict):
        raise SizingError(f"expected an object, got {shown(config)}; give the model's config.json")
    outer = Fields(config)
    fields = outer.inner("text_config") or outer.inner("llm_config") or outer
    kind = fields.text("model_type") or outer.text("model_type")
    if kind is None or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", kind):
        told = "missing" if kind is None else f"{shown(kind)} is no name"
        raise SizingError(f"model_type: {told}; give the config.json of a Hugging Face model")
    for each in (fields, outer):
        _refuse(each)
    if kind.startswith(_STATE_KINDS):
        raise SizingError(f"{fields.prefix}model_type: {shown(kind)}: {_STATE}; {_INSTEAD}")
    layers = fields.number("num_hidden_layers", "n_layer")
    heads = fields.number("num_attention_heads", "n_head")
    notes: list[str] = []
    kv_heads = _kv_heads(fields, kind, heads, notes)
    return Model(
        kind=kind,
        fields=fields,
        outer=outer,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(fields, kind, heads),
        context=fields.maybe_number("max_position_embeddings", "n_positions", "seq_length"),
        window=_window(fields, kind, layers, notes),
        notes=tuple(notes),
    )


def _refuse(fields: Fields) -> None:
    for name, value in fields.values.items():
        # Switched off, or left empty, it tells nothing: many files carry fields of a class above theirs.
        if not value or (value == 1 and name == "cla_share_factor"):
            continue
        reason = _TELLING.get(name)
        if reason is None and name.startswith(_TELLING_BEGINNINGS):
            reason = _STATE
        if reason is not None:
            raise SizingError(f"{fields.prefix}{named(name)}: {reason}; {_INSTEAD}")


def _kv_heads(fields: Fields, kind: str, heads: int, notes: list[str]) -> int:
    if kind == "falcon" and (
        fields.flag("new_decoder_architecture", False) or not fields.flag("multi_query", True)
    ):
        name = "num_kv_heads"
    elif kind == "falcon" or (kind == "gpt_bigcode" and fields.flag("multi_query", True)):
        return 1
    else:
        name = "num_key_value_heads"
    found = fields.maybe_number(name)
    if found is None:
        if kind in _GROUPED:
            notes.append(
                f"{fields.prefix}{name} is absent: taken for the {heads} attention heads, "
                "which is the most it can be"
            )
        return heads
    if heads % found:
        raise SizingError(
            f"{fields.prefix}{name}: {heads} attention heads don't share {found} KV heads evenly; "
            "compare the file with the model's own"
        )
    return found


_GROUPED = {"mistral", "mixtral", "gemma2", "gemma3_text", "qwen2", "qwen3", "qwen3_moe"}
"""Models for which the library takes a number of its own, not that of the attention heads."""


def _head_dim(fields: Fields, kind: str, heads: int) -> int:
    if kind.startswith(_OWN_HEAD_DIM):
        return fields.number("head_dim")
    found = fields.maybe_number("head_dim")
    if found is not None:
        return found
    hidden = fields.number("hidden_size", "n_embed", "n_embd")
    if hidden % heads:
        raise SizingError(
            f"{fields.prefix}head_dim: missing, and {heads} heads don't share a hidden size of {hidden} "
            "evenly; write it in"
        )
    return hidden // heads


def _window(fields: Fields, kind: str, layers: int, notes: list[str]) -> int | None:
    kinds = _layer_types(fields, layers)
    # Qwen's files carry a window that is off unless a second field switches it on.
    if not fields.flag("use_sliding_window", not kind.startswith("qwen")):
        return None
    window = fields.maybe_number("sliding_window")
    some = kinds is not None and any(each != "full_attention" for each in kinds)
    if (window is None and not some) or (kinds is not None and not some):
        return None
    everywhere = kind in _WINDOW_IN_ALL if kinds is None else set(kinds) == {"sliding_attention"}
    if window is not None and everywhere:
        return window
    field = "sliding_window" if window is not None else "layer_types"
    notes.append(
        f"{fields.prefix}{field} goes for some of the layers, or it isn't known for which: sized as if "
        "every layer kept every token; an engine that frees what is out of the window has room for more"
    )
    return None


def _layer_types(fields: Fields, layers: int) -> list[str] | None:
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    where = f"{fields.prefix}layer_types"
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise SizingError(
            f"{where}: expected a list of {layers}, one for each layer; compare it with the model's own"
        )
    for each in kinds:
        if not isinstance(each, str) or each not in _KEEPING_ALL:
            raise SizingError(
                f"{where}: {shown(each)} isn't attention that keeps keys and values; {_INSTEAD}"
            )
    return kinds
