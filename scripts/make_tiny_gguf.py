#!/usr/bin/env python3
"""Write a tiny llama-architecture model with random weights as a GGUF file: standard library only, and the
same bytes everywhere.

    make_tiny_gguf.py tiny.gguf                        370 KB, thousands of tokens a second
    make_tiny_gguf.py slow.gguf --layers 96 --dim 16   751 KB and slow: for tests that need time to leave

To llama.cpp the model is real (attention, RoPE, KV cache, sampling); its text is noise made of English words.
A prompt counts one token for each printable ASCII character, and no answer ends by itself unless `eos_bias`
is raised, so that `max_tokens` is exact. To that end one dimension of the residual stream (number 0) is held
constant: every embedding starts with it and no layer writes to it, so the output rows can use it as a bias
against all tokens but words.
"""

from __future__ import annotations

import argparse
import random
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by
word but not what all were we when your can said there use an each which she do how their if will up
other about out many then them these so some her would make like him into time has look two more write
go see number no way could people my than first water been call who oil its now find long down day did
get come made may part over new sound take only little work know place year live me back give most very
after thing our just name good sentence man think say great where help through much before line right
too mean old any same tell boy follow came want show also around form three small set put end does
another well large must big even such because turn here why ask went men read need land different home
us move try kind hand picture again change off play spell air away animal house point page letter mother
answer found study still learn should world
""".split()  # noqa: SIM905 - a list of 250 literals is no better
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SPACE = "\u2581"  # how SentencePiece writes one

CONSTANT = 4.0  # dimension 0 of the residual stream
NEVER = -30.0  # an output bias no noise gets over
ALIGNMENT = 32  # of tensors in the file; GGUF's default
NOISE = 65537  # numbers in the pool of noise that all weights are cut from; a prime

# GGUF's type codes, of metadata values and of tensors
U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
TENSOR_F32, TENSOR_F16 = 0, 1
# and SentencePiece's of tokens
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


@dataclass(frozen=True)
class Token:
    """One entry of the vocabulary."""

    text: str
    score: float
    kind: int


@dataclass
class Gguf:
    """A GGUF file in the making: metadata, descriptions of tensors, and their bytes."""

    metadata: list[bytes] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)
    size: int = 0

    def put(self, key: str, kind: int, value: bytes) -> None:
        """Add a metadata entry whose value is encoded already."""
        self.metadata.append(_string(key) + struct.pack("<I", kind) + value)

    def put_number(self, key: str, value: int) -> None:
        """Add an unsigned number."""
        self.put(key, U32, struct.pack("<I", value))

    def put_array(self, key: str, kind: int, values: list[bytes]) -> None:
        """Add an array of values that are encoded already."""
        self.put(key, ARRAY, struct.pack("<IQ", kind, len(values)) + b"".join(values))

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, rows: Iterable[bytes]) -> None:
        """Add a tensor, given row by row. `shape` has the length of a row first."""
        data = _padded(b"".join(rows))
        self.tensors.append(
            _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, self.size)
        )
        self.data.append(data)
        self.size += len(data)

    def write(self, path: Path) -> None:
        """Write the file."""
        counts = struct.pack("<IQQ", 3, len(self.tensors), len(self.metadata))  # 3 is GGUF's version
        head = b"GGUF" + counts + b"".join(self.metadata) + b"".join(self.tensors)
        with path.open("wb") as file:
            file.write(_padded(head))
            file.writelines(self.data)


class Noise:
    """Rows of Gaussian noise, cut at random places from one pool, so that any size is made quickly."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._pool = [self._random.gauss(0, 1) for _ in range(NOISE)]
        self._scaled: dict[float, bytes] = {}

    def row(self, length: int, deviation: float) -> bytes:
        """One row of half-precision numbers."""
        if deviation not in self._scaled:
            numbers = (number * deviation for number in self._pool)
            self._scaled[deviation] = struct.pack(f"<{NOISE}e", *numbers) * 2  # twice, so that a cut can wrap
        pool = self._scaled[deviation]
        row = b""
        while len(row) < 2 * length:
            start = 2 * self._random.randrange(NOISE)
            row += pool[start : start + min(2 * length - len(row), 2 * NOISE)]
        return row

    def row_after(self, first: float, length: int, deviation: float) -> bytes:
        """A row whose first number is given."""
        return struct.pack("<e", first) + self.row(length, deviation)[2:]


