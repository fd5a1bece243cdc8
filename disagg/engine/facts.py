"""What an engine must know of its model and its workers. Numbers only, gathered by the server before the engine starts."""

from __future__ import annotations

from msgspec import Struct

from disagg.messages.layout import LayerGroup


class EngineFacts(Struct, frozen=True):
    """groups: of the whole model (all KV heads), not of one rank. max_slots: sequences sampled at once."""

    incarnation: str
    tp: int
    groups: tuple[LayerGroup, ...]
    page_tokens: int
    num_pages: int
    max_slots: int
    chunk_tokens: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    max_waiting: int
    ungranted_share: float
    gather_bytes: int
    arena_bytes: int
    segment_bytes: int
    link_segments: int
    link_idle_s: float
    progress_s: float
