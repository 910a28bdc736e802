"""``gateway size``: what to write for `slots` and `kv_tokens`, worked out from a model's `config.json`.

It needs neither a configuration nor an engine, and no GPU: everything is computed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway import sizing
from gateway.sizing import Model, Plan, Setup, SizingError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_OK = 0
EXIT_NOTHING_FITS = 1
EXIT_UNSIZED = 2

_ABOUT = "compute slots and kv_tokens from a model's config.json and a GPU's memory"
_LARGEST_FILE = 16 * 1024**2
"""Bytes of a config.json that are read; the longest have some hundred thousand."""

_MOST_BYTES = 1024**5
_MOST_NUMBER = 100_000_000
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter + "b": 1000**_power, _letter + "ib": 1024**_power}


def add_command(commands: Commands) -> None:
    """Add the command's options to the command line."""
    parser = commands.add_parser("size", help=_ABOUT, description=_ABOUT)
    parser.set_defaults(parser=parser)
    add = parser.add_argument
    add("model", metavar="CONFIG.json", help="the model's config.json, as on Hugging Face")
    add(
        "--gpu-memory",
        type=_gpu_bytes,
        required=True,
        metavar="SIZE",
        help="of one GPU: 24GiB, 80GB, 16384MiB",
    )
    add("--gpus", type=_number, default=1, metavar="N", help="that share it by tensor parallelism (1)")
    add("--dtype", choices=["auto", *sizing.WEIGHT_DTYPES], default="auto", help="of the weights (auto)")
    add(
        "--weights",
        type=_some_bytes,
        metavar="SIZE",
        help="what their files have together, in place of counting",
    )
    add("--kv-dtype", choices=["auto", *sizing.KV_DTYPES], default="auto", help="of the KV cache (auto)")
    add(
        "--memory-utilization",
        type=_share,
        default=sizing.UTILIZATION,
        metavar="SHARE",
        help="vLLM's --gpu-memory-utilization (%(default)s)",
    )
    add(
        "--overhead",
        type=_bytes,
        default=sizing.OVERHEAD,
        metavar="SIZE",
        help="of each GPU, for activations, CUDA graphs and the runtime (2GiB)",
    )
    add("--context", type=_number, metavar="N", help="tokens of the longest request (what the model allows)")
    add("--typical", type=_number, metavar="N", help=f"tokens of most, prompt and answer ({sizing.TYPICAL})")
    add("--json", action="store_true", help="print one object of JSON")


def run(options: argparse.Namespace) -> int:
    """Print the arithmetic and the two lines for `config.toml`.

    Returns the exit code: 0, 1 if not one request fits, 2 if the model can't be sized.
    """
    setup = Setup(
        gpu_memory=options.gpu_memory,
        gpus=options.gpus,
        dtype=options.dtype,
        weights=options.weights,
        kv_dtype=options.kv_dtype,
        utilization=options.memory_utilization,
        overhead=options.overhead,
        context=options.context,
        typical=options.typical,
    )
    try:
        model = sizing.read(_load(options.model))
        found = sizing.plan(model, setup)
    except SizingError as error:
        print(f"{options.model}: {error}.", file=sys.stderr)
        return EXIT_UNSIZED
    print(json.dumps(_object(model, found)) if options.json else _told(model, setup, found))
    if found.slots:
        return EXIT_OK
    print(_nothing_fits(setup, found), file=sys.stderr)
    return EXIT_NOTHING_FITS


