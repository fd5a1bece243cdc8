"""Finds out what a model's layers keep, or says why they cannot be served.

Layer shapes are not taken from the config, whose fields differ between families, but from one probing forward of two tokens
that records what every attention layer asks and what state every recurrent layer keeps. Layers whose cache has one shape and
one lifetime become one layer group. The module may be on the meta device, where nothing is computed and shapes are the same.
Knows transformers' configs and modules; nothing of files, pools or batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from disagg.messages.layout import GroupKind, LayerGroup, StatePart
from disagg.models.attention.calls import LayerPlace, active
from disagg.models.families import ATTENTION_FREE
from disagg.models.pool import TORCH_DTYPES
from disagg.models.probe import AttentionCall, AttentionProbe
from disagg.models.states import StateProbe, active_states
from disagg.types.errors import ConfigError

# By transformers' name of a layer's type: how often the layer calls attention, and how often a recurrent module runs.
LAYER_TYPES = {
    "full_attention": (1, 0),
    "attention": (1, 0),
    "sliding_attention": (1, 0),
    "linear_attention": (0, 1),
    "mamba": (0, 1),
    "conv": (0, 1),
    "hybrid": (1, 1),
    "mlp": (0, 0),
    "moe": (0, 0),
}

# Tokens of a sequence where the model itself knows no bound.
LONGEST_RECURRENCE = 1024 * 1024

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
class LayerPlaces:
    """Where a model's layers keep what they keep, by their indices.

    attention: of every layer that calls attention; a group's `layers` are those with KV of their own. states: of every
    recurrent layer. A layer may be both, and an MLP is neither. groups: of the whole model, all KV heads. calls: what each
    layer that calls attention asked of it, in order.
    """

    groups: tuple[LayerGroup, ...]
    attention: dict[int, LayerPlace]
    states: dict[int, LayerPlace]
    calls: tuple[AttentionCall, ...]


def _probe(
    model_dir: Path, module: PreTrainedModel, dtype: str
) -> tuple[list[AttentionCall], dict[int, tuple[StatePart, ...]]]:
    """What each layer asks of attention, and the states of each recurrent one, in order.

    Raises ConfigError when that is not what we do.
    """
    probe, states = AttentionProbe(), StateProbe()
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=module.device)
    positions = torch.arange(2, device=module.device).unsqueeze(0)
    with torch.inference_mode(), active(probe), active_states(states):
        last = positions[0, 1:]
        logits = module(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=last).logits
    if logits.shape[:2] != (1, 1):
        raise ConfigError(f"{model_dir}: {type(module).__name__} does not honour logits_to_keep")
    num_layers = module.config.num_hidden_layers
    layer_types = getattr(module.config, "layer_types", None)
    attending = Counter(call.layer for call in probe.calls)
    for layer, layer_type in enumerate(layer_types or ["full_attention"] * num_layers):
        calls = (attending[layer], int(layer in states.parts))
        if calls != LAYER_TYPES.get(layer_type):
            raise ConfigError(
                f"{model_dir}: layer {layer} is {layer_type}, and for it attention ran {calls[0]} times and a recurrent "
                f"module that is served {calls[1]} times"
            )
    if not set(attending) | set(states.parts) <= set(range(num_layers)):
        raise ConfigError(f"{model_dir}: {type(module).__name__} has layers beside its {num_layers}")
    _check_window(model_dir, module.config, probe.calls)
    for call in probe.calls:
        _check_call(model_dir, call, layer_types[call.layer] if layer_types else None, TORCH_DTYPES[dtype])
    return probe.calls, states.parts


def lay_out(model_dir: Path, module: PreTrainedModel, dtype: str, max_model_len: int) -> LayerPlaces:
    """One group per distinct (window, KV heads, head_dim), in order of their first layers, then one per distinct state.

    Raises ConfigError when a layer asks for what is not served. model_dir is for its message.
    """
    calls, parts = _probe(model_dir, module, dtype)
    by_shape: dict[tuple[int, int, int], list[int]] = {}
    windows: dict[int, int] = {}  # by layer; 0: full attention
    for call in calls:
        # A window that no sequence outgrows is none.
        window = 0 if call.window is None or call.window >= max_model_len else call.window
        windows[call.layer] = window
        if call.source == call.layer:
            by_shape.setdefault((window, call.kv_heads, call.key_dim), []).append(call.layer)
        elif windows[call.source] != window:
            raise ConfigError(
                f"{model_dir}: layer {call.layer} shares the KV of layer {call.source}, but not its window, which is "
                "not served yet"
            )
    groups = tuple(
        LayerGroup(
            _group_name(shape, by_shape),
            tuple(layers),
            kv_heads=shape[1],
            head_dim=shape[2],
            dtype=dtype,
            kind=GroupKind.WINDOW if shape[0] else GroupKind.FULL,
            window=shape[0],
        )
        for shape, layers in by_shape.items()
    )
    own = _places(groups, 0)
    attention = {call.layer: replace(own[call.source], writes=call.source == call.layer) for call in calls}
    of_states = _state_groups(parts)
    return LayerPlaces(groups + of_states, attention, _places(of_states, len(groups)), tuple(calls))


def _places(groups: Sequence[LayerGroup], first: int) -> dict[int, LayerPlace]:
    """Of each layer of the groups, whose indices begin at `first`."""
    return {
        layer: LayerPlace(number, index)
        for number, group in enumerate(groups, first)
        for index, layer in enumerate(group.layers)
    }


def _state_groups(parts: Mapping[int, tuple[StatePart, ...]]) -> tuple[LayerGroup, ...]:
    """parts: of each recurrent layer."""
    by_parts: dict[tuple[StatePart, ...], list[int]] = {}
    for layer, of_layer in parts.items():
        by_parts.setdefault(of_layer, []).append(layer)
    return tuple(
        LayerGroup.of_states("states" if len(by_parts) == 1 else f"states-{layers[0]}", tuple(layers), of_layers)
        for of_layers, layers in by_parts.items()
    )


def _group_name(shape: tuple[int, int, int], shapes: Iterable[tuple[int, int, int]]) -> str:
    """Such as "full" or "window-512"; with heads and dims, as in "full-2x64", where that alone names several groups."""
    window, kv_heads, head_dim = shape
    name = f"window-{window}" if window else "full"
    alike = sum(other_window == window for other_window, _, _ in shapes)
    return name if alike == 1 else f"{name}-{kv_heads}x{head_dim}"


def _check_window(model_dir: Path, config: PretrainedConfig, calls: list[AttentionCall]) -> None:
    """Some families (phimoe) apply their window only in the mask that transformers builds, and here builds none."""
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "layer_types", None) or window >= max_model_len_of(model_dir, config):
        return
    if any(call.options.get("sliding_window") != window for call in calls):
        raise ConfigError(f"{model_dir}: sliding_window is {window}, but the layers do not ask attention for it")


def _check_call(model_dir: Path, call: AttentionCall, layer_type: str | None, dtype: torch.dtype) -> None:
    where = f"{model_dir}: layer {call.layer}"
    if call.masked or not call.causal:
        raise ConfigError(f"{where} attends with a mask of its own; only causal attention is served")
    if call.dtypes != {dtype}:
        raise ConfigError(f"{where} attends in {sorted(map(str, call.dtypes))}, not in the model's {dtype}")
    if call.key_dim != call.value_dim:
        raise ConfigError(
            f"{where}: keys have {call.key_dim} dims and values {call.value_dim}, which is not served yet"
        )
    if call.query_heads % call.kv_heads:
        raise ConfigError(f"{where}: {call.query_heads} query heads do not divide among {call.kv_heads} KV heads")
    unknown = call.options.keys() - HONOURED_OPTIONS - HARMLESS_OPTIONS
    if unknown:
        raise ConfigError(f"{where} asks for {', '.join(sorted(unknown))}, which paged attention does not honour")
    if layer_type is not None and (layer_type == "sliding_attention") != ("sliding_window" in call.options):
        raise ConfigError(f"{where} is {layer_type}, but its sliding_window is {call.options.get('sliding_window')}")


def max_model_len_of(model_dir: Path, config: PretrainedConfig) -> int:
    """Positions that the model's rotary embedding serves, whatever else is in the batch.

    Past `original_max_position_embeddings`, LongRoPE rotates every row by other factors as soon as one row is past it,
    so a request's answer would depend on its neighbours.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if config.model_type in ATTENTION_FREE:
        return LONGEST_RECURRENCE
    if not limit:
        raise ConfigError(f"{model_dir}/config.json has no max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") == "longrope":
            original = parameters.get("original_max_position_embeddings")
            limit = min(limit, original or getattr(config, "original_max_position_embeddings", None) or limit)
    return int(limit)
