"""Which attention heads each of a server's ranks holds. Pure numbers.

    9 query heads, 3 KV heads, TP 3                 4 query heads, 2 KV heads, TP 4: a KV head on two ranks
    rank 0: query 0..2, KV 0                        rank 0: query 0, KV 0        rank 2: query 2, KV 1
    rank 1: query 3..5, KV 1                        rank 1: query 1, KV 0        rank 3: query 3, KV 1
    rank 2: query 6..8, KV 2

Query heads are dealt out evenly and in order. So are KV heads, or, where there are more ranks than KV heads, rank r holds
KV head `r // replicas` (never modulo): the one that its query heads attend to.
"""

from __future__ import annotations

from msgspec import Struct


class SliceError(ValueError):
    """A TP size that cannot hold a model's heads."""


class RankHeads(Struct, frozen=True):
    """Of one layer's heads, those of one rank: query heads [query_start, query_stop), KV heads [kv_start, kv_stop)."""

    query_start: int
    query_stop: int
    kv_start: int
    kv_stop: int

    @property
    def queries(self) -> slice:
        """Of all query heads."""
        return slice(self.query_start, self.query_stop)

    @property
    def kvs(self) -> slice:
        """Of all KV heads."""
        return slice(self.kv_start, self.kv_stop)


def heads_per_rank(tp: int, kv_heads: int) -> int:
    """KV heads that one of `tp` ranks holds. Raises SliceError unless one number divides the other."""
    if tp < 1 or kv_heads < 1 or (kv_heads % tp and tp % kv_heads):
        divisors = ", ".join(str(n) for n in range(1, kv_heads + 1) if kv_heads % n == 0)
        raise SliceError(
            f"TP size {tp} cannot hold {kv_heads} KV heads; allowed: {divisors} or a multiple of {kv_heads}"
        )
    return max(1, kv_heads // tp)


def tp_sizes(query_heads: int, kv_heads: int) -> tuple[int, ...]:
    """Every TP size that divides the query heads, and that divides the KV heads or is a multiple of them."""
    return tuple(
        tp for tp in range(1, query_heads + 1) if query_heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    )


def check_heads(tp: int, query_heads: int, kv_heads: int) -> None:
    """Raises SliceError, with the sizes that would work, if `tp` ranks cannot share these heads."""
    works = tp_sizes(query_heads, kv_heads)
    if tp not in works:
        raise SliceError(
            f"TP size {tp} cannot share {query_heads} query heads and {kv_heads} KV heads; it must divide the query heads, "
            f"and divide the KV heads or be a multiple of them: {', '.join(map(str, works))}"
        )


def rank_heads(rank: int, tp: int, query_heads: int, kv_heads: int) -> RankHeads:
    """The heads of one rank. Raises SliceError as `check_heads` does."""
    assert 0 <= rank < tp, f"rank {rank} of {tp}"
    check_heads(tp, query_heads, kv_heads)
    queries, kvs = query_heads // tp, heads_per_rank(tp, kv_heads)
    kv_start = rank // max(1, tp // kv_heads) * kvs
    return RankHeads(rank * queries, (rank + 1) * queries, kv_start, kv_start + kvs)
