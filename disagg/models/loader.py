"""Loads a Hugging Face directory and finds out what its attention layers are, or says why it cannot be served.

Knows transformers' configs and modules; nothing of pools or batches. Layer shapes are not taken from the config, whose
fields differ between families, but from one probing forward of two tokens that records what every attention layer asks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from disagg.messages.layout import DTYPE_BYTES, LayerGroup
from disagg.models.attention import ATTENTION_NAME, active
from disagg.models.families import FAMILIES
from disagg.models.pool import TORCH_DTYPES
from disagg.types.errors import ConfigError

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

# Options that layers pass and that paged attention honours, or that say nothing about the attention itself. Any other
# that is set may change the answer, so it is refused.
HONOURED_OPTIONS = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
HARMLESS_OPTIONS = frozenset(
    {
        "dropout",
        "is_causal",
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A module in eval mode on its device, and what its directory says about it."""

    module: PreTrainedModel
    group: LayerGroup
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


def load(model_dir: Path, dtype: str, device: str) -> LoadedModel:
    """Raises ConfigError when the directory holds no model that this version can serve exactly."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}")
    _check_config_file(model_dir)
    module, report = _from_pretrained(model_dir, dtype)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ConfigError(f"{model_dir} lacks {len(missing)} weights, such as {missing[0]}")
    if not type(module)._supports_attention_backend:
        raise ConfigError(f"{model_dir}: {type(module).__name__} does not let its attention be replaced")
    torch.nn.Module.to(module, device)
    module.train(False).requires_grad_(False)
    return LoadedModel(
        module=module,
        group=_layer_group(model_dir, module, dtype),
        vocab_size=module.config.vocab_size,
        max_model_len=_max_model_len(model_dir, module.config),
        eos_token_ids=_eos_token_ids(module),
    )


def _from_pretrained(model_dir: Path, dtype: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The module on the CPU, and transformers' report of missing and unexpected weights."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            output_loading_info=True,
        )
    except OSError as error:
        raise ConfigError(f"{model_dir} has no weights that can be loaded: {error}") from error
    module, report = loaded
    return module, report


def _check_config_file(model_dir: Path) -> None:
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a model's configuration: {error}") from error
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(f"{path}: model_type {model_type!r} is not served; served are {', '.join(sorted(FAMILIES))}")
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(f"{path}: transformers {transformers.__version__} does not know model_type {model_type!r}")
    if not config.get("num_attention_heads"):
        raise ConfigError(f"{path} has no num_attention_heads")
    if config.get("quantization_config"):
        raise ConfigError(f"{path} has a quantization_config; only float32, bfloat16 and float16 weights are served")
    if config.get("use_bidirectional_attention"):
        raise ConfigError(f"{path} sets use_bidirectional_attention; only causal attention is served")
    other = set(config.get("layer_types") or ()) - LAYER_TYPES
    if other:
        raise ConfigError(f"{path} has layers of type {', '.join(sorted(other))}; served are {sorted(LAYER_TYPES)}")


@dataclass(frozen=True, slots=True)
class _Call:
    """What one layer asked of attention."""

    layer: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtypes: frozenset[torch.dtype]
    masked: bool
    causal: bool
    options: dict[str, Any]


class _Probe:
    """Records calls and answers zeros."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        is_causal = options.get("is_causal")
        self.calls.append(
            _Call(
                layer=getattr(module, "layer_idx", -1),
                query_heads=query.shape[1],
                kv_heads=key.shape[1],
                key_dim=key.shape[3],
                value_dim=value.shape[3],
                dtypes=frozenset({query.dtype, key.dtype, value.dtype}),
                masked=attention_mask is not None,
                causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
                options={name: option for name, option in options.items() if option is not None},
            )
        )
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))


