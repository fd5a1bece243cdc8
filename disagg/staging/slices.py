"""Which KV heads go from which prefill rank to which decode rank, for any pair of TP sizes.

    8 heads, TP 2 to TP 4             2 heads, TP 4 to TP 1: ranks 0, 1 replicate head 0, ranks 2, 3 head 1
    rank 0: heads 0..3 ─┬─> rank 0: heads 0..1          rank 0: head 0 ──┐
                        └─> rank 1: heads 2..3          rank 1: head 0   ├─> rank 0: heads 0..1
    rank 1: heads 4..7 ─┬─> rank 2: heads 4..5          rank 2: head 1 ──┘
                        └─> rank 3: heads 6..7          rank 3: head 1

With more ranks than heads, rank r holds head `r // replicas` (never modulo). Knows counts only; nothing of tensors.
"""

from __future__ import annotations

from disagg.messages.heads import SliceError, heads_per_rank
from disagg.messages.pieces import HeadSlice

__all__ = ["SliceError", "head_slices", "heads_per_rank"]


def head_slices(src_tp: int, dst_tp: int, kv_heads: int, rotation: int = 0) -> tuple[HeadSlice, ...]:
    """Every head of every destination rank exactly once, by destination rank and head.

    Raises SliceError for a TP size that cannot hold these heads (messages/heads).

    Where source ranks replicate a head, its destinations are dealt to the replicas in turn, beginning with replica
    `rotation`: with a rotation that counts pieces, the replicas share the work also when there is one destination.
    """
    src_heads = heads_per_rank(src_tp, kv_heads)
    dst_heads = heads_per_rank(dst_tp, kv_heads)
    src_replicas = max(1, src_tp // kv_heads)
    dst_replicas = max(1, dst_tp // kv_heads)
    slices = []
    dealt = [rotation] * (src_tp // src_replicas)  # by group of replicas
    for dst_rank in range(dst_tp):
        first = (dst_rank // dst_replicas) * dst_heads  # of all heads
        head = first
        while head < first + dst_heads:
            group, within = divmod(head, src_heads)
            heads = min(src_heads - within, first + dst_heads - head)
            src_rank = group * src_replicas + dealt[group] % src_replicas
            dealt[group] += 1
            slices.append(HeadSlice(src_rank, dst_rank, within, head - first, heads))
            head += heads
    return tuple(slices)


def head_turns(src_tp: int, dst_tp: int, kv_heads: int) -> tuple[tuple[HeadSlice, ...], ...]:
    """`head_slices` for as many rotations as a head has replicas: a piece takes the next one, and the replicas take turns."""
    heads_per_rank(src_tp, kv_heads)
    return tuple(head_slices(src_tp, dst_tp, kv_heads, rotation) for rotation in range(max(1, src_tp // kv_heads)))
