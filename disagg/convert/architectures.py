"""What differs between a GGUF and a Hugging Face checkpoint, per architecture: names, configuration, stored values.

Everything that a file holds must be understood: an unknown tensor or a rope scaling is an error, because a model that
loads and is silently wrong is worse than one that does not load.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from disagg.convert.gguf_file import GgufFile
from disagg.types.errors import ConfigError

Weights = NDArray[np.float32]

GEMMA3_SLIDING_PATTERN: Final = 6  # every sixth layer attends to everything; llama.cpp has it as a constant too
GEMMA3_LOCAL_ROPE_THETA: Final = 10_000.0
GEMMA3_27B_LAYERS: Final = 62

_LAYER_TENSOR: Final = re.compile(r"blk\.(\d{1,9})\.(.+)")
_ROPE_SCALING: Final = re.compile(r"\.rope\.(scaling\.|scale_linear)")


class Architecture(Struct, frozen=True):
    """How to read one GGUF architecture. Name maps are from GGUF (without `blk.N.`) to Hugging Face."""

    top_names: Mapping[str, str]
    layer_names: Mapping[str, str]
    config: Callable[[GgufFile], dict[str, Any]]
    restore: Callable[[str, Weights, dict[str, Any]], Weights]


def architecture_of(gguf: GgufFile) -> Architecture:
    """Raises ConfigError for an architecture or a rope scaling that cannot be converted."""
    name = gguf.require("general.architecture")
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{gguf.path} holds architecture {name!r}; those that can be converted are {', '.join(ARCHITECTURES)}"
        )
    scaled = [key for key in gguf.metadata if _ROPE_SCALING.search(key)]
    if scaled:
        raise ConfigError(f"{gguf.path} uses rope scaling ({', '.join(scaled)}), which cannot be converted")
    return ARCHITECTURES[name]


def checkpoint_names(gguf: GgufFile, architecture: Architecture) -> dict[str, str]:
    """Hugging Face tensor name -> GGUF tensor name, in the file's order. Raises ConfigError for an unknown tensor."""
    names = {}
    num_layers = gguf.require(f"{gguf.require('general.architecture')}.block_count")
    for source in gguf.tensors:
        match = _LAYER_TENSOR.fullmatch(source)
        if match is None:
            target = architecture.top_names.get(source)
        elif isinstance(num_layers, int) and int(match[1]) >= num_layers:
            raise ConfigError(f"{gguf.path} holds tensor {source}, and says that it has {num_layers} layers")
        else:
            inner = architecture.layer_names.get(match[2])
            target = None if inner is None else f"model.layers.{match[1]}.{inner}"
        if target is None:
            raise ConfigError(f"{gguf.path} holds tensor {source}, which cannot be converted")
        names[target] = source
    return names


def _unpermute(values: Weights, num_heads: int) -> Weights:
    """values: [heads * head_dim, ...]. llama.cpp rotates neighbours (2i, 2i+1), transformers halves (i, i + d/2)."""
    half = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _restore_llama(name: str, values: Weights, config: dict[str, Any]) -> Weights:
    if ".q_proj." in name:
        return _unpermute(values, config["num_attention_heads"])
    if ".k_proj." in name:
        return _unpermute(values, config["num_key_value_heads"])
    return values


def _restore_gemma3(name: str, values: Weights, config: dict[str, Any]) -> Weights:
    # The GGUF holds 1 + weight, which is what the norm multiplies with; transformers adds the one itself.
    return values - np.float32(1.0) if name.endswith("norm.weight") else values


def _decimal(value: float) -> float:
    """The shortest decimal of a value stored as float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _common_config(gguf: GgufFile) -> dict[str, Any]:
    prefix = gguf.require("general.architecture")
    heads = gguf.require(f"{prefix}.attention.head_count")
    tokens = gguf.require("tokenizer.ggml.tokens")
    config = {
        "hidden_size": gguf.require(f"{prefix}.embedding_length"),
        "intermediate_size": gguf.require(f"{prefix}.feed_forward_length"),
        "num_hidden_layers": gguf.require(f"{prefix}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.metadata.get(f"{prefix}.attention.head_count_kv", heads),
        "max_position_embeddings": gguf.require(f"{prefix}.context_length"),
        "rms_norm_eps": _decimal(gguf.require(f"{prefix}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(gguf.metadata.get(f"{prefix}.rope.freq_base", 10_000.0)),
        "vocab_size": len(tokens),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": gguf.metadata.get("tokenizer.ggml.padding_token_id"),
        "use_cache": True,
    }
    head_dim = gguf.metadata.get(f"{prefix}.attention.key_length", config["hidden_size"] // heads)
    rotated = gguf.metadata.get(f"{prefix}.rope.dimension_count", head_dim)
    if rotated != head_dim:  # the modules of transformers that these become rotate whole heads
        raise ConfigError(
            f"{gguf.path} rotates {rotated} of the {head_dim} dimensions of a head ({prefix}.rope.dimension_count), which "
            "cannot be converted"
        )
    return {**config, "head_dim": head_dim}


def _llama_config(gguf: GgufFile) -> dict[str, Any]:
    if gguf.metadata.get("llama.expert_count", 0):
        raise ConfigError(f"{gguf.path} is a mixture of experts, which cannot be converted")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": False,
        **_common_config(gguf),
    }


def _gemma3_config(gguf: GgufFile) -> dict[str, Any]:
    common = _common_config(gguf)
    num_layers = common["num_hidden_layers"]
    layer_types = [
        "full_attention" if layer % GEMMA3_SLIDING_PATTERN == 0 else "sliding_attention"
        for layer in range(1, num_layers + 1)
    ]
    # The largest Gemma 3 scales its queries by hidden / heads, all others by the head's own width.
    scalar = common["head_dim"]
    if num_layers == GEMMA3_27B_LAYERS:
        scalar = common["hidden_size"] // common["num_attention_heads"]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": gguf.require("gemma3.attention.sliding_window"),
        "layer_types": layer_types,
        "rope_local_base_freq": GEMMA3_LOCAL_ROPE_THETA,
        **common,
    }


_TOP_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PROJECTIONS: Final = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture(
        top_names=_TOP_NAMES,
        layer_names={
            **_PROJECTIONS,
            "attn_norm.weight": "input_layernorm.weight",
            "ffn_norm.weight": "post_attention_layernorm.weight",
        },
        config=_llama_config,
        restore=_restore_llama,
    ),
    "gemma3": Architecture(
        top_names=_TOP_NAMES,
        layer_names={
            **_PROJECTIONS,
            "attn_q_norm.weight": "self_attn.q_norm.weight",
            "attn_k_norm.weight": "self_attn.k_norm.weight",
            "attn_norm.weight": "input_layernorm.weight",
            "post_attention_norm.weight": "post_attention_layernorm.weight",
            "ffn_norm.weight": "pre_feedforward_layernorm.weight",
            "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
        },
        config=_gemma3_config,
        restore=_restore_gemma3,
    ),
}
