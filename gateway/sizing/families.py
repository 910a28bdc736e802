"""How the parameters of each kind of model differ from Llama's.

Source: the modelling code of Hugging Face Transformers, and the defaults of its configuration classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Family:
    """A kind of model. ``attention_field`` and ``mlp_field`` override its biases, where a file has them."""

    gated: bool = True
    """The MLP has three matrices in place of two."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    attention_field: str = ""
    mlp_field: str = ""

    layer_norm: bool = False
    """Norms have a bias too."""

    norms: int = 2
    """In a layer."""

    head_norms: bool = False
    """Queries and keys are normed, with one weight for each number of a head."""

    tied: bool = False
    """The embeddings are the head too, unless the file says otherwise."""

    extra_positions: int | None = None
    """Positions are learned: so many more than the context has. None: they aren't."""

    embedding_norm: bool = False

    width: tuple[str, ...] = ("intermediate_size",)
    """Fields with the width of the MLP; without one of them it is :attr:`default_width` hidden sizes."""

    default_width: int | None = None

    experts: tuple[str, ...] = ()
    """Fields with the number of experts in a layer."""


_LLAMA = Family(attention_field="attention_bias", mlp_field="mlp_bias")
_QWEN3 = Family(attention_field="attention_bias", head_norms=True)
_GEMMA = Family(attention_field="attention_bias", tied=True)
_BIASED = Family(gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, layer_norm=True)

FAMILIES = {
    "llama": _LLAMA,
    "mistral": Family(),
    "mixtral": Family(experts=("num_local_experts",)),
    "phi3": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(
        _QWEN3, experts=("num_experts", "num_local_experts"), width=("moe_intermediate_size",)
    ),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, norms=4),
    "gemma3_text": replace(_GEMMA, norms=4, head_norms=True),
    "gpt_neox": replace(_BIASED, attention_field="attention_bias"),
    "gpt2": replace(_BIASED, tied=True, extra_positions=0, width=("n_inner",), default_width=4),
    "bloom": replace(_BIASED, tied=True, embedding_norm=True, width=(), default_width=4),
    "opt": replace(
        _BIASED,
        attention_field="enable_bias",
        mlp_field="enable_bias",
        tied=True,
        extra_positions=2,
        width=("ffn_dim",),
    ),
    "falcon": Family(
        gated=False,
        attention_field="bias",
        mlp_field="bias",
        layer_norm=True,
        tied=True,
        width=("ffn_hidden_size",),
        default_width=4,
    ),
}
"""By ``model_type``."""
