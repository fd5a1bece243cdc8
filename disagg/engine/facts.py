"""What an engine must know of its model and its workers. Numbers only, gathered by the server before the engine starts."""

from __future__ import annotations

from msgspec import Struct

from disagg.memory.layout import PoolLayout
from disagg.messages.layout import LayerGroup


class EngineFacts(Struct, frozen=True):
    """groups: of the whole model (all KV heads), not of one rank; layout: of a rank's pool of num_large large pages.

    cache_root: what all page hashes begin with (weights and whatever else two caches must agree on). max_slots: sequences
    sampled at once. spare_tokens: of each choice's outputs that a grant reserves pages for; lookahead_tokens: for how many
    more all that has begun must be able to go on for something new to begin. preempt_after_s: how long one that gave way
    waits before younger ones give way to it; preemption: a key of scheduler.policies.PREEMPTION.
    """

    incarnation: str
    tp: int
    groups: tuple[LayerGroup, ...]
    layout: PoolLayout
    num_large: int
    prefix_cache: bool
    cache_root: str
    max_slots: int
    chunk_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_waiting: int
    ungranted_share: float
    spare_tokens: int
    lookahead_tokens: int
    preempt_after_s: float
    preemption: str
    gather_bytes: int
    arena_bytes: int
    segment_bytes: int
    link_segments: int
    link_idle_s: float
    progress_s: float

    @property
    def page_tokens(self) -> int:
        return self.layout.page_tokens

    @property
    def checkpoint_tokens(self) -> int:
        """Where chunks end at the latest; 0 for a model without recurrent states."""
        return self.layout.checkpoint_tokens if any(group.is_state for group in self.groups) else 0

    def longest_run(self, position: int) -> int:
        """Tokens that a run from `position` on may have at most."""
        if not self.checkpoint_tokens:
            return self.chunk_tokens
        return min(self.chunk_tokens, self.checkpoint_tokens - position % self.checkpoint_tokens)
