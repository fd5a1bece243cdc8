"""Head slices on real bytes: pools of every pair of TP sizes, filled by gather, slice and scatter, byte for byte.

What a rank holds is written down here by the definition (head h of H lies on the ranks r with r * H // tp == h, or
shares one), not by the code under test. Every byte of the model's KV is drawn at random, so a head, plane, layer, token
or page that is mistaken for another does not go unseen.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from msgspec.structs import replace

from disagg.messages.layout import LayerGroup, StatePart
from disagg.messages.pieces import HeadSlice, Piece
from disagg.staging.copy import gather, scatter
from disagg.staging.pieces import framed_bytes, split_group_piece
from disagg.staging.rows import PagedRows, PageShape
from disagg.staging.slices import SliceError, head_slices, head_turns, heads_per_rank
from tests.staging.test_slices import HEADS, TPS, fits, heads_of

PAGE_TOKENS = {"src": 4, "dst": 2}  # servers of one fingerprint have equal pages; the copies do not rely on it
TOKENS, HIT = 9, 3  # decode has the first ones; neither is a whole number of pages

ATTENTION = [LayerGroup(dtype, (0, 1, 2), 1, 3, dtype) for dtype in ("float32", "bfloat16", "uint8")]
LATENTS = LayerGroup("latents", (0, 1), 1, 5, "bfloat16", planes=1)  # one head, which every rank has
STATES = LayerGroup.of_states(
    "states", (0, 1), (StatePart("conv", (3,), "bfloat16"), StatePart("ssm", (5,), "float32"))
)


class Rank:
    """One rank's pool with one leg's pages in it. bytes: [pages, page bytes]; rows: how often each byte was written."""

    def __init__(self, group: LayerGroup, rank: int, tp: int, page_tokens: int) -> None:
        self.heads = heads_of(rank, tp, group.kv_heads)
        local = replace(group, kv_heads=len(self.heads))
        self.shape = PageShape.of(local, page_tokens)
        self.group = group
        self.positions = 2 if group.is_state else TOKENS
        pages = -(-self.positions // self.shape.page_tokens)
        self.page_ids = torch.randperm(pages + 2, generator=torch.Generator().manual_seed(rank))[:pages]
        self.bytes = torch.zeros((pages + 2, self.shape.nbytes), dtype=torch.uint8)

    def rows(self) -> torch.Tensor:
        """[layers, planes, own heads, positions, row bytes]: a copy."""
        s = self.shape
        pages = self.bytes.view(-1, s.layers, s.planes, s.kv_heads, s.page_tokens, s.row_bytes)[self.page_ids]
        return pages.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, : self.positions]

    def paged(self, piece: Piece, part: HeadSlice, seed: int) -> PagedRows:
        return PagedRows(self.bytes, self.page_ids, self.shape, piece, part, seed)

    def fill(self, model: torch.Tensor) -> None:
        """model: [layers, planes, all heads, positions, row bytes]."""
        s = self.shape
        pages = self.bytes.view(-1, s.layers, s.planes, s.kv_heads, s.page_tokens, s.row_bytes)
        for position in range(self.positions):
            page, row = int(self.page_ids[position // s.page_tokens]), position % s.page_tokens
            pages[page, :, :, :, row] = model[:, :, self.heads, position]


def model_of(group: LayerGroup) -> torch.Tensor:
    """[layers, planes, all heads, positions, row bytes], no two rows alike."""
    positions = 2 if group.is_state else TOKENS
    dims = (len(group.layers), group.planes, group.kv_heads, positions, group.head_dim * group.dtype_bytes)
    model = torch.randint(0, 256, dims, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    rows = model.flatten(0, 3)
    assert len(torch.unique(rows, dim=0)) == len(rows)
    return model


def exchange(group: LayerGroup, src_tp: int, dst_tp: int) -> None:
    """Send positions from HIT on (of states: both), piece by piece, and compare every byte of every destination rank."""
    model = model_of(group)
    sources = [Rank(group, rank, src_tp, PAGE_TOKENS["src"]) for rank in range(src_tp)]
    destinations = [Rank(group, rank, dst_tp, PAGE_TOKENS["dst"]) for rank in range(dst_tp)]
    written = [torch.zeros_like(d.rows(), dtype=torch.int32) for d in destinations]
    for source in sources:
        source.fill(model)
    first = 0 if group.is_state else HIT
    whole = Piece(0, 0, len(group.layers), first, sources[0].positions)
    row_bytes = group.planes * group.head_dim * group.dtype_bytes * heads_per_rank(src_tp, group.kv_heads)
    pieces = split_group_piece(
        whole,
        heads_per_rank(src_tp, group.kv_heads),
        group,
        framed_bytes(row_bytes * (3 if group.is_state else 8)),
        PAGE_TOKENS["src"],
    )
    assert len(pieces) > 1
    for number, piece in enumerate(pieces):
        for part in head_slices(src_tp, dst_tp, group.kv_heads, rotation=number):
            source, destination = sources[part.src_rank], destinations[part.dst_rank]
            staging = torch.zeros(framed_bytes(source.shape.payload_bytes(piece, part.heads)), dtype=torch.uint8)
            gather(source.paged(piece, part, number), staging)
            heads = slice(part.dst_head_start, part.dst_head_start + part.heads)
            at = (slice(piece.layer_start, piece.layer_stop), slice(None), heads)
            written[part.dst_rank][(*at, slice(piece.token_start, piece.token_stop))] += 1
            assert scatter(destination.paged(piece, part, number), staging)
    for rank, (destination, count) in enumerate(zip(destinations, written, strict=True)):
        where = f"{group.name}, TP {src_tp} to {dst_tp}, {group.kv_heads} heads, rank {rank}"
        assert (count[:, :, :, first:] == 1).all(), f"{where}: a byte was written twice, or never"
        assert (count[:, :, :, :first] == 0).all(), where
        landed = destination.rows()
        assert torch.equal(landed[:, :, :, first:], model[:, :, destination.heads, first:]), where
        assert not landed[:, :, :, :first].any(), f"{where}: what decode has already was written to"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("kv_heads", HEADS)
@pytest.mark.parametrize(
    "group",
    [
        pytest.param(each, marks=() if each.dtype == "bfloat16" else pytest.mark.long, id=each.dtype)
        for each in ATTENTION
    ],
)
def test_every_byte_of_k_and_v_comes_once_from_a_rank_that_has_it_or_the_pair_is_refused(
    group: LayerGroup, kv_heads: int
) -> None:
    group = replace(group, kv_heads=kv_heads)
    for src_tp, dst_tp in itertools.product(TPS, TPS):
        if fits(src_tp, kv_heads) and fits(dst_tp, kv_heads):
            exchange(group, src_tp, dst_tp)
            continue
        with pytest.raises(SliceError) as refusal:
            head_slices(src_tp, dst_tp, kv_heads)
        allowed = [tp for tp in range(1, kv_heads + 1) if kv_heads % tp == 0]
        assert ", ".join(map(str, allowed)) in str(refusal.value)
        assert f"a multiple of {kv_heads}" in str(refusal.value)


@pytest.mark.parametrize("group", [LATENTS, STATES], ids=lambda group: group.name)
def test_every_byte_of_what_all_ranks_have_comes_once_for_any_pair_of_sizes(group: LayerGroup) -> None:
    for src_tp, dst_tp in itertools.product(TPS, TPS):
        exchange(group, src_tp, dst_tp)


@pytest.mark.parametrize(("src_tp", "dst_tp", "kv_heads"), [(4, 1, 1), (16, 3, 1), (8, 2, 2), (16, 6, 2), (16, 4, 8)])
def test_over_pieces_every_replica_sends_as_much_as_any_other(src_tp: int, dst_tp: int, kv_heads: int) -> None:
    turns = head_turns(src_tp, dst_tp, kv_heads)
    replicas = src_tp // kv_heads
    assert len(turns) == replicas
    for pieces in range(1, 3 * replicas + 1):
        sent = [0] * src_tp
        for piece in range(pieces):
            for part in turns[piece % len(turns)]:
                sent[part.src_rank] += part.heads
        for head in range(kv_heads):
            share = sent[head * replicas : (head + 1) * replicas]
            of_one_piece = sum(part.src_rank // replicas == head for part in turns[0])
            assert max(share) - min(share) <= of_one_piece * turns[0][0].heads, f"{pieces} pieces, head {head}: {share}"
            if pieces % replicas == 0:
                assert len(set(share)) == 1, f"{pieces} pieces, head {head}: {share}"
