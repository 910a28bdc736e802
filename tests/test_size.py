"""The command: what it prints, its exit codes, and what it says of what it can't size."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway import cli
from gateway.cli import main
from gateway.size import add_command

PAGE = Path(__file__).parent.parent / "docs" / "sizing.md"

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a model's configuration; its path."""

    def write(**changed: Any) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**LLAMA_8B, **changed}))
        return str(path)

    return write


def test_arithmetic_and_the_two_lines(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", write(), "--gpu-memory", "24GiB"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = [re.sub(" {2,}", "  ", line) for line in captured.out.splitlines()]
    for line in (
        "  32 layers × 8 KV heads × 128 × 2 (key, value) × 2 (bfloat16)  131,072 bytes a token",
        "  MLP  32 × 3 × 4,096 × 14,336  5,637,144,576",
        "  parameters  8,030,261,248",
        "  as bfloat16: × 2 bytes  14.96 GiB",
        "  24.00 GiB × 0.9  21.60 GiB",
        "  left for the KV cache  4.64 GiB",
        "  2,376 blocks of 16 tokens  38,016 tokens",
        "  of 2,048 tokens (--typical): 128 blocks  18 requests",
    ):
        assert line in lines
    assert any("--max-model-len 38016" in line for line in lines)
    assert lines[-2:] == ["slots = 18", "kv_tokens = 38016"]


def test_several_gpus_and_quantised_weights(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", write(), "--gpu-memory", "16GiB", "--gpus", "2", "--dtype", "int4"]) == 0
    out = re.sub(" {2,}", "  ", capsys.readouterr().out)
    assert "on each of 2 GPUs, with 4 KV heads  65,536 bytes a token" in out
    assert "as int4: attention, MLP and experts × 0.5195 bytes, the rest × 2  5.33 GiB" in out
    assert "on each of 2 GPUs  2.67 GiB" in out


def test_weights_as_given(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["size", write(model_type="new"), "--gpu-memory", "24GiB", "--weights", "15.5 GB"]
    assert main(arguments) == 0
    out = re.sub(" {2,}", "  ", capsys.readouterr().out)
    assert "as given (--weights)  14.44 GiB" in out


def test_json_has_the_same_numbers(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", write(), "--gpu-memory", "24GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["slots"], found["kv_tokens"], found["bytes_per_token"]) == (18, 38016, 131_072)
    assert found["parameters"] == sum(found["parts"].values()) == 8_030_261_248


def test_nothing_fits(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", write(), "--gpu-memory", "16GiB"]) == 1
    captured = capsys.readouterr()
    assert "slots =" not in captured.out
    assert captured.err.startswith("Nothing fits: weights and overhead take 16.96 GiB of the 14.40 GiB")
    assert main(["size", write(), "--gpu-memory", "20GiB", "--typical", "16384", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["slots"] == 0
    assert captured.err.startswith("Nothing fits: there is room for 8,5")


def test_model_that_cannot_be_sized(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(kv_lora_rank=512)
    assert main(["size", path, "--gpu-memory", "80GB"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(f"{path}: kv_lora_rank: its attention is latent (MLA)")
    assert "the engine's own log" in line


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "isn't JSON"),
        (b"\xff\xfe\xfd", "isn't JSON"),
        (b"[" * 100_000, "isn't JSON"),
        (b"1" * 5000, "isn't JSON"),
        (b"[]", "expected an object, got a list"),
        (b"{}", "model_type: missing"),
        (b'{"model_type": "a\\nb"}', "model_type: 'a\\nb' is no name"),
        (b" " * (16 * 1024**2 + 1), "too long"),
    ],
)
def test_file_that_is_none(
    content: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert main(["size", str(path), "--gpu-memory", "80GB"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{path}: ")
    assert told in line


@pytest.mark.parametrize(
    ("name", "told"), [("none.json", "no such file"), (".", "is a directory"), ("a\0b", "can't be read")]
)
def test_file_that_is_not_there(
    name: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", f"{tmp_path}/{name}", "--gpu-memory", "80GB"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["--gpu-memory", "24 parsecs"],
        ["--gpu-memory", "0"],
        ["--gpu-memory", "-1"],
        ["--gpu-memory", "5000TiB"],
        ["--gpu-memory", "24GiB", "--gpus", "0"],
        ["--gpu-memory", "24GiB", "--memory-utilization", "1.1"],
        ["--gpu-memory", "24GiB", "--memory-utilization", "0"],
        ["--gpu-memory", "24GiB", "--memory-utilization", "nan"],
        ["--gpu-memory", "24GiB", "--typical", "1e3"],
        ["--gpu-memory", "24GiB", "--dtype", "int3"],
    ],
)
def test_wrong_command_line(wrong: list[str], write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["size", write(), *wrong])
    assert caught.value.code == 2
    assert "gateway size: error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 1024**3),
        ("80GB", 80 * 10**9),
        ("16384MiB", 16 * 1024**3),
        ("25769803776", 24 * 1024**3),
        ("22.5 gib", 45 * 1024**3 // 2),
    ],
)
def test_sizes(text: str, size: int, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["size", write(), "--gpu-memory", text, "--memory-utilization", "1", "--json"]
    main(arguments)
    assert json.loads(capsys.readouterr().out)["usable_per_gpu"] == size


def test_it_needs_no_configuration_and_no_known_hypercorn(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise AssertionError("it doesn't serve")

    monkeypatch.setattr(cli, "check_hypercorn", refuse)
    path = write()
    monkeypatch.chdir(tmp_path)
    assert main(["size", path, "--gpu-memory", "24GiB"]) == 0


def test_example_of_the_page_is_what_is_printed(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", write(), "--gpu-memory", "24GiB"]) == 0
    assert f"```\n{capsys.readouterr().out}```" in PAGE.read_text(encoding="utf-8")


def test_options_are_documented() -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    add_command(commands)
    page = PAGE.read_text(encoding="utf-8")
    options = {word for action in commands.choices["size"]._actions for word in action.option_strings}
    assert [option for option in options - {"-h", "--help"} if f"`{option}" not in page] == []
