"""Loads a Hugging Face directory and finds out what its layers keep, or says why it cannot be served.

Knows transformers' configs and modules; nothing of pools or batches. Layer shapes are not taken from the config, whose
fields differ between families, but from one probing forward of two tokens that records what every attention layer asks
and what state every recurrent layer keeps. Layers whose cache has one shape and one lifetime become one layer group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from disagg.convert.safetensors_file import find_weight_files, read_header
from disagg.messages.heads import SliceError, check_heads
from disagg.messages.layout import DTYPE_BYTES, GroupKind, LayerGroup, StatePart
from disagg.models.attention.calls import ATTENTION_NAME, LayerSlot, active
from disagg.models.families import ATTENTION_FREE, FAMILIES
from disagg.models.identity import detach_from_files, hash_threads, stamps, weights_hash
from disagg.models.pool import TORCH_DTYPES
from disagg.models.probe import AttentionCall, AttentionProbe
from disagg.models.ranks import Ranks
from disagg.models.sharding import shard
from disagg.models.states import StateProbe, active_states, attach
from disagg.text.model_files import CONFIG, ModelFiles
from disagg.types.errors import ConfigError, FilesChanged

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

MOST_MADE = 2  # times the weights that are stored: tied ones may be stored once, and are counted once
SMALL_MODEL = 1 << 20

CHANGED = "files in {} were written or replaced while they were loaded"

CAUSAL_FOR_TEXT = (None, False, "vision")  # "vision": both ways among the tokens of an image only

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
    attention: dict[int, LayerSlot]
    states: dict[int, LayerSlot]
    calls: tuple[AttentionCall, ...]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A module in eval mode on its device, cut for its rank, and what its directory says about the whole model."""

    module: PreTrainedModel
    places: LayerPlaces
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    weights_hash: str  # see models/identity
    files: Mapping[str, str]  # digests of the small files beside the weights, see text/model_files


