"""Which architectures are served.

A `model_type` is here only if its parity test passes: some architectures ignore the attention registry without raising
(falcon, mpt, bloom), or keep part of what attention must do in a mask of their own, and their text would be silently
wrong.
"""

from __future__ import annotations

FAMILIES = frozenset(
    {
        "apertus",
        "arcee",
        "cohere",
        "cohere2",
        "cwm",
        "dots1",
        "ernie4_5",
        "exaone4",
        "flex_olmo",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "granitemoe",
        "helium",
        "hunyuan_v1_dense",
        "llama",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "nanochat",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
        "vaultgemma",
    }
)