def _load(name: str) -> object:
    path = Path(name)
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
    except FileNotFoundError:
        raise SizingError("no such file; give the model's config.json") from None
    except IsADirectoryError:
        raise SizingError("is a directory; give the config.json in it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a name of a file"
        raise SizingError(f"can't be read: {reason}; give the model's config.json") from None
    if len(content) > _LARGEST_FILE:
        raise SizingError("is too long for a config.json; give the model's own")
    try:
        decoded: object = json.loads(content)
    except (ValueError, RecursionError):
        raise SizingError("isn't JSON; give the model's config.json") from None
    return decoded


def _told(model: Model, setup: Setup, found: Plan) -> str:
    one = found.bytes_per_token // (model.layers * model.kv_heads * model.head_dim * 2)
    lines = [
        f"{model.kind}: {model.layers} layers, {model.heads} heads of {model.head_dim}, "
        f"{model.kv_heads} KV heads",
        "",
        "KV cache",
        _line(
            f"{model.layers} layers × {model.kv_heads} KV heads × {model.head_dim} × 2 (key, value) × "
            f"{one} ({found.kv_dtype})",
            f"{found.bytes_per_token:,} bytes a token",
        ),
    ]
    if setup.gpus > 1:
        lines.append(
            _line(
                f"on each of {setup.gpus} GPUs, with {found.kv_heads_per_gpu} KV heads",
                f"{found.bytes_per_token_per_gpu:,} bytes a token",
            )
        )
    lines += ["", "Weights", *_weights(setup, found), "", "Memory of a GPU"]
    lines += [
        _line(f"{_gib(setup.gpu_memory)} × {setup.utilization:g}", _gib(found.usable_per_gpu)),
        _line("less the weights", _gib(found.weights_per_gpu)),
        _line("less the overhead (--overhead)", _gib(setup.overhead)),
        _line("left for the KV cache", _gib(found.room_per_gpu)),
        "",
        "Room",
        _line(f"{found.blocks:,} blocks of {sizing.BLOCK} tokens", f"{found.kv_tokens:,} tokens"),
        _line(
            f"of {found.typical:,} tokens (--typical): {found.typical_blocks:,} blocks",
            f"{found.fitting:,} requests",
        ),
        _line(
            f"of {found.context:,} tokens (--context): {found.context_blocks:,} blocks",
            f"{found.at_context:,} requests",
        ),
    ]
    if found.notes:
        lines += ["", *(f"Note: {note}." for note in found.notes)]
    if found.slots:
        lines += [
            "",
            "For the engine in config.toml:",
            f"slots = {found.slots}",
            f"kv_tokens = {found.kv_tokens}",
        ]
    return "\n".join(lines)


def _weights(setup: Setup, found: Plan) -> list[str]:
    if not found.parts:
        lines = [_line("as given (--weights)", _gib(found.weights))]
    else:
        lines = [_line(f"{part.name:14}{part.formula}", f"{part.count:,}") for part in found.parts]
        total = sum(part.count for part in found.parts)
        lines.append(_line("parameters", f"{total:,}"))
        lines.append(_line(f"as {found.dtype}{_bytes_of(found)}", _gib(found.weights)))
    if setup.gpus > 1:
        lines.append(_line(f"on each of {setup.gpus} GPUs", _gib(found.weights_per_gpu)))
    return lines


def _bytes_of(found: Plan) -> str:
    assert found.dtype is not None, "there are parts"
    each = f"{float(sizing.WEIGHT_DTYPES[found.dtype]):.4g}"
    if found.dtype in sizing.QUANTISED:
        return f": attention, MLP and experts × {each} bytes, the rest × 2"
    return f": × {each} bytes"


def _nothing_fits(setup: Setup, found: Plan) -> str:
    if found.room_per_gpu <= 0:
        return (
            f"Nothing fits: weights and overhead take {_gib(found.weights_per_gpu + setup.overhead)} of the "
            f"{_gib(found.usable_per_gpu)} there are. Take more GPUs (--gpus) or smaller weights (--dtype)."
        )
    return (
        f"Nothing fits: there is room for {found.kv_tokens:,} tokens, and a request has {found.typical:,}. "
        "Take more GPUs (--gpus), smaller weights (--dtype) or shorter requests (--typical)."
    )


def _object(model: Model, found: Plan) -> dict[str, Any]:
    shape = {name: getattr(model, name) for name in ("layers", "heads", "kv_heads", "head_dim", "window")}
    return {
        "model_type": model.kind,
        **shape,
        **asdict(found),
        "parts": {part.name: part.count for part in found.parts},
        "parameters": sum(part.count for part in found.parts) or None,
    }


def _line(what: str, outcome: str) -> str:
    return f"  {what:<66} {outcome:>22}"


def _gib(size: int) -> str:
    return f"{size / 1024**3:,.2f} GiB"


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,16}(?:\.[0-9]{1,6})?) ?([A-Za-z]*)", text)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 24GiB, 80GB or 16384MiB, got {text!r}")
    size = int(float(found[1]) * unit)
    if size > _MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text} is more than any GPU has")
    return size


def _gpu_bytes(text: str) -> int:
    size = _bytes(text)
    if size < 1024**3:
        raise argparse.ArgumentTypeError(f"{text} is less than a GPU has; did you mean {text.strip()}GiB?")
    return size


def _some_bytes(text: str) -> int:
    size = _bytes(text)
    if size < 1:
        raise argparse.ArgumentTypeError("expected more than 0")
    return size


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= _MOST_NUMBER:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {_MOST_NUMBER:,}, got {text!r}")
    return int(text)


def _share(text: str) -> float:
    if not re.fullmatch(r"[0-9]?\.?[0-9]{1,9}", text) or not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"expected more than 0 and at most 1, got {text!r}")
    return float(text)
