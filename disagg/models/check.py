"""Whether a directory holds a model that servers take, by its configuration and the headers of its weights.

The same for whoever loads a model and for whoever only asks (`worker/check`). The module is made on the meta device, where
weights have shapes and no bytes; it takes the stored tensors there as it would take them in memory, and is probed there. So
no weight is read, and what is refused costs no memory. Knows transformers' configurations and modules; nothing of pools.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError, StrictDataclassFieldValidationError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig

from disagg.convert.safetensors_file import TensorHeader, find_weight_files, read_header
from disagg.messages.heads import SliceError, check_heads
from disagg.messages.layout import DTYPE_BYTES
from disagg.models.attention.calls import ATTENTION_NAME
from disagg.models.families import ATTENTION_FREE, FAMILIES
from disagg.models.layers import LAYER_TYPES, lay_out, max_model_len_of
from disagg.models.pool import TORCH_DTYPES
from disagg.models.ranks import Ranks
from disagg.models.sharding import shard
from disagg.models.stages import cuts_of, hidden_of
from disagg.models.states import attach
from disagg.models.surplus import further_layers_of, strangers, surplus
from disagg.text.model_files import CONFIG, ModelFiles
from disagg.types.errors import ConfigError
from disagg.types.plain import one_line, quoted

MOST_MADE = 2  # times the weights that are stored: tied ones may be stored once, and are counted once
SMALL_MODEL = 1 << 20
MOST_NUMBER = 1 << 62  # what torch counts sizes with has 63 bits
SHOWN = 3  # of many tensors that are wrong in the same way
CAUSAL_FOR_TEXT = (None, False, "vision")  # "vision": both ways among the tokens of an image only
META = torch.device("meta")

_FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WHOLE_DTYPES = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_STORED_DTYPES = {**_FLOAT_DTYPES, **_WHOLE_DTYPES, "BOOL": torch.bool}
_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "head_dim"),
    "max_position_embeddings",
)
_TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_CONTAINER_WORDS = {list: "a list", tuple: "a list", dict: "an object"}
# Names of the library's classes say nothing to whoever wrote the file.
_CLASS_NAME = re.compile(r"[`']?\b[A-Z]\w*(?:Config|ForCausalLM|PreTrainedModel|Model|Error)\b[`']?:?")


def check_model(files: ModelFiles, dtype: str, tp: int = 1, pp: int = 1) -> int:
    """How many of the stored values the model does not use, such as those of a vision tower.

    Raises ConfigError, one sentence, where servers with `pp` stages of `tp` ranks that compute in `dtype` cannot serve this
    exactly. Costs the library's modules without their weights: some hundredths of a second, some seconds for hundreds of layers
    of experts.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}")
    path = files.model_dir / CONFIG
    said = _check_config_file(files)
    _check_heads(path, said, tp)
    stored = _stored(files.model_dir)
    with _quietly():
        config = _config(path, said)
        _check_numbers(path, said, config)
        module = _make(path, config, dtype)
        _check_size(path, module, stored)
        unused = _check_tensors(files.model_dir, module, stored, dtype)
        _check_surplus(files.model_dir, said, module, stored, unused)
    _check_layers(files.model_dir, module, dtype, tp, pp)
    return sum(stored[name].num_values for name in unused if name in stored)


def _stored(model_dir: Path) -> dict[str, TensorHeader]:
    return {name: tensor for path in find_weight_files(model_dir) for name, tensor in read_header(path).tensors.items()}


# ---- what config.json says


def _check_config_file(files: ModelFiles) -> dict[str, Any]:
    """What it says."""
    path = files.model_dir / CONFIG
    if CONFIG not in files.contents:
        raise ConfigError(f"model directory {files.model_dir} lacks {CONFIG}")
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
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or not all(isinstance(each, str) for each in layer_types):
        raise ConfigError(f"{path}: layer_types must be a list of names")
    other = set(layer_types) - LAYER_TYPES.keys()
    if other:
        raise ConfigError(f"{path} has layers of type {', '.join(sorted(other))}; served are {sorted(LAYER_TYPES)}")
    return config


def _check_heads(path: Path, config: Mapping[str, Any], tp: int) -> None:
    """As far as config.json says it. Layers with heads of their own are checked later."""
    for name in _SIZES:
        value = config.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 < value < MOST_NUMBER):
            raise ConfigError(f"{path}: {name} is {_shown(value)}; it must be a whole number from 1")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if not heads:
        return
    if kv_heads is not None and (
        not isinstance(kv_heads, int) or isinstance(kv_heads, bool) or not 0 < kv_heads <= heads
    ):
        raise ConfigError(
            f"{path}: num_key_value_heads is {_shown(kv_heads)}; it must be a whole number from 1 to {heads}"
        )
    if kv_heads and heads % kv_heads:
        raise ConfigError(
            f"{path}: num_attention_heads is {heads} and num_key_value_heads {kv_heads}; the first must be a multiple of "
            "the second"
        )
    if tp == 1:
        return
    try:
        check_heads(tp, heads, kv_heads or heads)
    except SliceError as error:
        raise ConfigError(f"{path.parent}: {error}") from error


