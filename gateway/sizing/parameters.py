"""Counting a model's parameters from its `config.json`, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.sizing.families import FAMILIES, Family
from gateway.sizing.fields import Fields, SizingError, shown
from gateway.sizing.model import Model

_GIVE = "give the size of its files with --weights"
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class Part:
    """Some of the parameters: how many, and by which multiplication.

    ``matrices`` are those of the layers, which a quantised model stores quantised; the rest isn't.
    """

    name: str
    formula: str
    count: int
    matrices: bool = False


def count(model: Model) -> tuple[Part, ...]:
    """Return the parts of a model, all experts included.

    Raises :class:`SizingError` for a kind of model that isn't known well enough to count, and for
    fields that are missing or make no sense.
    """
    family = _family(model)
    fields = model.fields
    hidden = fields.number("hidden_size", "n_embed", "n_embd")
    words = fields.number("vocab_size")
    size = fields.number("word_embed_proj_dim", default=hidden) if model.kind == "opt" else hidden
    parts = [_product("embeddings", words, size)]
    if size != hidden:
        parts.append(_product("projections", 2, size, hidden))
    if family.extra_positions is not None:
        context = fields.number("max_position_embeddings", "n_positions")
        parts.append(_product("positions", context + family.extra_positions, hidden))
    parts += _layers(model, family, hidden)
    tied = fields.flag("tie_word_embeddings", model.outer.flag("tie_word_embeddings", family.tied))
    if not tied:
        parts.append(_product("head", words, size))
    return tuple(parts)


def _family(model: Model) -> Family:
    fields, outer = model.fields, model.outer
    if fields is not outer or outer.get("vision_config") is not None:
        name = "vision_config" if outer.get("vision_config") is not None else fields.prefix[:-1]
        raise SizingError(f"{name}: there is more to this model than its text part, uncounted here; {_GIVE}")
    family = FAMILIES.get(model.kind)
    if family is None:
        raise SizingError(
            f"model_type: how many parameters {shown(model.kind)} has isn't known here; {_GIVE}"
        )
    for name in _EXPERTS:
        if not family.experts and fields.maybe_number(name) not in (None, 1):
            raise SizingError(f"{name}: {shown(model.kind)} isn't known here to have experts; {_GIVE}")
    if model.kind == "qwen3_moe" and (
        fields.number("decoder_sparse_step", default=1) != 1 or fields.get("mlp_only_layers")
    ):
        raise SizingError(f"mlp_only_layers: only some of its layers have experts, uncounted here; {_GIVE}")
    return family


def _layers(model: Model, family: Family, hidden: int) -> list[Part]:
    fields, layers = model.fields, model.layers
    width = fields.maybe_number(*family.width)
    if width is None and family.default_width is not None:
        width = family.default_width * hidden
    width = width or fields.number(*family.width)
    attention = layers * hidden * model.head_dim * 2 * (model.heads + model.kv_heads)
    parts = [
        Part(
            "attention",
            f"{layers:,} × {hidden:,} × {model.head_dim:,} × 2 × ({model.heads:,} + {model.kv_heads:,})",
            attention,
            matrices=True,
        )
    ]
    matrices = 3 if family.gated else 2
    if family.experts:
        experts = fields.number(*family.experts)
        parts.append(_product("experts", layers, experts, matrices, hidden, width, matrices=True))
        parts.append(_product("routers", layers, experts, hidden))
    else:
        parts.append(_product("MLP", layers, matrices, hidden, width, matrices=True))
    norm = hidden * (2 if family.layer_norm else 1)
    each = norm * _norms(fields, model.kind, family) + _biases(model, family, hidden, width)
    once = norm * (_final_norms(fields, model.kind) + family.embedding_norm)
    parts.append(Part("norms, biases", f"{layers:,} × {each:,} + {once:,}", layers * each + once))
    return parts


def _norms(fields: Fields, kind: str, family: Family) -> int:
    if kind != "falcon":
        return family.norms
    if fields.flag("new_decoder_architecture", False):
        return fields.number("num_ln_in_parallel_attn", default=2)
    return 1 if fields.flag("parallel_attn", True) else 2


def _final_norms(fields: Fields, kind: str) -> int:
    if kind != "opt":
        return 1
    return int(
        fields.flag("do_layer_norm_before", True) and not fields.flag("_remove_final_layer_norm", False)
    )


def _biases(model: Model, family: Family, hidden: int, width: int) -> int:
    """Of one layer, with the norms of queries and keys."""
    fields = model.fields
    qkv, out, mlp = family.qkv_bias, family.out_bias, family.mlp_bias
    if family.attention_field:
        qkv = out = fields.flag(family.attention_field, qkv)
    if family.mlp_field:
        mlp = fields.flag(family.mlp_field, mlp)
    return (
        qkv * (model.heads + 2 * model.kv_heads) * model.head_dim
        + out * hidden
        + mlp * ((2 if family.gated else 1) * width + hidden)
        + family.head_norms * 2 * model.head_dim
    )


def _product(name: str, *factors: int, matrices: bool = False) -> Part:
    total = 1
    for factor in factors:
        total *= factor
    return Part(name, " × ".join(f"{factor:,}" for factor in factors), total, matrices)
