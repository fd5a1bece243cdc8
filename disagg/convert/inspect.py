"""Facts about a model directory from config.json and the headers of its weights, without torch or transformers.

Servers and the router decide layouts, limits and compatibility with these; only workers load the model itself. Where
config.json leaves out what its transformers class has a default for, the default is repeated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from disagg.convert.safetensors_file import WeightFile, find_weight_files, read_header
from disagg.convert.sense import making_sense
from disagg.messages.heads import check_heads
from disagg.types.errors import ConfigError
from disagg.types.small_files import CONFIG_BYTES, json_object, read_small

MAX_NUMBER: Final = 1 << 40
MAX_COUNT: Final = 1 << 16  # layers, heads, experts
_COUNTED: Final = ("layers", "heads", "experts")  # in the names of numbers of which each makes modules
MAX_NAME_CHARS: Final = 80
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
MAMBA: Final = "mamba"
ORIGINAL: Final = "original_max_position_embeddings"
_ROPE_TABLES: Final = ("rope_parameters", "rope_scaling")
_LONG_ROPES: Final = ("longrope", "su")
_ATTENTION_FREE: Final = ("falcon_mamba", "mamba", "mamba2")

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
    # No attention, and no positions: the longest context is that of models/layers.LONGEST_RECURRENCE.
    "falcon_mamba": {"max_position_embeddings": 1 << 20, "tie_word_embeddings": True},
    "mamba": {"max_position_embeddings": 1 << 20, "tie_word_embeddings": True},
    "mamba2": {"max_position_embeddings": 1 << 20},
}


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What there is to know of a model without loading it. Sizes in bytes, lengths in tokens."""

    architecture: str
    model_type: str
    num_layers: int
    num_heads: int  # 0 where there is no attention, as of KV heads and their dims
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    max_model_len_note: str  # why it is less than config.json's own number; empty: it is not
    torch_dtype: str  # of most of the checkpoint's bytes, e.g. "bfloat16"
    weight_bytes: int
    num_parameters: int  # as stored: tied weights count once
    sliding_window: int | None  # None where every layer sees everything
    layer_types: tuple[str, ...]  # one per layer: full_attention, sliding_attention, mamba, or what config.json says
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tie_word_embeddings: bool

    def check_heads(self, tp: int) -> None:
        """Raises SliceError where so many ranks cannot share the heads. States are whole on each of any number."""
        if self.num_heads:
            check_heads(tp, self.num_heads, self.num_kv_heads)

    def check_stages(self, stages: int, setting: str) -> None:
        """Raises ConfigError where there are more pipeline stages than layers. Workers, who know what layers keep and share,
        may allow fewer (models/stages). setting: its name and value, for people."""
        if stages > self.num_layers:
            raise ConfigError(
                f"{setting}: every pipeline stage needs a layer of its own; with the {self.num_layers} layers of this model it "
                f"must be at most {self.num_layers}"
            )


def inspect_model(model_dir: Path) -> ModelFacts:
    """Reads a few hundred kilobytes, whatever the model's size. Raises ConfigError naming the file and what it lacks."""
    with making_sense(model_dir):
        return _inspect(model_dir)


