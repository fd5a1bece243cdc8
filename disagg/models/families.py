"""Which architectures are served.

A `model_type` is here only if its parity test passes: some architectures ignore the attention registry without raising
(falcon, mpt, bloom), or keep part of what attention must do in a mask of their own, and their text would be silently
wrong.
"""

from __future__ import annotations

FAMILIES = frozenset(
    {
        "afmoe",
        "apertus",
        "arcee",
        "bamba",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cwm",
        "dots1",
        "ernie4_5",
        "exaone4",
        "exaone_moe",
        "falcon_h1",
        "falcon_mamba",
        "flex_olmo",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "helium",
        "hunyuan_v1_dense",
        "jamba",
        "laguna",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "llama",
        "mamba",
        "mamba2",
        "mellum",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "modernbert-decoder",
        "nanochat",
        "nemotron",
        "nemotron_h",
        "olmo",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "olmoe",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "seed_oss",
        "smollm3",
        "starcoder2",
        "vaultgemma",
    }
)

# Those without any attention layer: what a sequence needs does not grow with it.
ATTENTION_FREE = frozenset({"falcon_mamba", "mamba", "mamba2"})
