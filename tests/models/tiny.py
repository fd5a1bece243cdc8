"""Tiny random models as Hugging Face directories that the whole server can serve, and whose answers depend on context.

Weights are far larger than a trained model's initialisation, so that attention is peaked and greedy outputs change when
any part of the cache does (test_power.py). Sliding windows are 16 tokens, so that short tests cross them.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

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

# What a family's tiny config has beside _COMMON. A family is served only if it is here and its parity test passes.
FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere": {"use_qk_norm": True},
    "cohere2": _MIXED_LAYERS,
    "cwm": {**_MIXED_LAYERS, "bos_token_id": 0},
    "dots1": {**_ROUTED, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "ernie4_5": {},
    "exaone4": _MIXED_LAYERS,
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {},
    "gemma2": {**_MIXED_LAYERS, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_MIXED_LAYERS, "query_pre_attn_scalar": 16},
    "glm": {},
    "glm4": {},
    "glm4_moe": {**_ROUTED, "first_k_dense_replace": 1, "n_shared_experts": 1, "use_qk_norm": True},
    "gpt_neox": {"num_key_value_heads": 4},
    "gpt_oss": {**_MIXED_LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.8, "logits_scaling": 2.0},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.2},
    "helium": {},
    "hunyuan_v1_dense": {},
    "llama": {},
    "ministral": _MIXED_LAYERS,
    "ministral3": {"sliding_window": WINDOW},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _MIXED_LAYERS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi": {},
    "phi3": {"sliding_window": WINDOW},
    "phimoe": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {**_MIXED_LAYERS, "use_sliding_window": True},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3": {**_MIXED_LAYERS, "use_sliding_window": True},
    "qwen3_moe": {**_EXPERTS, "use_sliding_window": True, "sliding_window": WINDOW},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "starcoder2": {"sliding_window": WINDOW},
    "vaultgemma": {**_MIXED_LAYERS, "query_pre_attn_scalar": 16},
}


def make_tiny(model_type: str, directory: Path, *, seed: int = 0, weight_scale: float = 1.0, **overrides: Any) -> Path:
    """Writes config, weights and tokenizer of a tiny model of that family; returns the directory.

    overrides replace config fields, for example num_key_value_heads=8 with num_attention_heads=8.
    """
    config = AutoConfig.for_model(model_type, **{**_COMMON, **FAMILY_CONFIGS[model_type], **overrides})
    with torch.random.fork_rng():
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
            if weight.dim() == 1:
                weight.add_(0.1 * noise)
            elif "embed" in name or "lm_head" in name:
                weight.copy_(noise * weight_scale / weight.shape[-1] ** 0.5)
            else:
                attention = any(part in name for part in ("attn", "attention"))
                weight.copy_(noise * weight_scale * (2.0 if attention else 1.0) / weight.shape[-1] ** 0.5)


def write_tokenizer(directory: Path) -> None:
    """A byte-level BPE tokenizer in which all 512 ids mean something: 256 bytes, special tokens, letter pairs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in string.ascii_lowercase for b in string.ascii_lowercase]
    pairs = pairs[: VOCAB_SIZE - len(alphabet) - len(SPECIAL_TOKENS)]
    vocab = {token: index for index, token in enumerate([*alphabet, *SPECIAL_TOKENS, *(a + b for a, b in pairs)])}
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
