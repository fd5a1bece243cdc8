"""Models whose layers differ, as layer groups, from their published configurations: what `bench.memory` compares on.

bfloat16 throughout, 16 tokens to a page. Knows layers, tokens and bytes; nothing of pools or requests.
"""

from __future__ import annotations

from msgspec import Struct

from disagg.memory.groups import GroupSpec, spec_of
from disagg.messages.layout import GroupKind, LayerGroup, StatePart

PAGE_TOKENS = 16
CHECKPOINT_TOKENS = 512

GB = 10**9


class BenchModel(Struct, frozen=True):
    """A model and the memory left for its caches on one H100 (80 GB, 0.9 of it used, less weights and activations).

    workload: a key of `bench.memory_trace.WORKLOADS`.
    """

    name: str
    workload: str
    groups: tuple[GroupSpec, ...]
    pool_bytes: int
    context_tokens: int

    @property
    def kinds(self) -> frozenset[GroupKind]:
        return frozenset(group.kind for group in self.groups)

    @property
    def state_bytes(self) -> int:
        """Of one sequence, in all recurrent layers."""
        return sum(group.page_bytes for group in self.groups if group.kind is GroupKind.STATE)

    @property
    def one_size_page_bytes(self) -> int:
        """A page of PAGE_TOKENS tokens in every layer that caches tokens, of whatever kind."""
        return sum(group.page_bytes for group in self.groups if group.kind is not GroupKind.STATE)

    @property
    def one_size_token_bytes(self) -> int:
        return self.one_size_page_bytes // PAGE_TOKENS

    def row_bytes(self, g: int) -> int:
        """Bytes of one token in a group; of a state group, of one state."""
        group = self.groups[g]
        return group.page_bytes if group.kind is GroupKind.STATE else group.page_bytes // PAGE_TOKENS

    def needed_rows(self, g: int, start: int, stop: int, image_tokens: int) -> int:
        """Tokens of a group (of a state group: states) that a run of text tokens [start, stop) reads or writes."""
        group = self.groups[g]
        match group.kind:
            case GroupKind.FULL:
                return stop
            case GroupKind.WINDOW:
                return stop - max(0, start - group.window_tokens)
            case GroupKind.STATE:
                return min(stop, 1)
            case GroupKind.IMAGE:
                return image_tokens
            case GroupKind.BUDGET:
                return min(stop, group.budget_tokens)


def _attention(
    name: str,
    layers: int,
    kv_heads: int,
    head_dim: int,
    kind: GroupKind = GroupKind.FULL,
    window: int = 0,
) -> GroupSpec:
    """layers: how many have a cache of their own (one that shares another's has none)."""
    return spec_of(LayerGroup(name, tuple(range(layers)), kv_heads, head_dim, "bfloat16", kind, window), PAGE_TOKENS)


def llama_vision() -> BenchModel:
    """meta-llama/Llama-3.2-11B-Vision-Instruct: MllamaTextConfig of 40 layers, `cross_attention_layers` 3, 8, .. 38."""
    text = _attention("text", 32, 8, 128)
    image = _attention("image", 8, 8, 128, GroupKind.IMAGE)
    return BenchModel("Llama-3.2-11B-Vision", "MMMU-pro", (text, image), 46 * GB, 131_072)


def gemma2() -> BenchModel:
    """google/gemma-2-27b-it: Gemma2Config of 46 layers, alternating; `sliding_window` 4096, 16 KV heads of 128."""
    full = _attention("full", 23, 16, 128)
    window = _attention("window", 23, 16, 128, GroupKind.WINDOW, 4096)
    return BenchModel("Gemma-2-27B", "arXiv-QA", (full, window), 14 * GB, 8192)


def ministral() -> BenchModel:
    """mistralai/Ministral-8B-Instruct-2410: 36 layers, "ragged (128k, 32k, 32k, 32k)", 8 KV heads of 128."""
    full = _attention("full", 9, 8, 128)
    window = _attention("window", 27, 8, 128, GroupKind.WINDOW, 32_768)
    return BenchModel("Ministral-8B", "arXiv-QA", (full, window), 50 * GB, 131_072)


def jamba() -> BenchModel:
    """ai21labs/AI21-Jamba-1.5-Mini in 8-bit weights: JambaConfig of 32 layers, `attn_layer_period` 8; `mamba_expand` 2,
    `mamba_d_conv` 4, `mamba_d_state` 16. A layer keeps its convolution window in bfloat16, its state in float32.
    """
    full = _attention("full", 4, 8, 128)
    parts = (StatePart("conv", (8192, 4), "bfloat16"), StatePart("ssm", (8192, 16), "float32"))
    state = spec_of(LayerGroup.of_states("state", tuple(range(28)), parts), PAGE_TOKENS)
    return BenchModel("Jamba-1.5-Mini", "arXiv-QA", (full, state), 16 * GB, 262_144)


def character_ai() -> BenchModel:
    """As in research.character.ai/optimizing-inference: multi-query attention, a global layer to five local ones of 1024
    tokens, neighbours that share their cache, global layers that share across blocks. Sizes of its own are not published:
    here 48 layers of head_dim 128; 8 global ones with 2 caches, 40 local ones with 16. The same sharing is granted to
    the baseline, so that none of the difference is sharing.
    """
    full = _attention("global", 2, 1, 128)
    window = _attention("local", 16, 1, 128, GroupKind.WINDOW, 1024)
    return BenchModel("Character.ai-like", "arXiv-QA", (full, window), 4 * GB, 131_072)


def pyramid_kv() -> BenchModel:
    """meta-llama/Llama-3.1-8B-Instruct (32 layers, 8 KV heads of 128) with PyramidKV's budgets per layer, from its
    published code (KVCache-Factory): 2048 tokens on average, beta 20, and the last 8 tokens of the prompt beside.
    """
    layers, capacity, beta, recent = 32, 2048, 20, 8
    lowest = (capacity - recent) // beta
    highest = (capacity - recent) * 2 - lowest
    step = (highest - lowest) // (layers - 1)
    page_bytes = LayerGroup("layer", (0,), 8, 128, "bfloat16").page_bytes(PAGE_TOKENS)
    budgets = [highest - layer * step + recent for layer in range(layers)]
    groups = tuple(
        GroupSpec(f"layer {layer}", GroupKind.BUDGET, page_bytes, budget_tokens=budget)
        for layer, budget in enumerate(budgets)
    )
    return BenchModel("PyramidKV on Llama-3.1-8B", "arXiv-QA", groups, 50 * GB, 131_072)


def draft_and_target() -> BenchModel:
    """meta-llama/Llama-3.1-8B-Instruct (32 layers, 8 KV heads of 128) with meta-llama/Llama-3.2-1B-Instruct (16 layers, 8 KV
    heads of 64) drafting for it: two models' caches in one pool.
    """
    target = _attention("target", 32, 8, 128)
    draft = _attention("draft", 16, 8, 64)
    return BenchModel("Llama-3.1-8B + 3.2-1B draft", "MMLU-pro", (target, draft), 48 * GB, 131_072)


MODELS = {
    "vision": llama_vision,
    "gemma2": gemma2,
    "ministral": ministral,
    "jamba": jamba,
    "character": character_ai,
    "pyramid": pyramid_kv,
    "draft": draft_and_target,
}
