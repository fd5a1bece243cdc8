"""Head slices: every pair of TP sizes, every head once, replicas by division."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from disagg.messages.pieces import HeadSlice
from disagg.staging.slices import SliceError, head_slices, head_turns

TPS = (1, 2, 3, 4, 6, 8, 16)
HEADS = (1, 2, 3, 4, 8, 10, 16)


def heads_of(rank: int, tp: int, kv_heads: int) -> list[int]:
    """What a rank holds, by the definition: head h of H lies on the ranks r with r * H // tp == h, or shares one."""
    if tp <= kv_heads:
        return [h for h in range(kv_heads) if h * tp // kv_heads == rank]
    return [rank * kv_heads // tp]


def fits(tp: int, kv_heads: int) -> bool:
    return kv_heads % tp == 0 or tp % kv_heads == 0


@pytest.mark.parametrize("kv_heads", HEADS)
def test_every_destination_head_comes_exactly_once_from_a_rank_that_has_it(kv_heads: int) -> None:
    pairs = [(s, d) for s, d in itertools.product(TPS, TPS) if fits(s, kv_heads) and fits(d, kv_heads)]
    assert pairs
    for (src_tp, dst_tp), rotation in itertools.product(pairs, (0, 1, 5)):
        filled: Counter[tuple[int, int]] = Counter()
        for piece in head_slices(src_tp, dst_tp, kv_heads, rotation):
            src = heads_of(piece.src_rank, src_tp, kv_heads)
            dst = heads_of(piece.dst_rank, dst_tp, kv_heads)
            for i in range(piece.heads):
                assert src[piece.src_head_start + i] == dst[piece.dst_head_start + i], (src_tp, dst_tp, piece)
                filled[piece.dst_rank, piece.dst_head_start + i] += 1
        wanted = [(rank, i) for rank in range(dst_tp) for i in range(len(heads_of(rank, dst_tp, kv_heads)))]
        assert filled == Counter(wanted), (src_tp, dst_tp)


@pytest.mark.parametrize("kv_heads", HEADS)
def test_two_ranks_never_have_more_than_one_slice_whatever_the_turn(kv_heads: int) -> None:
    """So an identity that names the ranks need not name the heads."""
    for src_tp, dst_tp in itertools.product(TPS, TPS):
        if fits(src_tp, kv_heads) and fits(dst_tp, kv_heads):
            turns = head_turns(src_tp, dst_tp, kv_heads)
            assert all(len({(part.src_rank, part.dst_rank) for part in parts}) == len(parts) for parts in turns)
            parts = {part for parts in turns for part in parts}
            assert len({(part.src_rank, part.dst_rank) for part in parts}) == len(parts), (src_tp, dst_tp)


def test_no_more_slices_than_overlapping_rank_ranges() -> None:
    assert head_slices(2, 2, 8) == (HeadSlice(0, 0, 0, 0, 4), HeadSlice(1, 1, 0, 0, 4))
    assert head_slices(1, 4, 8) == tuple(HeadSlice(0, rank, 2 * rank, 0, 2) for rank in range(4))
    assert head_slices(4, 1, 8) == tuple(HeadSlice(rank, 0, 0, 2 * rank, 2) for rank in range(4))


def test_sizes_where_neither_divides_the_other_are_cut_at_both_grids() -> None:
    slices = head_slices(4, 6, 12)  # ranges of 3 and of 2
    assert [(s.src_rank, s.dst_rank, s.src_head_start, s.dst_head_start, s.heads) for s in slices[:4]] == [
        (0, 0, 0, 0, 2),
        (0, 1, 2, 0, 1),
        (1, 1, 0, 1, 1),
        (1, 2, 1, 0, 2),
    ]


def test_replicas_are_mapped_by_division_not_by_modulo() -> None:
    # Four ranks, two heads: ranks 0 and 1 hold head 0. By modulo rank 1 would be taken for a holder of head 1.
    by_dst = {s.dst_head_start: s.src_rank for s in head_slices(4, 1, 2)}
    assert by_dst[0] in (0, 1)
    assert by_dst[1] in (2, 3)
    wrong = {head: next(rank for rank in range(4) if rank % 2 == head) for head in range(2)}
    assert wrong[1] not in (2, 3), "what modulo picks for head 1 holds head 0"


@pytest.mark.parametrize(("src_tp", "dst_tp", "kv_heads"), [(8, 8, 2), (16, 4, 4), (8, 16, 1), (16, 16, 4), (6, 3, 3)])
def test_the_replicas_of_a_head_share_its_destinations_evenly(src_tp: int, dst_tp: int, kv_heads: int) -> None:
    sent = Counter(s.src_rank for s in head_slices(src_tp, dst_tp, kv_heads))
    replicas = src_tp // kv_heads
    for head in range(kv_heads):
        counts = [sent[head * replicas + r] for r in range(replicas)]
        assert max(counts) - min(counts) <= 1


def test_a_rotation_takes_turns_between_pieces() -> None:
    senders = {s.src_rank for rotation in range(4) for s in head_slices(4, 1, 1, rotation)}
    assert senders == {0, 1, 2, 3}


@pytest.mark.parametrize(("tp", "kv_heads"), [(3, 8), (4, 3), (16, 10), (0, 4), (6, 4)])
def test_a_tp_size_that_cannot_hold_the_heads_is_refused_with_the_allowed_ones(tp: int, kv_heads: int) -> None:
    for src_tp, dst_tp in ((tp, 1), (1, tp)):
        with pytest.raises(SliceError, match=f"TP size {tp} cannot hold {kv_heads} KV heads; allowed: 1, .*multiple"):
            head_slices(src_tp, dst_tp, kv_heads)