def _layer_group(model_dir: Path, module: PreTrainedModel, dtype: str) -> LayerGroup:
    """The one group of all attention layers. Raises ConfigError when they are not alike or ask for more than we do."""
    probe = _Probe()
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=module.device)
    positions = torch.arange(2, device=module.device).unsqueeze(0)
    with torch.inference_mode(), active(probe):
        last = positions[0, 1:]
        logits = module(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=last).logits
    if logits.shape[:2] != (1, 1):
        raise ConfigError(f"{model_dir}: {type(module).__name__} does not honour logits_to_keep")
    layers = tuple(call.layer for call in probe.calls)
    if layers != tuple(range(module.config.num_hidden_layers)):
        raise ConfigError(
            f"{model_dir}: attention ran for layers {list(layers)}, not once for each of "
            f"{module.config.num_hidden_layers}; state-space layers and shared KV are not served yet"
        )
    shapes = {(call.kv_heads, call.key_dim, call.value_dim) for call in probe.calls}
    kv_heads, key_dim, value_dim = shapes.pop()
    if shapes:
        raise ConfigError(f"{model_dir}: attention layers differ in KV heads or head_dim, which is not served yet")
    if key_dim != value_dim:
        raise ConfigError(f"{model_dir}: keys have {key_dim} dims and values {value_dim}, which is not served yet")
    layer_types = getattr(module.config, "layer_types", None) or [None] * len(layers)
    _check_window(model_dir, module.config, probe.calls)
    for call, layer_type in zip(probe.calls, layer_types, strict=True):
        _check_call(model_dir, call, layer_type, TORCH_DTYPES[dtype])
    return LayerGroup("full", layers, kv_heads, key_dim, dtype)


def _check_window(model_dir: Path, config: PretrainedConfig, calls: list[_Call]) -> None:
    """Some families (phimoe) apply their window only in the mask that transformers builds, and here builds none."""
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "layer_types", None) or window >= _max_model_len(model_dir, config):
        return
    if any(call.options.get("sliding_window") != window for call in calls):
        raise ConfigError(f"{model_dir}: sliding_window is {window}, but the layers do not ask attention for it")


def _check_call(model_dir: Path, call: _Call, layer_type: str | None, dtype: torch.dtype) -> None:
    where = f"{model_dir}: layer {call.layer}"
    if call.masked or not call.causal:
        raise ConfigError(f"{where} attends with a mask of its own; only causal attention is served")
    if call.dtypes != {dtype}:
        raise ConfigError(f"{where} attends in {sorted(map(str, call.dtypes))}, not in the model's {dtype}")
    if call.query_heads % call.kv_heads:
        raise ConfigError(f"{where}: {call.query_heads} query heads do not divide among {call.kv_heads} KV heads")
    unknown = call.options.keys() - HONOURED_OPTIONS - HARMLESS_OPTIONS
    if unknown:
        raise ConfigError(f"{where} asks for {', '.join(sorted(unknown))}, which paged attention does not honour")
    if layer_type is not None and (layer_type == "sliding_attention") != ("sliding_window" in call.options):
        raise ConfigError(f"{where} is {layer_type}, but its sliding_window is {call.options.get('sliding_window')}")


def _max_model_len(model_dir: Path, config: PretrainedConfig) -> int:
    """Positions that the model's rotary embedding serves, whatever else is in the batch.

    Past `original_max_position_embeddings`, LongRoPE rotates every row by other factors as soon as one row is past it,
    so a request's answer would depend on its neighbours.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if not limit:
        raise ConfigError(f"{model_dir}/config.json has no max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") == "longrope":
            original = parameters.get("original_max_position_embeddings")
            limit = min(limit, original or getattr(config, "original_max_position_embeddings", None) or limit)
    return int(limit)


def _eos_token_ids(module: PreTrainedModel) -> tuple[int, ...]:
    """The generation config's, which chat models extend by their end-of-turn token; else the config's."""
    generation = module.generation_config
    ids = generation.eos_token_id if generation is not None else None
    if ids is None:
        ids = getattr(module.config, "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
