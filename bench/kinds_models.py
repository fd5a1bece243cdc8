"""Models whose layers differ, in the shapes of served ones and in small ones, and what `bench.kinds` asks each."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Shape(Struct, frozen=True):
    """A model and what it is asked. pool_mib: of KV. at_once, outputs: of long prompts of `tokens`.

    documents: how many, of document_tokens each, with `questions` each. rates: requests/s of prompts of `tokens`.
    """

    model_type: str
    config: dict[str, Any]
    layers: tuple[str, ...]  # types that repeat
    pool_mib: int
    tokens: int
    at_once: int
    outputs: int
    rates: tuple[float, ...]
    document_tokens: int
    documents: tuple[int, ...]
    questions: int = 4
    window: int = 0

    def transformers_config(self) -> Any:
        from transformers import AutoConfig

        count = self.config["num_hidden_layers"]
        types = [self.layers[at % len(self.layers)] for at in range(count)] if self.layers else []
        kinds = {"layer_types": types, "sliding_window": self.window} if types else {}
        longest = 2 * max(self.tokens, self.document_tokens) + 4096
        common = {"bos_token_id": None, "pad_token_id": None, "tie_word_embeddings": True}
        return AutoConfig.for_model(
            self.model_type, **{**common, "max_position_embeddings": longest, **kinds, **self.config}
        )


S, F = "sliding_attention", "full_attention"


def _large(hidden: int, mlp: int, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    """A configuration's sizes. The vocabulary is smaller than any real one: it plays no part."""
    return {
        "vocab_size": 32768,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
    }


GPU = {
    # Gemma 3 12B: a window of 1024 in five of six layers.
    "gemma-3-12b": Shape(
        "gemma3_text",
        _large(3840, 15360, 48, 16, 256),
        (S, S, S, S, S, F),
        pool_mib=24 << 10,
        tokens=8192,
        at_once=32,
        outputs=1024,
        rates=(0.5, 1.0, 2.0),
        document_tokens=8192,
        documents=(4, 8, 16),
        window=1024,
    ),
    # Gemma 2 9B: a window of 4096 in every second layer.
    "gemma-2-9b": Shape(
        "gemma2",
        _large(3584, 14336, 42, 16, 256),
        (S, F),
        pool_mib=24 << 10,
        tokens=12288,
        at_once=24,
        outputs=1024,
        rates=(0.5, 1.0, 1.5),
        document_tokens=12288,
        documents=(2, 4, 8),
        window=4096,
    ),
    # Ministral 8B: a window of 32768 in three of four layers.
    "ministral-8b": Shape(
        "ministral",
        {**_large(4096, 12288, 36, 32, 128), "tie_word_embeddings": False},
        (S, S, S, F),
        pool_mib=40 << 10,
        tokens=65536,
        at_once=8,
        outputs=1024,
        rates=(0.1, 0.2),
        document_tokens=65536,
        documents=(4, 6),
        window=32768,
    ),
    # Llama 3.1 8B: all layers are alike, so nothing may be lost.
    "llama-3.1-8b": Shape(
        "llama",
        {**_large(4096, 14336, 32, 32, 128), "tie_word_embeddings": False},
        (),
        pool_mib=16 << 10,
        tokens=8192,
        at_once=32,
        outputs=1024,
        rates=(1.0, 2.0),
        document_tokens=8192,
        documents=(4, 16),
    ),
}
_SMALL = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
CPU = {
    "gemma-3-small": Shape(
        "gemma3_text",
        {**_SMALL, "num_hidden_layers": 6},
        (S, S, S, S, S, F),
        pool_mib=24,
        tokens=1024,
        at_once=24,
        outputs=96,
        rates=(1.0, 2.0),
        document_tokens=1024,
        documents=(4, 8, 16, 32),
        window=128,
    ),
    "ministral-small": Shape(
        "ministral",
        {**_SMALL, "num_hidden_layers": 4},
        (S, S, S, F),
        pool_mib=16,
        tokens=1024,
        at_once=24,
        outputs=96,
        rates=(1.0, 2.0),
        document_tokens=1024,
        documents=(4, 8, 16, 32),
        window=256,
    ),
    "llama-small": Shape(
        "llama",
        {**_SMALL, "num_hidden_layers": 4},
        (),
        pool_mib=16,
        tokens=1024,
        at_once=24,
        outputs=96,
        rates=(1.0, 2.0),
        document_tokens=1024,
        documents=(4, 16),
    ),
}
