#!/usr/bin/env python3
"""Write what vLLM needs to serve a tiny llama without weights: its configuration and a tokenizer of bytes.

    make_tiny_hf.py FOLDER                          2 layers of 64: as fast as vLLM goes
    make_tiny_hf.py FOLDER --layers 12 --dim 256    some 50 tokens a second, and a prefill that takes its time

vLLM fills the weights in itself (`--load-format dummy`). Its answers are random bytes. A prompt counts one
token for each byte.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

SPECIAL = ("<s>", "</s>", "<unk>", "<pad>")
BEGIN, END, _, PAD = range(256, 260)
LONGEST = 32768
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def letters() -> list[str]:
    """What GPT-2's byte-level tokenizers write for each byte: itself where it can be seen."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    shown = {byte: chr(byte) for byte in seen} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [shown[byte] for byte in range(256)]


def tokenizer() -> dict[str, Any]:
    """A byte-level BPE that never merges anything."""
    vocabulary = {text: number for number, text in enumerate([*letters(), *SPECIAL])}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocabulary[name], "content": name, **plain} for name in SPECIAL],
        "normalizer": None,
        "pre_tokenizer": {**level, "add_prefix_space": False, "use_regex": False},
        "post_processor": None,
        "decoder": {**level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """How the tokenizer is loaded, and how a chat becomes a prompt."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "model_max_length": LONGEST,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def model(layers: int, dim: int) -> dict[str, Any]:
    """A llama with heads of 32."""
    heads = max(1, dim // 32)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": dim,
        "intermediate_size": 3 * dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 32,
        "vocab_size": 256 + len(SPECIAL),
        "max_position_embeddings": LONGEST,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        **ends(),
    }


def ends() -> dict[str, Any]:
    """The tokens that begin, end and pad a text."""
    return {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD}


def write(folder: Path, *, layers: int, dim: int) -> None:
    """All files of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": tokenizer_config(),
        "config.json": model(layers, dim),
        "generation_config.json": ends(),
    }.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    wanted = parser.parse_args()
    write(wanted.folder, layers=wanted.layers, dim=wanted.dim)


if __name__ == "__main__":
    main()