def _config(path: Path, said: Mapping[str, Any]) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path.parent, local_files_only=True)
    except MemoryError:
        raise
    except StrictDataclassFieldValidationError as error:
        field = str(error).partition("'")[2].partition("'")[0]
        raise ConfigError(
            f"{path}: {field} is {_shown(said.get(field))}; it must be {_allowed(said['model_type'], field)}"
        ) from error
    except Exception as error:  # the libraries raise exceptions of every kind for files that make no sense
        raise _nonsense(path, error) from error
    return config


def _check_numbers(path: Path, said: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Numbers that are none, and what the library does not look at before it computes with them."""
    defaults = type(config)()
    for name, value in _numbers(said):
        if isinstance(value, float) and not math.isfinite(value):
            default = getattr(defaults, name, 0.0)
            if not isinstance(default, float) or math.isfinite(default):
                raise ConfigError(f"{path}: {name} is {value}; it must be a finite number")
        elif abs(value) >= MOST_NUMBER:
            raise ConfigError(f"{path}: {name} is {_shown(value)}; it must be below {MOST_NUMBER}")
        elif value < 0 and name.endswith(("_eps", "_epsilon")):
            raise ConfigError(f"{path}: {name} is {value}; it must be 0 or more")


def _numbers(said: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Also of objects within. Lists may hold infinities, as limits."""
    for name, value in said.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


def _allowed(model_type: str, field: str) -> str:
    """In words, what the library's declaration of the field allows."""
    declared = {each.name: each.type for each in dataclasses.fields(CONFIG_MAPPING[model_type])}
    return " or ".join(dict.fromkeys(_words(declared.get(field))))


def _words(hint: Any) -> Iterator[str]:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for each in typing.get_args(hint):
            yield from _words(each)
    elif origin is typing.Literal:
        yield "one of " + ", ".join(repr(each) for each in typing.get_args(hint))
    elif origin is typing.Annotated:
        yield from _words(typing.get_args(hint)[0])
    elif hint in _TYPE_WORDS:
        yield _TYPE_WORDS[hint]
    else:
        yield _CONTAINER_WORDS.get(origin or hint, "an object")


def _shown(value: object) -> str:
    """At most a line of whatever it is."""
    if isinstance(value, int) and abs(value) >= MOST_NUMBER:
        return "a number too large to count with"
    return quoted(value) if isinstance(value, str) else one_line(repr(value), 80)


def _nonsense(path: Path, error: Exception) -> ConfigError:
    """In the library's words, less the names of its classes."""
    return ConfigError(f"{path} describes no model that can be made: {_in_words(error)}")


def _in_words(error: BaseException) -> str:
    if isinstance(error, StrictDataclassError):  # names a function of the library's
        error = error.__cause__ or error
    if isinstance(error, KeyError):
        return f"{one_line(str(error), 80)} is no name that is known there"
    lines = [line.strip() for line in _CLASS_NAME.sub("", str(error)).splitlines() if line.strip()]
    return one_line(" ".join(lines), 400)


# ---- what it makes, and what is stored for it


def _make(path: Path, config: PretrainedConfig, dtype: str) -> PreTrainedModel:
    """The module without weights."""
    made: Any = AutoModelForCausalLM
    try:
        with META:
            module: PreTrainedModel = made.from_config(
                config,
                attn_implementation=ATTENTION_NAME,
                experts_implementation="batched_mm",  # needs no values to know which rows go where
                dtype=TORCH_DTYPES[dtype],
            )
    except MemoryError:
        raise
    except Exception as error:  # as above
        raise _nonsense(path, error) from error
    return module


def _check_size(path: Path, module: PreTrainedModel, stored: Mapping[str, TensorHeader]) -> None:
    """Weights that a checkpoint lacks are made before they are missed, so a wrong size would take any memory."""
    num_stored = sum(tensor.num_values for tensor in stored.values())
    described = sum(weight.numel() for weight in module.parameters())
    if described > MOST_MADE * num_stored + SMALL_MODEL:
        raise ConfigError(f"{path} describes a model of {described} weights, and {num_stored} are stored beside it")


def _check_tensors(
    model_dir: Path, module: PreTrainedModel, stored: Mapping[str, TensorHeader], dtype: str
) -> set[str]:
    """Each weight is there, in its shape, as numbers. Tied ones are there once. Returns the names of what is too much, less
    what the model's class knows to be of no use."""
    state = module.state_dict()
    whole = any(not each.is_floating_point() for each in state.values())
    taken = {
        name: torch.empty(tensor.shape, dtype=_STORED_DTYPES[tensor.dtype], device=META)
        for name, tensor in stored.items()
        if tensor.dtype in (_STORED_DTYPES if whole else _FLOAT_DTYPES)
    }
    conversions: Any = get_model_conversion_mapping(module)
    how = LoadStateDictConfig(
        device_map={"": META},
        dtype=TORCH_DTYPES[dtype],
        dtype_plan=module._get_dtype_plan(TORCH_DTYPES[dtype]),
        weight_mapping=conversions,
        ignore_mismatched_sizes=True,  # they are told here, all at once
    )
    loading: Any = module
    try:
        report, _ = loading._load_pretrained_model(module, taken, None, how)
        if report.conversion_errors:
            torn = sorted(report.conversion_errors)
            raise ConfigError(
                f"{model_dir}: what is stored for {torn[0]} cannot be put together: tensors are missing, or have another "
                f"shape than {CONFIG} asks for"
            )
        found = loading._finalize_model_loading(module, how, report).to_dict()
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # as above
        raise ConfigError(f"{model_dir}: the stored weights do not fit {CONFIG}: {_in_words(error)}") from error
    if found["mismatched_keys"]:
        rows = sorted((name, list(has), list(wants)) for name, has, wants in found["mismatched_keys"])
        shown = "; ".join(
            f"{name} is stored as {has}, and {CONFIG} asks for {wants}" for name, has, wants in rows[:SHOWN]
        )
        raise ConfigError(f"{model_dir} has {len(rows)} weights of another shape: {shown}")
    if found["missing_keys"]:
        missing = sorted(found["missing_keys"])
        others = sorted((name not in missing, name) for name in stored if name not in taken)
        if others:
            _, other = others[0]
            raise ConfigError(
                f"{model_dir}: {other} is stored as {stored[other].dtype}; weights must be stored as one of "
                f"{', '.join(_FLOAT_DTYPES)}"
            )
        raise ConfigError(f"{model_dir} lacks {len(missing)} weights, such as {missing[0]}")
    return set(found["unexpected_keys"]) | (stored.keys() - taken.keys() - state.keys())


def _check_surplus(
    model_dir: Path,
    said: Mapping[str, Any],
    module: PreTrainedModel,
    stored: Mapping[str, TensorHeader],
    unused: set[str],
) -> None:
    """What is stored beside the model is ignored, but not when it is more of the model itself."""
    num_layers = getattr(module.config.get_text_config(), "num_hidden_layers", None) or 0
    used = module.state_dict().keys() | (stored.keys() - unused)
    more = surplus(unused, used, num_layers, further_layers_of(said))
    if more:
        raise ConfigError(
            f"{model_dir} holds {len(more)} weights more than {CONFIG} describes, such as {quoted(more[0])}: it would be "
            f"served as a model of {num_layers} layers, without them"
        )
    beside = {name for name in unused if name not in stored or stored[name].dtype in _FLOAT_DTYPES}
    if more := strangers(beside, used):
        raise ConfigError(
            f"{model_dir} holds {len(more)} weights in parts of the model that {CONFIG} does not describe, such as "
            f"{quoted(more[0])}: it would be served without them; write down what they are there, merge them, or leave them out"
        )


def _check_layers(model_dir: Path, module: PreTrainedModel, dtype: str, tp: int, pp: int) -> None:
    """What layers keep, and whether stages and ranks can share it."""
    module.train(False).requires_grad_(False)
    try:
        attach(module)
        longest = max_model_len_of(model_dir, module.config)
        try:
            places = lay_out(model_dir, module, dtype, longest)
        except (ConfigError, MemoryError):
            raise
        except Exception:  # noqa: BLE001  # as above; or it is nothing but an operation that needs values
            places = lay_out(model_dir, _with_zeros(module), dtype, longest)
        if pp > 1:
            hidden_of(module, lambda: lay_out(model_dir, module, dtype, longest))
            cuts_of(module, places, pp)
        if tp > 1:
            shard(module, places.calls, Ranks(0, tp))
    except ConfigError as error:
        where = str(model_dir)
        raise error if where in str(error) else ConfigError(f"{where}: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # as above
        raise ConfigError(f"{model_dir} cannot be computed as {CONFIG} describes it: {_in_words(error)}") from error


def _with_zeros(module: PreTrainedModel) -> PreTrainedModel:
    """On the CPU, where every operation is. Each weight is one zero, seen in the weight's shape; buffers, which a forward may
    write, are zeros of their own."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = torch.nn.Parameter(_zeros_like(weight), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
        for name, kept in list(vars(part).items()):  # such as LongRoPE's long frequencies, since the first forward
            if isinstance(kept, torch.Tensor):
                setattr(part, name, torch.zeros(kept.shape, dtype=kept.dtype))
    return module


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


@contextmanager
def _quietly() -> Iterator[None]:
    """The library reports on stderr what is refused here in one sentence."""
    logging: Any = transformers.logging
    before, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bar:
            logging.enable_progress_bar()
