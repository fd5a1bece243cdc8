"""Tiny random models as Hugging Face directories that the whole server can serve, and whose answers depend on context.

Weights are far larger than a trained model's initialisation, so that attention is peaked and greedy outputs change when
any part of the cache does (test_power.py). Sliding windows are 16 tokens, so that short tests cross them.
"""

from __future__ import annotations

import json
import string
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

VOCAB_SIZE = 512
EOS_TOKEN_ID = 256
WINDOW = 16
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_MIXED_LAYERS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}

# The last two layers have no KV of their own: they read that of the last layer of their type before them.
_SHARING_LAYERS = {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
_MAMBA1 = {"state_size": 8, "time_step_rank": 8, "intermediate_size": 128}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
_RECURRENT_LAYERS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA_NET = {
    **_RECURRENT_LAYERS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_SHORT_CONV = {"layer_types": ["conv", "full_attention", "conv"]}
_FEW_EXPERTS = {**_EXPERTS, **_MIXED_LAYERS, "num_local_experts": 4, "num_shared_experts": 1}

# What a family's tiny config has beside _COMMON. A family is served only if it is here and its parity test passes.
FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    "afmoe": {**_FEW_EXPERTS, "num_dense_layers": 1},
    "apertus": {},
    "arcee": {},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "cohere": {"use_qk_norm": True},
    "cohere2": _MIXED_LAYERS,
    "cohere2_moe": {**_FEW_EXPERTS, "first_k_dense_replace": 1},
    "cwm": {**_MIXED_LAYERS, "bos_token_id": 0},
    "dots1": {**_ROUTED, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "ernie4_5": {},
    "exaone4": _MIXED_LAYERS,
    "exaone_moe": {**_FEW_EXPERTS, "mlp_layer_types": ["dense", "sparse", "sparse"], "n_group": 1, "topk_group": 1},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 128},
    "falcon_mamba": _MAMBA1,
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {},
    "gemma2": {**_MIXED_LAYERS, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_MIXED_LAYERS, "query_pre_attn_scalar": 16},
    "gemma3n_text": {**_SHARING_LAYERS, "altup_num_inputs": 2, "laurel_rank": 8},
    "gemma4_text": {
        **_SHARING_LAYERS,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "use_double_wide_mlp": True,
        "use_bidirectional_attention": "vision",
        "enable_moe_block": True,
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "top_k_experts": 2,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": {**_ROUTED, "first_k_dense_replace": 1, "n_shared_experts": 1, "use_qk_norm": True},
    "gpt_neox": {"num_key_value_heads": 4},
    "gpt_oss": {**_MIXED_LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.8, "logits_scaling": 2.0},
    "granite_swa": {**_MIXED_LAYERS, "attention_multiplier": 0.2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.2},
    "granitemoehybrid": {
        **_MAMBA2,
        **_RECURRENT_LAYERS,
        "attention_multiplier": 0.2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    },
    "granitemoe_swa": {**_FEW_EXPERTS, "attention_multiplier": 0.2},
    "helium": {},
    "hunyuan_v1_dense": {},
    "jamba": {
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "laguna": {
        **_FEW_EXPERTS,
        "num_attention_heads_per_layer": [4, 2, 4],
        "shared_expert_intermediate_size": 48,
    },
    "lfm2": _SHORT_CONV,
    "lfm2_moe": {**_SHORT_CONV, **_EXPERTS, "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"], "sliding_window": WINDOW},
    "llama": {},
    "mamba": _MAMBA1,
    "mamba2": {"num_heads": 8, "n_groups": 2, "state_size": 8, "chunk_size": 16},
    "mellum": _FEW_EXPERTS,
    "ministral": _MIXED_LAYERS,
    "ministral3": {"sliding_window": WINDOW},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "modernbert-decoder": {**_MIXED_LAYERS, "num_key_value_heads": 4, "pad_token_id": 0, "bos_token_id": 0},
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": {
        **_ROUTED,
        "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 16,
        "time_step_min": 1e-9,
        "moe_shared_expert_intermediate_size": 48,
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": _MIXED_LAYERS,
    "olmo_hybrid": _DELTA_NET,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi": {},
    "phi3": {"sliding_window": WINDOW},
    "phimoe": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {**_MIXED_LAYERS, "use_sliding_window": True},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3": {**_MIXED_LAYERS, "use_sliding_window": True},
    "qwen3_5_moe_text": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_moe": {**_EXPERTS, "use_sliding_window": True, "sliding_window": WINDOW},
    "qwen3_next": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 48},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "starcoder2": {"sliding_window": WINDOW},
    "vaultgemma": {**_MIXED_LAYERS, "query_pre_attn_scalar": 16},
}

# The families of `make check`: of everything that sets families apart, one has it. `make test` tries all families.
SHORT_LIST = (
    "cohere",  # norms of heads
    "falcon_h1",  # attention beside a recurrent state, in every layer
    "gemma2",  # sliding windows, softcaps
    "gemma3n_text",  # layers that share KV
    "gpt_neox",  # no grouped queries
    "gpt_oss",  # attention sinks, experts
    "jamba",  # recurrent layers and experts
    "lfm2",  # short convolutions
    "llama",
    "mamba2",  # no attention
    "mixtral",  # experts
    "phi3",  # fused projections
    "qwen2",  # biases
    "qwen3_next",  # gated delta rule
    "starcoder2",  # a bias of the output projection
)


def families() -> list[Any]:
    """Parameters of tests that every family has to pass."""
    return [pytest.param(name, marks=() if name in SHORT_LIST else pytest.mark.long) for name in sorted(FAMILY_CONFIGS)]


def tiny_config(model_type: str, **overrides: Any) -> PretrainedConfig:
    # A copy: some configs change the lists that they are given.
    return AutoConfig.for_model(model_type, **deepcopy({**_COMMON, **FAMILY_CONFIGS[model_type], **overrides}))


def make_tiny(model_type: str, directory: Path, *, seed: int = 0, weight_scale: float = 1.0, **overrides: Any) -> Path:
    """Writes config, weights and tokenizer of a tiny model of that family; returns the directory.

    overrides replace config fields, for example num_key_value_heads=8 with num_attention_heads=8.
    """
    config = tiny_config(model_type, **overrides)
    with torch.random.fork_rng(devices=[]):  # all is made on the CPU
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomise(model, weight_scale)
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def _randomise(model: torch.nn.Module, weight_scale: float) -> None:
    """Matrices of gain `weight_scale`, twice that where attention decides what to read and what it adds."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape)
            if name.endswith("A_log"):
                weight.copy_(0.5 * noise - 3)  # states that last for some twenty tokens
            elif weight.dim() == 1:
                weight.add_(0.1 * noise)
            elif "embed" in name or "lm_head" in name:
                weight.copy_(noise * weight_scale / weight.shape[-1] ** 0.5)
            else:
                attention = any(part in name for part in ("attn", "attention"))
                weight.copy_(noise * weight_scale * (2.0 if attention else 1.0) / weight.shape[-1] ** 0.5)


def write_tokenizer(directory: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """A byte-level BPE tokenizer in which all ids mean something: 256 bytes, special tokens, letter pairs up to 512, and
    after those words that no text becomes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in string.ascii_lowercase for b in string.ascii_lowercase]
    pairs = pairs[: VOCAB_SIZE - len(alphabet) - len(SPECIAL_TOKENS)]
    words = (f"word{number}" for number in range(VOCAB_SIZE, vocab_size))
    tokens = [*alphabet, *SPECIAL_TOKENS, *(a + b for a, b in pairs), *words]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
