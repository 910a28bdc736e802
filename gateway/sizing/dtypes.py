"""The types that weights and the KV cache have, and how they follow from a model's `config.json`.

Sources: Transformers (``torch_dtype``, called ``dtype`` since its version 4.56, and
``quantization_config``), and the formats of GPTQ, AWQ, bitsandbytes and compressed-tensors.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NoReturn

from gateway.sizing.fields import Fields, SizingError, shown

HALF = Fraction(2)
"""Bytes of what stays unquantised in a quantised model."""

WEIGHT_DTYPES = {
    "float32": Fraction(4),
    "float16": HALF,
    "bfloat16": HALF,
    "fp8": Fraction(1),
    "int8": Fraction(1),
    "int4": Fraction(4 * 128 + 16 + 4, 8 * 128),
}
"""Bytes a parameter. ``int4`` comes in groups of 128 that have a scale (16 bits) and a zero (4 bits)."""

KV_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}
"""Bytes of one number of the KV cache."""

QUANTISED = {"fp8", "int8", "int4"}

_STORED = {"half": "float16", "float": "float32", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}
_BY_BITS = {4: "int4", 8: "int8"}


def of_weights(fields: Fields, outer: Fields) -> str:
    """Return the type of the weights, of :data:`WEIGHT_DTYPES`.

    Raises :class:`SizingError` if it isn't told, or is none of them.
    """
    for each in (outer, fields):
        how = each.inner("quantization_config")
        if how is not None:
            return _quantised(how)
    return _stored(fields, outer) or _missing(fields, "--dtype, or --weights and --kv-dtype")


def of_cache(fields: Fields, outer: Fields, weights: str | None) -> str:
    """Return the type of the KV cache where none is asked for, of :data:`KV_DTYPES`.

    It is that of the ``weights`` if theirs was asked for, else what the file says; where weights
    are quantised, what they were before, which has 16 bits. Raises :class:`SizingError` if it isn't told.
    """
    if weights is not None and weights not in QUANTISED:
        return weights
    stored = _stored(fields, outer)
    if weights or stored in QUANTISED or any(each.get("quantization_config") for each in (fields, outer)):
        return stored if stored in ("float16", "bfloat16") else "float16"
    return stored or _missing(fields, "--kv-dtype")


def _stored(fields: Fields, outer: Fields) -> str | None:
    for each in (fields, outer):
        for name in ("torch_dtype", "dtype"):
            told = each.text(name)
            if told is None:
                continue
            word = told.removeprefix("torch.")
            word = _STORED.get(word, word)
            if word not in WEIGHT_DTYPES:
                raise SizingError(
                    f"{each.prefix}{name}: {shown(told)} isn't known here; give --dtype and --kv-dtype"
                )
            return word
    return None


def _missing(fields: Fields, options: str) -> NoReturn:
    raise SizingError(f"{fields.prefix}torch_dtype: missing; give {options}")


def _quantised(how: Fields) -> str:
    method = how.text("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8"
    if method in ("gptq", "awq"):
        word = _BY_BITS.get(how.number("bits", "w_bit"))
        if word is not None:
            return word
    if method == "bitsandbytes":
        return "int4" if how.flag("load_in_4bit", False) else "int8"
    if method == "compressed-tensors":
        groups = how.inner("config_groups")
        words = {_of_group(groups, name) for name in groups.values} if groups else set()
        if len(words) == 1 and (word := words.pop()) is not None:
            return word
    raise SizingError(
        f"{how.prefix}quant_method: how {shown(method)} stores these weights isn't known here; "
        "give --dtype, or what the weights' files have together with --weights"
    )


def _of_group(groups: Fields, name: str) -> str | None:
    group = groups.inner(name)
    weights = group.inner("weights") if group else None
    if weights is None:
        return None
    bits = weights.number("num_bits")
    if weights.text("type") == "float":
        return "fp8" if bits == 8 else None
    return _BY_BITS.get(bits)
