"""Sizes of models whose figures are known, what can't be sized, and what holds for every file."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import sizing
from gateway.sizing import Setup, SizingError

GIB = 1024**3

Config = dict[str, Any]


def config(kind: str, hidden: int, layers: int, heads: int, words: int, **more: Any) -> Config:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": words,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        **more,
    }


def grouped(
    kind: str, hidden: int, layers: int, heads: int, words: int, kv: int, wide: int, **more: Any
) -> Config:
    return config(kind, hidden, layers, heads, words, num_key_value_heads=kv, intermediate_size=wide, **more)


LLAMA_8B = grouped("llama", 4096, 32, 32, 128256, 8, 14336, tie_word_embeddings=False)
QWEN_14B = grouped("qwen2", 5120, 48, 40, 152064, 8, 13824, use_sliding_window=False, sliding_window=131072)
MISTRAL = grouped(
    "mistral", 4096, 32, 32, 32000, 8, 14336, sliding_window=4096, max_position_embeddings=32768
)
GEMMA_2 = grouped("gemma2", 3584, 42, 16, 256000, 8, 14336, head_dim=256, sliding_window=4096)
MIXTRAL = grouped("mixtral", 4096, 32, 32, 32000, 8, 14336, num_local_experts=8, sliding_window=None)
FALCON_7B = config("falcon", 4544, 32, 71, 65024, multi_query=True, num_kv_heads=71, bias=False)
OPT = config("opt", 768, 12, 12, 50272, ffn_dim=3072, max_position_embeddings=2048, word_embed_proj_dim=768)
LLAVA: Config = {"model_type": "llava", "text_config": LLAMA_8B, "vision_config": {}}

# Bytes a token of the KV cache (16 bits), and parameters.
KNOWN: dict[str, tuple[Config, int, int]] = {
    "Llama-3.1-8B": (LLAMA_8B, 131_072, 8_030_261_248),
    "Llama-3.1-70B": (grouped("llama", 8192, 80, 64, 128256, 8, 28672), 327_680, 70_553_706_496),
    "Llama-3.2-1B": (
        grouped("llama", 2048, 16, 32, 128256, 8, 8192, head_dim=64, tie_word_embeddings=True),
        32_768,
        1_235_814_400,
    ),
    "Llama-2-7B": (config("llama", 4096, 32, 32, 32000, intermediate_size=11008), 524_288, 6_738_415_616),
    "TinyLlama-1.1B": (grouped("llama", 2048, 22, 32, 32000, 4, 5632), 22_528, 1_100_048_384),
    "Qwen2.5-0.5B": (
        grouped("qwen2", 896, 24, 14, 151936, 2, 4864, tie_word_embeddings=True),
        12_288,
        494_032_768,
    ),
    "Qwen2.5-14B": (QWEN_14B, 196_608, 14_770_033_664),
    "Qwen3-8B": (grouped("qwen3", 4096, 36, 32, 151936, 8, 12288, head_dim=128), 147_456, 8_190_735_360),
    "Qwen3-30B-A3B": (
        grouped(
            "qwen3_moe",
            2048,
            48,
            32,
            151936,
            4,
            6144,
            head_dim=128,
            num_experts=128,
            moe_intermediate_size=768,
        ),
        98_304,
        30_532_122_624,
    ),
    "Mistral-7B-v0.1": (MISTRAL, 131_072, 7_241_732_096),
    "Mistral-Nemo": (
        grouped("mistral", 5120, 40, 32, 131072, 8, 14336, head_dim=128),
        163_840,
        12_247_782_400,
    ),
    "Mixtral-8x7B": (MIXTRAL, 131_072, 46_702_792_704),
    "Gemma-7b": (grouped("gemma", 3072, 28, 16, 256000, 16, 24576, head_dim=256), 458_752, 8_537_680_896),
    "Gemma-2-9b": (GEMMA_2, 344_064, 9_241_705_984),
    "Gemma-3-1b": (grouped("gemma3_text", 1152, 26, 4, 262144, 1, 6912, head_dim=256), 26_624, 999_885_952),
    "Phi-3-mini": (
        grouped("phi3", 3072, 32, 32, 32064, 32, 8192, sliding_window=2047),
        393_216,
        3_821_079_552,
    ),
    "Pythia-6.9b": (config("gpt_neox", 4096, 32, 32, 50432, intermediate_size=16384), 524_288, 6_857_302_016),
    "GPT-NeoX-20B": (
        config("gpt_neox", 6144, 44, 64, 50432, intermediate_size=24576),
        1_081_344,
        20_554_567_680,
    ),
    "Falcon-7b": (FALCON_7B, 8_192, 6_921_720_704),
    "Falcon-40b": (
        config("falcon", 8192, 60, 128, 65024, new_decoder_architecture=True, num_kv_heads=8),
        122_880,
        41_303_293_952,
    ),
    "OPT-125m": (OPT, 36_864, 125_239_296),
    "OPT-350m": (
        {
            **config("opt", 1024, 24, 16, 50272, ffn_dim=4096, max_position_embeddings=2048),
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
        98_304,
        331_196_416,
    ),
    "Bloom-7b1": (
        {"model_type": "bloom", "n_embed": 4096, "n_layer": 30, "n_head": 32, "vocab_size": 250880}
        | {"seq_length": 2048, "torch_dtype": "float16"},
        491_520,
        7_069_016_064,
    ),
    "GPT-2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
        | {"n_positions": 1024, "dtype": "float16"},
        36_864,
        124_439_808,
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_models(name: str) -> None:
    given, bytes_per_token, parameters = KNOWN[name]
    found = sizing.plan(sizing.read(given), Setup(400 * GIB))
    assert found.bytes_per_token == bytes_per_token
    assert sum(part.count for part in found.parts) == parameters
    assert found.weights == 2 * parameters


@pytest.mark.parametrize(
    ("dtype", "gigabytes"), [("float32", 32.12), ("fp8", 9.08), ("int8", 9.08), ("int4", 5.73)]
)
def test_quantised_weights_keep_embeddings_and_head_in_16_bits(dtype: str, gigabytes: float) -> None:
    """As large as the files of Llama-3.1-8B that are published in these types."""
    found = sizing.plan(sizing.read(LLAMA_8B), Setup(80 * GIB, dtype=dtype))
    assert round(found.weights / 1e9, 2) == gigabytes
    assert found.kv_dtype == ("float32" if dtype == "float32" else "bfloat16")


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
        ),
    ],
)
def test_type_of_quantised_weights_is_read(how: Config, dtype: str) -> None:
    found = sizing.plan(sizing.read({**LLAMA_8B, "quantization_config": how}), Setup(80 * GIB))
    assert (found.dtype, found.kv_dtype) == (dtype, "bfloat16")


def test_arithmetic_of_one_gpu() -> None:
    found = sizing.plan(sizing.read(LLAMA_8B), Setup(24 * GIB, typical=1000, context=32768))
    assert found.usable_per_gpu == int(24 * GIB * 0.9)
    assert found.room_per_gpu == found.usable_per_gpu - 2 * 8_030_261_248 - 2 * GIB
    assert found.blocks == found.room_per_gpu // (16 * 131_072) == 2376
    assert found.kv_tokens == 38_016
    assert (found.typical_blocks, found.slots, found.at_context) == (63, 37, 1)
    fp8 = sizing.plan(sizing.read(LLAMA_8B), Setup(24 * GIB, kv_dtype="fp8"))
    assert fp8.bytes_per_token == 65_536


def test_gpus_share_kv_heads_or_copy_them() -> None:
    model = sizing.read(LLAMA_8B)
    four, sixteen = (sizing.plan(model, Setup(24 * GIB, gpus=gpus)) for gpus in (4, 16))
    assert (four.kv_heads_per_gpu, four.bytes_per_token_per_gpu, four.notes) == (2, 32_768, ())
    assert (sixteen.kv_heads_per_gpu, sixteen.bytes_per_token_per_gpu) == (1, 16_384)
    assert "copy" in sixteen.notes[0]
    assert four.weights_per_gpu * 4 == four.weights
    with pytest.raises(SizingError, match="--gpus: 32 attention heads can't be shared by 3 GPUs"):
        sizing.plan(model, Setup(24 * GIB, gpus=3))
    phi = sizing.read(grouped("phi3", 5120, 40, 40, 32064, 10, 17920))
    with pytest.raises(SizingError, match="--gpus: 10 KV heads can't be shared by 4"):
        sizing.plan(phi, Setup(24 * GIB, gpus=4))


def test_window_of_all_layers_caps_a_request() -> None:
    found = sizing.plan(sizing.read(MISTRAL), Setup(24 * GIB, typical=16384))
    assert found.typical_blocks == found.context_blocks == 257
    assert found.slots == found.blocks // 257
    assert any("leave it out" in note for note in found.notes)
    typed = {**MISTRAL, "layer_types": ["sliding_attention"] * 32}
    assert sizing.read(typed).window == 4096
    assert sizing.read({**MISTRAL, "layer_types": ["full_attention"] * 32}).window is None


@pytest.mark.parametrize(
    "config",
    [
        GEMMA_2,
        {**QWEN_14B, "use_sliding_window": True},
        {**MISTRAL, "layer_types": ["sliding_attention", "full_attention"] * 16},
        {**LLAMA_8B, "layer_types": ["chunked_attention", "full_attention"] * 16},
    ],
)
def test_window_of_some_layers_is_ignored_and_said(config: Config) -> None:
    model = sizing.read(config)
    assert model.window is None
    assert "as if every layer kept every token" in model.notes[0]


def test_window_that_is_off_is_nothing_to_tell() -> None:
    model = sizing.read(QWEN_14B)
    assert (model.window, model.notes) == (None, ())


def test_the_number_of_slots_proposed_has_an_end() -> None:
    found = sizing.plan(sizing.read(LLAMA_8B), Setup(800 * GIB))
    assert found.slots == 256 < found.fitting
    assert "--max-num-seqs" in found.notes[0]


def test_multimodal_and_unknown_models_need_the_size_of_their_weights() -> None:
    for config, field in ((LLAVA, "vision_config"), ({**LLAMA_8B, "model_type": "new"}, "model_type")):
        model = sizing.read(config)
        with pytest.raises(SizingError, match=f"^{field}: .*--weights"):
            sizing.plan(model, Setup(80 * GIB))
        found = sizing.plan(model, Setup(80 * GIB, weights=20 * GIB))
        assert (found.bytes_per_token, found.weights, found.dtype) == (131_072, 20 * GIB, None)
        assert any("isn't known here" in note for note in found.notes) == (field == "model_type")


REFUSED: dict[str, Config] = {
    "kv_lora_rank": {**LLAMA_8B, "kv_lora_rank": 512},
    "text_config.kv_lora_rank": {**LLAVA, "text_config": {**LLAMA_8B, "kv_lora_rank": 512}},
    "state_size": {"model_type": "mamba", "state_size": 16, "num_hidden_layers": 48},
    "mamba_d_state": {**LLAMA_8B, "model_type": "falcon_h1", "mamba_d_state": 16},
    "attn_layer_period": {**LLAMA_8B, "model_type": "jamba", "attn_layer_period": 8},
    "attention_hidden_size": {"model_type": "rwkv", "attention_hidden_size": 768},
    "model_type": {**LLAMA_8B, "model_type": "rwkv7"},
    "layer_types": {**LLAMA_8B, "layer_types": ["linear_attention", "full_attention"] * 16},
    "linear_num_value_heads": {**LLAMA_8B, "model_type": "qwen3_next", "linear_num_value_heads": 32},
    "is_encoder_decoder": {**LLAMA_8B, "model_type": "t5", "is_encoder_decoder": True},
    "type_vocab_size": {**LLAMA_8B, "model_type": "bert", "type_vocab_size": 2},
    "num_kv_shared_layers": {**LLAMA_8B, "model_type": "gemma3n_text", "num_kv_shared_layers": 10},
    "cla_share_factor": {**LLAMA_8B, "cla_share_factor": 2},
    "text_config.cross_attention_layers": {
        "model_type": "mllama",
        "text_config": {**LLAMA_8B, "cross_attention_layers": [3, 8]},
    },
    "num_hidden_layers": {**LLAMA_8B, "num_hidden_layers": None},
    "num_attention_heads": {**LLAMA_8B, "num_attention_heads": 0},
    "num_key_value_heads": {**LLAMA_8B, "num_key_value_heads": 5},
    "head_dim": {**GEMMA_2, "head_dim": None},
    "hidden_size": {**LLAMA_8B, "hidden_size": True},
    "vocab_size": {**LLAMA_8B, "vocab_size": "128256"},
    "intermediate_size": {**LLAMA_8B, "intermediate_size": -1},
    "max_position_embeddings": {**LLAMA_8B, "max_position_embeddings": 10**5000},
    "tie_word_embeddings": {**LLAMA_8B, "tie_word_embeddings": 1},
    "torch_dtype": {**LLAMA_8B, "torch_dtype": "float9"},
    "num_local_experts": {**LLAMA_8B, "num_local_experts": 8},
    "quantization_config.quant_method": {**LLAMA_8B, "quantization_config": {"quant_method": "mxfp4"}},
    "quantization_config": {**LLAMA_8B, "quantization_config": "awq"},
    "sliding_window": {**MISTRAL, "sliding_window": -1},
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_cannot_be_sized_names_the_field(field: str) -> None:
    with pytest.raises(SizingError) as caught:
        sizing.plan(sizing.read(REFUSED[field]), Setup(80 * GIB))
    assert str(caught.value).startswith(f"{field}: ")


def test_fields_that_are_off_tell_nothing() -> None:
    off = {
        "kv_lora_rank": None,
        "is_encoder_decoder": False,
        "num_kv_shared_layers": 0,
        "cla_share_factor": 1,
    }
    assert sizing.read({**LLAMA_8B, **off}).kv_heads == 8


def test_lengths_that_contradict_each_other() -> None:
    model = sizing.read(LLAMA_8B)
    with pytest.raises(SizingError, match="--typical: a request of 5,000 tokens"):
        sizing.plan(model, Setup(80 * GIB, typical=5000))
    assert "context is 4,096" in sizing.plan(model, Setup(80 * GIB, context=5000)).notes[0]
    assert sizing.plan(model, Setup(80 * GIB, context=1024)).typical == 1024


# What holds for every file and every GPU.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
NAMES = sorted(
    {name for given, *_ in KNOWN.values() for name in given} | {name for name in REFUSED if "." not in name}
)
DAMAGE = st.dictionaries(
    st.sampled_from(
        [*NAMES, "text_config", "quantization_config", "layer_types", "use_sliding_window", "mamba_\n"]
    ),
    JSON,
    max_size=3,
)
SETUPS = st.builds(
    Setup,
    gpu_memory=st.integers(1, 400 * GIB),
    gpus=st.integers(1, 16),
    dtype=st.sampled_from(["auto", *sizing.WEIGHT_DTYPES]),
    weights=st.none() | st.integers(1, 400 * GIB),
    kv_dtype=st.sampled_from(["auto", *sizing.KV_DTYPES]),
    utilization=st.floats(0.01, 1),
    overhead=st.integers(0, 8 * GIB),
    context=st.none() | st.integers(1, 10**8),
    typical=st.none() | st.integers(1, 10**6),
)


@given(
    config=JSON
    | st.builds(lambda known, damage: {**known[0], **damage}, st.sampled_from([*KNOWN.values()]), DAMAGE)
)
def test_whatever_the_file_it_is_sized_or_refused_in_one_line(config: object) -> None:
    try:
        found = sizing.plan(sizing.read(config), Setup(80 * GIB))
    except SizingError as error:
        assert str(error).isprintable()  # noqa: PT017 - the other outcome is as good
    else:
        assert found.bytes_per_token > 0


@given(known=st.sampled_from([*KNOWN.values()]), setup=SETUPS, more=st.integers(0, 80 * GIB))
def test_requests_fit_and_more_memory_never_holds_less(
    known: tuple[Config, int, int], setup: Setup, more: int
) -> None:
    model = sizing.read(known[0])
    try:
        found = sizing.plan(model, setup)
    except SizingError:
        return
    assert found.slots * found.typical_blocks * sizing.BLOCK <= found.kv_tokens
    if model.window is None:
        assert found.slots * found.typical <= found.kv_tokens
    assert found.kv_tokens * found.bytes_per_token_per_gpu <= max(0, found.room_per_gpu)
    larger = sizing.plan(model, Setup(**{**vars(setup), "gpu_memory": setup.gpu_memory + more}))
    assert larger.kv_tokens >= found.kv_tokens
    assert larger.slots >= found.slots