def _inspect(model_dir: Path) -> ModelFacts:
    path = model_dir / "config.json"
    top = _read_json(path)
    nested = top.get("text_config")
    text: dict[str, Any] = {**top, **nested} if isinstance(nested, dict) else top
    model_type = str(text.get("model_type", top.get("model_type", "")))[:MAX_NAME_CHARS]
    config = {**_CLASS_DEFAULTS.get(model_type, {}), **text}
    _check_counts(path, top)
    files = [read_header(file) for file in find_weight_files(model_dir)]

    num_layers = _number(path, config, "num_layers", _listed_layers(config))
    num_heads, head_dim = _heads(path, config, model_type)
    layer_types = _layer_types(path, config, model_type, num_layers)
    if len(layer_types) != num_layers:
        raise ConfigError(f"{path} has {len(layer_types)} layer_types for {num_layers} layers")
    bos = _ids(path, config.get("bos_token_id"), "bos_token_id")
    max_model_len, note = _context(path, config)
    window = _optional(path, config, "sliding_window") if SLIDING in layer_types else None
    return ModelFacts(
        architecture=_architecture(top.get("architectures") or text.get("architectures")),
        model_type=str(top.get("model_type", model_type))[:MAX_NAME_CHARS],
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads and _number(path, config, "num_kv_heads", num_heads),
        head_dim=head_dim,
        vocab_size=_number(path, config, "vocab_size"),
        max_model_len=max_model_len,
        max_model_len_note=note,
        torch_dtype=_main_dtype(files),
        weight_bytes=sum(tensor.nbytes for file in files for tensor in file.tensors.values()),
        num_parameters=sum(tensor.num_values for file in files for tensor in file.tensors.values()),
        sliding_window=window,
        layer_types=layer_types,
        eos_token_ids=_eos_token_ids(model_dir, config),
        bos_token_id=bos[0] if bos else None,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _listed_layers(config: Mapping[str, Any]) -> int | None:
    """Layers that are named one by one, where that is all that is said of their number; else None."""
    if any(config.get(name) is not None for name in _ALIASES["num_layers"]):
        return None
    lists = (config.get(name) for name in ("layer_types", "layers_block_type"))
    return next((len(each) for each in lists if isinstance(each, list) and 0 < len(each) <= MAX_COUNT), None)


def _heads(path: Path, config: Mapping[str, Any], model_type: str) -> tuple[int, int]:
    """(query heads, dims of each). What says so of a model without attention is read by nobody."""
    if model_type in _ATTENTION_FREE:
        return 0, 0
    num_heads = _number(path, config, "num_heads")
    head_dim = _optional(path, config, "head_dim") or _number(path, config, "hidden_size") // num_heads
    if not head_dim:
        raise ConfigError(f"{path} has more heads than its hidden_size has room for")
    return num_heads, head_dim


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json_object(read_small(path, CONFIG_BYTES), path)
    except FileNotFoundError as error:
        raise ConfigError(f"model directory {path.parent} lacks {path.name}") from error


def _check_counts(path: Path, config: Mapping[str, Any]) -> None:
    """transformers makes a module for each of what these count, so a wrong number would keep it busy for ever."""
    for name, value in config.items():
        if isinstance(value, dict):
            _check_counts(path, value)
        elif isinstance(value, int) and value > MAX_COUNT and any(word in name for word in _COUNTED):
            raise ConfigError(f"{path}: {name[:MAX_NAME_CHARS]} is {_clip(value)}; at most {MAX_COUNT} can be served")


def _context(path: Path, config: Mapping[str, Any]) -> tuple[int, str]:
    """Tokens of the longest context that is served, and why they are fewer than config.json says."""
    limit = said = _number(path, config, "max_model_len")
    tables = [config[name] for name in _ROPE_TABLES if isinstance(config.get(name), dict)]
    tables += [inner for table in tables for inner in table.values() if isinstance(inner, dict)]
    for table in tables:
        if any(table.get(name) in _LONG_ROPES for name in ("rope_type", "type")):
            original = _optional(path, table, ORIGINAL) or _optional(path, config, ORIGINAL)
            limit = min(limit, original or limit)
    if limit == said:
        return said, ""
    return limit, (
        f"config.json says {said}; past {ORIGINAL} = {limit}, LongRoPE rotates every row of a batch by other factors, so an "
        "answer would depend on its neighbours"
    )


def _number(path: Path, config: Mapping[str, Any], fact: str, default: int | None = None) -> int:
    """A positive number, under one of its names."""
    names = _ALIASES.get(fact, (fact,))
    for name in names:
        if config.get(name) is not None and (value := _optional(path, config, name)):
            return value
    if default is None:
        for name in names:
            if config.get(name) is not None:  # 0, or another would have been taken
                raise ConfigError(
                    f"{path}: {name} is {_clip(config[name])}; it must be a number from 1 to {MAX_NUMBER}"
                )
        others = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
        raise ConfigError(f"{path} lacks {names[0]}{others}")
    return default


def _optional(path: Path, config: Mapping[str, Any], name: str) -> int | None:
    """A positive number; None where it is absent, null or 0."""
    value = config.get(name)
    if value is None or value == 0:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_NUMBER:
        raise ConfigError(f"{path}: {name} is {_clip(value)}; it must be a number from 1 to {MAX_NUMBER}")
    return value


def _clip(value: object) -> str:
    """At most a few characters of whatever it is."""
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        return "a very large number" if value > 0 else "a very small number"
    return repr(value)[:MAX_NAME_CHARS] if isinstance(value, str | int | float) else f"a {type(value).__name__}"


def _architecture(names: object) -> str:
    first = names[0] if isinstance(names, list) and names else ""
    return first[:MAX_NAME_CHARS] if isinstance(first, str) else ""


def _layer_types(path: Path, config: Mapping[str, Any], model_type: str, num_layers: int) -> tuple[str, ...]:
    """What each layer attends to. Older configurations say it in one of several indirect ways."""
    said = config.get("layer_types")
    if said:
        if not isinstance(said, list) or not all(isinstance(each, str) for each in said):
            raise ConfigError(f"{path}: layer_types must be a list of names")
        return tuple(each[:MAX_NAME_CHARS] for each in said)
    if model_type in _ATTENTION_FREE:
        return (MAMBA,) * num_layers
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return (FULL,) * num_layers
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 0:
        return tuple(SLIDING if layer % pattern else FULL for layer in range(1, num_layers + 1))
    if model_type in ("qwen2", "qwen2_moe", "qwen3"):
        first = _optional(path, config, "max_window_layers") or 0
        return tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    return (SLIDING,) * num_layers


def _eos_token_ids(model_dir: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json's, else config.json's, each id once: as the engine takes them."""
    path = model_dir / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    said = generation.get("eos_token_id")
    found = _ids(path, said, "eos_token_id")
    others = _ids(model_dir / "config.json", config.get("eos_token_id"), "eos_token_id")
    return tuple(dict.fromkeys(others if said is None else found))


def _ids(path: Path, value: object, name: str) -> list[int]:
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each <= MAX_NUMBER for each in ids):
        raise ConfigError(f"{path}: {name} must be an id, or a list of ids")
    return ids


def _main_dtype(files: list[WeightFile]) -> str:
    sizes: dict[str, int] = {}
    for file in files:
        for tensor in file.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    if not sizes:
        raise ConfigError(f"{files[0].path} holds no tensors")
    main = max(sizes, key=lambda dtype: sizes[dtype])
    return _TORCH_NAMES.get(main, main.lower())