def load(model_dir: Path, dtype: str, device: str, ranks: Ranks | None = None) -> LoadedModel:
    """Raises ConfigError when the directory holds no model that this version can serve exactly, or not on these ranks; and
    FilesChanged when its files were written or replaced meanwhile.

    ranks: not yet connected; None for one that computes all of it.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}")
    before = stamps(model_dir)
    try:
        loaded = _load(model_dir, dtype, device, ranks or Ranks())
    except ConfigError as error:
        if stamps(model_dir) != before:
            raise FilesChanged(f"{CHANGED.format(model_dir)}: {error}") from error
        raise
    if stamps(model_dir) != before:
        raise FilesChanged(CHANGED.format(model_dir))
    return loaded


def _load(model_dir: Path, dtype: str, device: str, ranks: Ranks) -> LoadedModel:
    files = ModelFiles.read(model_dir)
    config = _check_config_file(model_dir, files)
    _check_ranks(model_dir, config, ranks.size)
    _check_size(model_dir)
    module, report = _from_pretrained(model_dir, dtype)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ConfigError(f"{model_dir} lacks {len(missing)} weights, such as {missing[0]}")
    eos_token_ids = _eos_token_ids(module)
    if device == "cpu":
        detach_from_files(module)
    digests = files.digests()
    identity = weights_hash(module, digests[CONFIG], eos_token_ids, hash_threads(ranks.size))
    if ranks.size == 1:
        torch.nn.Module.to(module, device)
    module.train(False).requires_grad_(False)
    try:
        attach(module)
    except ConfigError as error:
        raise ConfigError(f"{model_dir}: {error}") from error
    max_model_len = _max_model_len(model_dir, module.config)
    places = lay_out(model_dir, module, dtype, max_model_len)
    if ranks.size > 1:
        # What layers ask was found out on the CPU: no device needs to hold more than its rank's part.
        places = _on_rank(model_dir, module, places, ranks)
        torch.nn.Module.to(module, device)
    return LoadedModel(
        module=module,
        places=places,
        vocab_size=module.config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        weights_hash=identity,
        files=digests,
    )


def _from_pretrained(model_dir: Path, dtype: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The module on the CPU, and transformers' report of missing and unexpected weights."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except MemoryError:
        raise
    except Exception as error:  # the libraries raise exceptions of every kind for files that make no sense
        raise ConfigError(f"{model_dir} cannot be loaded: {type(error).__name__}: {str(error)[:2000]}") from error
    module, report = loaded
    return module, report


def _check_size(model_dir: Path) -> None:
    """Weights that a checkpoint lacks are made before they are missed, so a wrong size in config.json would take any memory.

    The module is made on the meta device, where weights have shapes and no bytes.
    """
    stored = sum(
        each.num_values for path in find_weight_files(model_dir) for each in read_header(path).tensors.values()
    )
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        with torch.device("meta"):
            made: Any = AutoModelForCausalLM
            module = made.from_config(config, attn_implementation=ATTENTION_NAME)
    except MemoryError:
        raise
    except Exception as error:  # as in _from_pretrained
        raise ConfigError(
            f"{model_dir / CONFIG} describes no model: {type(error).__name__}: {str(error)[:400]}"
        ) from error
    described = sum(weight.numel() for weight in module.parameters())
    if described > MOST_MADE * stored + SMALL_MODEL:
        raise ConfigError(
            f"{model_dir / CONFIG} describes a model of {described} weights, and {stored} are stored beside it"
        )


def _on_rank(model_dir: Path, module: PreTrainedModel, places: LayerPlaces, ranks: Ranks) -> LayerPlaces:
    """Cuts the module, and notes what attention has to cut itself."""
    try:
        cuts = shard(module, places.calls, ranks)
    except ConfigError as error:
        raise ConfigError(f"{model_dir}: {error}") from error
    attention = {layer: replace(slot, cut=cuts.get(layer)) for layer, slot in places.attention.items()}
    return replace(places, attention=attention)


def _check_ranks(model_dir: Path, config: Mapping[str, Any], tp: int) -> None:
    """As far as config.json says it, so before weights are read. Layers with heads of their own are checked later."""
    query_heads = config.get("num_attention_heads")
    if tp == 1 or not query_heads:
        return
    try:
        check_heads(tp, query_heads, config.get("num_key_value_heads") or query_heads)
    except SliceError as error:
        raise ConfigError(f"{model_dir}: {error}") from error


def _check_config_file(model_dir: Path, files: ModelFiles) -> dict[str, Any]:
    """What it says."""
    path = model_dir / CONFIG
    if CONFIG not in files.contents:
        raise ConfigError(f"model directory {model_dir} lacks {CONFIG}")
    config = files.json(CONFIG)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"{path}: model_type {model_type!r:.80} is not served; served are {', '.join(sorted(FAMILIES))}"
        )
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(f"{path}: transformers {transformers.__version__} does not know model_type {model_type!r}")
    if not config.get("num_attention_heads") and model_type not in ATTENTION_FREE:
        raise ConfigError(f"{path} has no num_attention_heads")
    if config.get("quantization_config"):
        raise ConfigError(f"{path} has a quantization_config; only float32, bfloat16 and float16 weights are served")
    if config.get("use_bidirectional_attention") not in CAUSAL_FOR_TEXT:
        raise ConfigError(f"{path} sets use_bidirectional_attention; only causal attention is served")
    other = set(config.get("layer_types") or ()) - LAYER_TYPES.keys()
    if other:
        raise ConfigError(f"{path} has layers of type {', '.join(sorted(other))}; served are {sorted(LAYER_TYPES)}")
    return config


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
    slots = {call.layer: replace(own[call.source], writes=call.source == call.layer) for call in calls}
    of_states = _state_groups(parts)
    return LayerPlaces(groups + of_states, slots, _places(of_states, len(groups)), tuple(calls))


def _places(groups: Sequence[LayerGroup], first: int) -> dict[int, LayerSlot]:
    """Of each layer of the groups, whose indices begin at `first`."""
    return {
        layer: LayerSlot(index, slot)
        for index, group in enumerate(groups, first)
        for slot, layer in enumerate(group.layers)
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
    if window is None or getattr(config, "layer_types", None) or window >= _max_model_len(model_dir, config):
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


def _max_model_len(model_dir: Path, config: PretrainedConfig) -> int:
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


def _eos_token_ids(module: PreTrainedModel) -> tuple[int, ...]:
    """The generation config's, which chat models extend by their end-of-turn token; else the config's."""
    generation = module.generation_config
    ids = generation.eos_token_id if generation is not None else None
    if ids is None:
        ids = getattr(module.config, "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
