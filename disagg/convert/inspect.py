"""Facts about a model directory from config.json and the headers of its weights, without torch or transformers.

Servers and the router decide layouts, limits and compatibility with these; only workers load the model itself. Where
config.json leaves out what its transformers class has a default for, the default is repeated here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct

from disagg.convert.safetensors_file import WeightFile, find_weight_files, read_header
from disagg.types.errors import ConfigError

SAMPLE_BYTES: Final = 64 * 1024
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"

_TORCH_NAMES: Final[Mapping[str, str]] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
# Under which names configurations keep a number, most usual first.
_ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "max_model_len": ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"),
}
# Published multimodal Gemma 3 configurations leave these to the class.
_GEMMA3_DEFAULTS: Final = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "vocab_size": 262_208,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
_CLASS_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2, "tie_word_embeddings": True},
    "gemma3": _GEMMA3_DEFAULTS,
    "gemma3_text": _GEMMA3_DEFAULTS,
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4, "tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen2_moe": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen3": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen3_moe": {"use_sliding_window": False},
}


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What there is to know of a model without loading it. Sizes in bytes, lengths in tokens."""

    architecture: str
    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    torch_dtype: str  # of most of the checkpoint's bytes, e.g. "bfloat16"
    weight_bytes: int
    num_parameters: int  # as stored: tied weights count once
    weights_hash: str
    sliding_window: int | None  # None where every layer sees everything
    layer_types: tuple[str, ...]  # one per layer: "full_attention", "sliding_attention", or what config.json says
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tie_word_embeddings: bool


def inspect_model(model_dir: Path) -> ModelFacts:
    """Reads a few hundred kilobytes, whatever the model's size. Raises ConfigError naming the file and what it lacks."""
    top = _read_json(model_dir / "config.json")
    nested = top.get("text_config")
    text: dict[str, Any] = {**top, **nested} if isinstance(nested, dict) else top
    model_type = str(text.get("model_type", top.get("model_type", "")))
    config = {**_CLASS_DEFAULTS.get(model_type, {}), **text}
    files = [read_header(path) for path in find_weight_files(model_dir)]

    num_layers = _number(model_dir, config, "num_layers")
    num_heads = _number(model_dir, config, "num_heads")
    architectures = top.get("architectures") or text.get("architectures") or [""]
    layer_types = _layer_types(config, model_type, num_layers)
    if len(layer_types) != num_layers:
        raise ConfigError(f"{model_dir / 'config.json'} has {len(layer_types)} layer_types for {num_layers} layers")
    bos = config.get("bos_token_id")
    return ModelFacts(
        architecture=str(architectures[0]),
        model_type=str(top.get("model_type", model_type)),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_number(model_dir, config, "num_kv_heads", num_heads),
        head_dim=config.get("head_dim") or _number(model_dir, config, "hidden_size") // num_heads,
        vocab_size=_vocab_size(model_dir, config),
        max_model_len=_number(model_dir, config, "max_model_len"),
        torch_dtype=_main_dtype(files),
        weight_bytes=sum(_tensor_bytes(file) for file in files),
        num_parameters=sum(_num_values(file) for file in files),
        weights_hash=_weights_hash(model_dir, files),
        sliding_window=config.get("sliding_window") if SLIDING in layer_types else None,
        layer_types=layer_types,
        eos_token_ids=_eos_token_ids(model_dir, config),
        bos_token_id=bos[0] if isinstance(bos, list) else bos,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"model directory {path.parent} lacks {path.name}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content


def _number(model_dir: Path, config: Mapping[str, Any], fact: str, default: int | None = None) -> int:
    for name in _ALIASES[fact]:
        value = config.get(name)
        if isinstance(value, int):
            return value
    if default is None:
        raise ConfigError(f"{model_dir / 'config.json'} lacks {_ALIASES[fact][0]} (or {', '.join(_ALIASES[fact][1:])})")
    return default


def _vocab_size(model_dir: Path, config: Mapping[str, Any]) -> int:
    size = config.get("vocab_size")
    if not isinstance(size, int):
        raise ConfigError(f"{model_dir / 'config.json'} lacks vocab_size")
    return size


def _layer_types(config: Mapping[str, Any], model_type: str, num_layers: int) -> tuple[str, ...]:
    """What each layer attends to. Older configurations say it in one of several indirect ways."""
    if config.get("layer_types"):
        return tuple(config["layer_types"])
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return (FULL,) * num_layers
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 0:
        return tuple(SLIDING if layer % pattern else FULL for layer in range(1, num_layers + 1))
    if model_type in ("qwen2", "qwen2_moe", "qwen3"):
        first = config["max_window_layers"]
        return tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    return (SLIDING,) * num_layers


def _eos_token_ids(model_dir: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json's first, then config.json's, each id once."""
    path = model_dir / "generation_config.json"
    found: list[int] = []
    for source in (_read_json(path) if path.is_file() else {}, config):
        ids = source.get("eos_token_id")
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(dict.fromkeys(found))


def _tensor_bytes(file: WeightFile) -> int:
    return sum(tensor.data_offsets[1] - tensor.data_offsets[0] for tensor in file.tensors.values())


def _num_values(file: WeightFile) -> int:
    return sum(int(np.prod(tensor.shape, dtype=np.int64)) for tensor in file.tensors.values())


def _main_dtype(files: list[WeightFile]) -> str:
    sizes: dict[str, int] = {}
    for file in files:
        for tensor in file.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.data_offsets[1] - tensor.data_offsets[0]
    if not sizes:
        raise ConfigError(f"{files[0].path} holds no tensors")
    main = max(sizes, key=lambda dtype: sizes[dtype])
    return _TORCH_NAMES.get(main, main.lower())


def _weights_hash(model_dir: Path, files: list[WeightFile]) -> str:
    """Tells checkpoints apart without reading them: headers, sizes, configuration, and both ends of each file."""
    digest = hashlib.sha256()
    digest.update(hashlib.sha256((model_dir / "config.json").read_bytes()).digest())
    for file in files:
        digest.update(msgspec.json.encode((file.path.name, file.file_bytes, len(file.header))))
        digest.update(file.header)
        with file.path.open("rb") as opened:
            opened.seek(8 + len(file.header))
            digest.update(opened.read(SAMPLE_BYTES))
            opened.seek(max(0, file.file_bytes - SAMPLE_BYTES))
            digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()