def build(
    path: str | Path,
    *,
    layers: int = 2,
    dim: int = 64,
    heads: int | None = None,
    kv_heads: int | None = None,
    feed_forward: int | None = None,
    context: int = 32768,
    seed: int = 1,
    eos_bias: float = NEVER,
    name: str = "tiny-random",
) -> Path:
    """Write the model to `path` and return that.

    Unless given, `heads` is one for each 32 dimensions, `kv_heads` the same as `heads`, `feed_forward` three
    times `dim`.
    """
    heads = heads or max(1, dim // 32)
    kv_heads = kv_heads or heads
    feed_forward = feed_forward or 3 * dim
    if dim % heads or (dim // heads) % 2 or heads % kv_heads:
        raise ValueError("dim must be a multiple of 2 x heads, and heads one of kv_heads")
    head_dim = dim // heads
    vocabulary = list(_vocabulary())

    gguf = Gguf()
    gguf.put("general.architecture", STRING, _string("llama"))
    gguf.put("general.name", STRING, _string(name))
    gguf.put_number("general.file_type", 1)  # mostly half precision
    gguf.put("general.license", STRING, _string("CC0-1.0"))
    for key, value in {
        "block_count": layers,
        "context_length": context,
        "embedding_length": dim,
        "feed_forward_length": feed_forward,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "rope.dimension_count": head_dim,
        "vocab_size": len(vocabulary),
    }.items():
        gguf.put_number(f"llama.{key}", value)
    gguf.put("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5))
    gguf.put("llama.rope.freq_base", F32, struct.pack("<f", 10000.0))
    _put_tokenizer(gguf, vocabulary)

    noise = Noise(seed)
    _add_embeddings(gguf, noise, vocabulary, dim, eos_bias)
    for layer in range(layers):
        _add_layer(gguf, noise, f"blk.{layer}", dim, kv_heads * head_dim, feed_forward, layers)
    gguf.write(Path(path))
    return Path(path)


def _vocabulary() -> Iterator[Token]:
    yield Token("<unk>", 0.0, UNKNOWN)
    yield Token("<s>", 0.0, CONTROL)
    yield Token("</s>", 0.0, CONTROL)
    for byte in range(256):
        yield Token(f"<0x{byte:02X}>", 0.0, BYTE)
    for code in range(32, 127):
        yield Token(SPACE if code == 32 else chr(code), -1000.0, NORMAL)
    for rank, word in enumerate(WORDS):
        yield Token(SPACE + word, -float(rank), NORMAL)


def _put_tokenizer(gguf: Gguf, vocabulary: list[Token]) -> None:
    gguf.put("tokenizer.ggml.model", STRING, _string("llama"))
    gguf.put("tokenizer.ggml.pre", STRING, _string("default"))
    gguf.put_array("tokenizer.ggml.tokens", STRING, [_string(token.text) for token in vocabulary])
    gguf.put_array("tokenizer.ggml.scores", F32, [struct.pack("<f", token.score) for token in vocabulary])
    gguf.put_array("tokenizer.ggml.token_type", I32, [struct.pack("<i", token.kind) for token in vocabulary])
    for number, special in enumerate(("unknown", "bos", "eos")):
        gguf.put_number(f"tokenizer.ggml.{special}_token_id", number)
    gguf.put("tokenizer.ggml.add_bos_token", BOOL, b"\1")
    gguf.put("tokenizer.ggml.add_eos_token", BOOL, b"\0")
    gguf.put("tokenizer.ggml.add_space_prefix", BOOL, b"\0")
    gguf.put("tokenizer.chat_template", STRING, _string(CHAT_TEMPLATE))


def _add_embeddings(gguf: Gguf, noise: Noise, vocabulary: list[Token], dim: int, eos_bias: float) -> None:
    eos, first_word = 2, len(vocabulary) - len(WORDS)
    shape = (dim, len(vocabulary))
    gguf.tensor(
        "token_embd.weight", shape, TENSOR_F16, [noise.row_after(CONSTANT, dim, 1.0) for _ in vocabulary]
    )
    _add_norm(gguf, "output_norm.weight", dim)
    biases = [0.0 if number >= first_word else NEVER for number in range(len(vocabulary))]
    biases[eos] = eos_bias
    rows = [noise.row_after(bias, dim, 2.0 / dim**0.5) for bias in biases]
    gguf.tensor("output.weight", shape, TENSOR_F16, rows)


def _add_layer(
    gguf: Gguf, noise: Noise, prefix: str, dim: int, kv_dim: int, feed_forward: int, layers: int
) -> None:
    def matrix(name: str, columns: int, rows: int, deviation: float) -> None:
        data = [noise.row(columns, deviation) for _ in range(rows)]
        gguf.tensor(f"{prefix}.{name}.weight", (columns, rows), TENSOR_F16, data)

    def back_matrix(name: str, columns: int, deviation: float) -> None:
        """One that writes to the residual stream: nothing to dimension 0, which stays constant."""
        data = [bytes(2 * columns)] + [noise.row(columns, deviation) for _ in range(dim - 1)]
        gguf.tensor(f"{prefix}.{name}.weight", (columns, dim), TENSOR_F16, data)

    _add_norm(gguf, f"{prefix}.attn_norm.weight", dim)
    _add_norm(gguf, f"{prefix}.ffn_norm.weight", dim)
    matrix("attn_q", dim, dim, dim**-0.5)
    matrix("attn_k", dim, kv_dim, dim**-0.5)
    matrix("attn_v", dim, kv_dim, dim**-0.5)
    back_matrix("attn_output", dim, (dim * layers) ** -0.5)
    matrix("ffn_gate", dim, feed_forward, dim**-0.5)
    matrix("ffn_up", dim, feed_forward, dim**-0.5)
    back_matrix("ffn_down", feed_forward, (feed_forward * layers) ** -0.5)


def _add_norm(gguf: Gguf, name: str, dim: int) -> None:
    gguf.tensor(name, (dim,), TENSOR_F32, [struct.pack(f"<{dim}f", *([1.0] * dim))])


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % ALIGNMENT)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--feed-forward", type=int)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--eos-bias", type=float, default=NEVER)
    parser.add_argument("--name", default="tiny-random")
    build(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
