"""Gather and scatter between pools that differ in all but the KV: bit-exact, verified first, nothing else touched."""

from __future__ import annotations

import itertools
import math
import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from disagg.messages.layout import GroupKind, LayerGroup, StatePart
from disagg.messages.pieces import HeadSlice, Piece
from disagg.staging.copy import gather, scatter
from disagg.staging.pieces import framed_bytes
from disagg.staging.rows import PagedRows, PageShape
from disagg.staging.slices import head_slices

LAYERS, HEADS, HEAD_DIM, TOKENS = 3, 4, 6, 37
SEED = 0x1234_5678_9ABC_DEF0


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Pool:
    """A pool with one sequence in shuffled pages, and its truth as [layers, planes, heads, tokens, row bytes]."""

    def __init__(self, heads: int, page_tokens: int, dtype_bytes: int, seed: int, head_dim: int = HEAD_DIM) -> None:
        rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.shape = PageShape(LAYERS, heads, page_tokens, head_dim, dtype_bytes)
        pages = -(-TOKENS // page_tokens)
        ids = rng.sample(range(pages + 3), pages)
        self.page_ids = torch.tensor(ids)
        self.bytes = torch.randint(0, 256, (pages + 3, self.shape.nbytes), dtype=torch.uint8, generator=self.generator)

    def rows(self, piece: Piece, part: HeadSlice, seed: int = SEED) -> PagedRows:
        return PagedRows(self.bytes, self.page_ids, self.shape, piece, part, seed)

    def read(self, data: torch.Tensor | None = None) -> torch.Tensor:
        """[layers, planes, heads, tokens, row bytes], token by token, the slow way."""
        s = self.shape
        pages = (self.bytes if data is None else data).view(
            -1, s.layers, s.planes, s.kv_heads, s.page_tokens, s.row_bytes
        )
        rows = [pages[self.page_ids[t // s.page_tokens], :, :, :, t % s.page_tokens] for t in range(TOKENS)]
        return torch.stack(rows, dim=3)


def staging(piece: Piece, heads: int, shape: PageShape) -> torch.Tensor:
    return torch.full((framed_bytes(shape.payload_bytes(piece, heads)) + 24,), 0xEE, dtype=torch.uint8)


def copy(src: Pool, dst: Pool, piece: Piece, src_head: int, dst_head: int, heads: int) -> None:
    out, part = staging(piece, heads, src.shape), HeadSlice(0, 0, src_head, dst_head, heads)
    nbytes = gather(src.rows(piece, part), out)
    assert nbytes == len(out) - 24
    assert out[nbytes:].tolist() == [0xEE] * 24, "nothing behind the piece is touched"
    before, wanted = dst.bytes.clone(), dst.read()
    wanted[
        piece.layer_start : piece.layer_stop, :, dst_head : dst_head + heads, piece.token_start : piece.token_stop
    ] = src.read()[
        piece.layer_start : piece.layer_stop, :, src_head : src_head + heads, piece.token_start : piece.token_stop
    ]
    assert scatter(dst.rows(piece, part), out[:nbytes])
    assert torch.equal(dst.read(), wanted)
    changed = int((before != dst.bytes).sum())
    assert changed == int((dst.read(before) != wanted).sum()), "a byte outside of the sequence changed"


@pytest.mark.parametrize(("src_page", "dst_page"), list(itertools.product((1, 4, 16), repeat=2)))
@pytest.mark.parametrize("dtype_bytes", [1, 2, 4])
def test_what_is_gathered_from_one_pool_lands_in_another(src_page: int, dst_page: int, dtype_bytes: int) -> None:
    src, dst = Pool(HEADS, src_page, dtype_bytes, 1), Pool(HEADS, dst_page, dtype_bytes, 2)
    for token_start, token_stop in ((0, TOKENS), (0, 16), (16, 32), (3, 5), (15, 33), (36, 37), (5, 16), (16, 20)):
        copy(src, dst, Piece(0, 0, LAYERS, token_start, token_stop), 0, 0, HEADS)


@pytest.mark.parametrize("head_dim", [1, 3, 4, 8])
def test_layer_ranges_and_head_slices_of_any_row_size_land_where_they_belong(head_dim: int) -> None:
    src, dst = Pool(HEADS, 4, 1, 3, head_dim), Pool(2, 16, 1, 4, head_dim)
    copy(src, dst, Piece(0, 1, 2, 7, 30), 2, 1, 1)
    copy(src, dst, Piece(0, 2, 3, 0, 37), 1, 0, 2)
    copy(src, dst, Piece(0, 0, 2, 17, 18), 3, 0, 1)


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 2), (4, 2), (2, 4), (8, 2), (2, 8), (4, 4)])
def test_all_slices_of_a_tp_pair_together_move_the_whole_kv(src_tp: int, dst_tp: int) -> None:
    kv_heads, piece = 4, Piece(0, 0, LAYERS, 2, 35)
    truth = Pool(kv_heads, 4, 2, 9)
    full = truth.read()

    def heads_of(rank: int, tp: int) -> list[int]:
        return [rank * kv_heads // tp] if tp > kv_heads else [h for h in range(kv_heads) if h * tp // kv_heads == rank]

    def load(pool: Pool, values: torch.Tensor) -> None:
        s = pool.shape
        pages = pool.bytes.view(-1, s.layers, s.planes, s.kv_heads, s.page_tokens, s.row_bytes)
        for t in range(TOKENS):
            pages[pool.page_ids[t // s.page_tokens], :, :, :, t % s.page_tokens] = values[:, :, :, t]

    sources = [Pool(len(heads_of(r, src_tp)), 4, 2, 20 + r) for r in range(src_tp)]
    for rank, pool in enumerate(sources):
        load(pool, full[:, :, heads_of(rank, src_tp)])
    targets = [Pool(len(heads_of(r, dst_tp)), 16, 2, 50 + r) for r in range(dst_tp)]
    for s in head_slices(src_tp, dst_tp, kv_heads):
        src, dst = sources[s.src_rank], targets[s.dst_rank]
        out = staging(piece, s.heads, src.shape)
        gather(src.rows(piece, s), out)
        assert scatter(dst.rows(piece, s), out)
    for rank, pool in enumerate(targets):
        assert torch.equal(pool.read()[:, :, :, 2:35], full[:, :, heads_of(rank, dst_tp), 2:35])


def test_the_payload_is_in_canonical_order_whatever_the_pages() -> None:
    outs = []
    for page_tokens in (1, 4, 16):
        src = Pool(HEADS, page_tokens, 2, 11)
        piece = Piece(0, 0, 2, 5, 22)
        out = staging(piece, 2, src.shape)
        gather(src.rows(piece, HeadSlice(0, 0, 1, 1, 2)), out)
        payload = src.read()[0:2, :, 1:3, 5:22].contiguous().flatten()
        assert torch.equal(out[: len(payload)], payload)
        outs.append(len(payload))
    assert len(set(outs)) == 1


@pytest.mark.parametrize("broken", ["payload", "padding", "trailer", "identity"])
def test_a_piece_that_does_not_verify_writes_nothing(broken: str) -> None:
    src, dst = Pool(1, 4, 1, 5, head_dim=1), Pool(1, 16, 1, 6, head_dim=1)
    piece = Piece(0, 0, 1, 0, 5)  # 10 bytes of rows, 6 of padding
    out = staging(piece, 1, src.shape)
    nbytes = gather(src.rows(piece, HeadSlice(0, 0, 0, 0, 1)), out)
    assert nbytes == 24
    place = {"payload": 3, "padding": 12, "trailer": 20}.get(broken)
    if place is not None:
        out[place] ^= 1
    before = dst.bytes.clone()
    seed = SEED + 1 if broken == "identity" else SEED
    assert not scatter(dst.rows(piece, HeadSlice(0, 0, 0, 0, 1), seed), out)
    assert torch.equal(dst.bytes, before)


def test_bytes_that_are_no_number_survive() -> None:
    src, dst = Pool(1, 4, 4, 5, head_dim=2), Pool(1, 4, 4, 6, head_dim=2)
    src.bytes.view(torch.int32).fill_(0x7F800001)  # a signalling NaN, which float arithmetic would make quiet
    copy(src, dst, Piece(0, 0, LAYERS, 0, TOKENS), 0, 0, 1)


def test_a_page_table_may_begin_later_than_the_sequence() -> None:
    src, dst = Pool(2, 4, 2, 7), Pool(2, 16, 2, 8)
    piece = Piece(0, 0, LAYERS, 18, 31)  # a window: pages 0..3 of the source and page 0 of the other are gone
    out, part = staging(piece, 2, src.shape), HeadSlice(0, 0, 0, 0, 2)
    gather(PagedRows(src.bytes, src.page_ids[4:], src.shape, piece, part, SEED, first_page=4), out)
    assert scatter(PagedRows(dst.bytes, dst.page_ids[1:], dst.shape, piece, part, SEED, first_page=1), out)
    assert torch.equal(dst.read()[:, :, :, 18:31], src.read()[:, :, :, 18:31])
    for table, first_page in ((src.page_ids[5:], 5), (src.page_ids[4:6], 4)):
        with pytest.raises(AssertionError, match="page table"):
            PagedRows(src.bytes, table, src.shape, piece, part, SEED, first_page)


def test_heads_that_a_rank_lacks_are_refused_where_it_lacks_them() -> None:
    src, dst = Pool(3, 4, 2, 7), Pool(2, 4, 2, 8)
    piece = Piece(0, 0, LAYERS, 0, 8)
    out, before = staging(piece, 2, src.shape), dst.bytes.clone()
    gather(src.rows(piece, HeadSlice(0, 0, 1, 1, 2)), out)
    with pytest.raises(AssertionError, match=r"heads 1\+2"):
        scatter(dst.rows(piece, HeadSlice(0, 0, 1, 1, 2)), out)
    with pytest.raises(AssertionError, match=r"heads 2\+2"):
        gather(src.rows(piece, HeadSlice(0, 0, 2, 0, 2)), out)
    assert torch.equal(dst.bytes, before)


def test_a_pool_whose_pages_are_wider_than_the_group_keeps_the_rest() -> None:
    src, dst = Pool(2, 4, 2, 7), Pool(2, 4, 2, 8)
    wide = torch.full((dst.bytes.shape[0], dst.shape.nbytes + 10), 7, dtype=torch.uint8)
    piece = Piece(0, 0, LAYERS, 1, 30)
    out, part = staging(piece, 2, src.shape), HeadSlice(0, 0, 0, 0, 2)
    gather(src.rows(piece, part), out)
    assert scatter(PagedRows(wide, dst.page_ids, dst.shape, piece, part, SEED), out)
    assert bool((wide[:, dst.shape.nbytes :] == 7).all())
    assert torch.equal(dst.read(wide[:, : dst.shape.nbytes].contiguous())[:, :, :, 1:30], src.read()[:, :, :, 1:30])


def test_the_shape_of_a_page_is_that_of_its_group() -> None:
    assert PageShape.of(LayerGroup("full", (0, 3), 4, 6, "bfloat16"), 16) == PageShape(2, 4, 16, 6, 2)
    states = LayerGroup.of_states("states", (0, 1, 2), (StatePart("ssm", (3,), "float32"),))
    assert PageShape.of(states, 16) == PageShape(3, 1, 1, 16, 1, planes=1)


class FlatPool:
    """Several groups in one flat tensor of random bytes, each with a page table of its own. tables: page ids by group."""

    def __init__(self, groups: tuple[LayerGroup, ...], page_tokens: int, slack: tuple[int, ...], seed: int) -> None:
        """slack: by how many units each group's pages are farther apart than they are long."""
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.shapes = [PageShape.of(group, page_tokens) for group in groups]
        self.strides = [
            group.page_bytes(page_tokens) + more * group.align_bytes(page_tokens)
            for group, more in zip(groups, slack, strict=True)
        ]
        self.large_bytes = math.lcm(*self.strides)
        self.tables: list[list[int]] = []
        large = 0
        for shape, stride in zip(self.shapes, self.strides, strict=True):
            per_large = self.large_bytes // stride
            needed = 2 if shape.planes == 1 else -(-TOKENS // shape.page_tokens)
            own = -(-needed // per_large)  # large pages
            self.tables.append(rng.sample(range(large * per_large, (large + own) * per_large), needed))
            large += own
        self.bytes = torch.randint(0, 256, (large * self.large_bytes,), dtype=torch.uint8, generator=generator)

    def pages(self, group: int) -> torch.Tensor:
        return self.bytes.view(-1, self.strides[group])

    def rows(self, piece: Piece, part: HeadSlice) -> PagedRows:
        """With a page table that begins where the piece does."""
        shape, table = self.shapes[piece.group], self.tables[piece.group]
        first = piece.token_start // shape.page_tokens
        pages = torch.tensor(table[first:])
        return PagedRows(self.pages(piece.group), pages, shape, piece, part, SEED, first)

    def row(self, group: int, layer: int, plane: int, head: int, position: int) -> slice:
        """The bytes of one row, worked out by hand."""
        s = self.shapes[group]
        page = self.tables[group][position // s.page_tokens] * self.strides[group]
        unit = (layer * s.planes + plane) * s.kv_heads + head
        start = page + (unit * s.page_tokens + position % s.page_tokens) * s.row_bytes
        return slice(start, start + s.row_bytes)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.data())
def test_groups_in_one_flat_tensor_move_and_leave_each_other_alone(data: st.DataObject) -> None:
    """Pages farther apart than they are long, odd sizes, states beside tokens: row by row against plain slices."""
    groups = (
        LayerGroup("full", (0, 2), data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 3, 6, 8])), "bfloat16"),
        LayerGroup("window", (1,), 2, data.draw(st.sampled_from([1, 5, 7])), "uint8", GroupKind.WINDOW, window=9),
        LayerGroup.of_states(
            "states", (3, 4), (StatePart("conv", (3,), "bfloat16"), StatePart("ssm", (7,), "float32"))
        ),
    )
    slack = st.tuples(*[st.integers(0, 3)] * 3)
    src = FlatPool(groups, data.draw(st.sampled_from([1, 4, 16])), data.draw(slack), seed=1)
    dst = FlatPool(groups, data.draw(st.sampled_from([1, 4, 16])), data.draw(slack), seed=2)
    number = data.draw(st.integers(0, 2))
    shape = src.shapes[number]
    limit = 2 if groups[number].is_state else TOKENS
    layer_start, layer_stop = sorted(data.draw(st.sets(st.integers(0, shape.layers), min_size=2, max_size=2)))
    start, stop = sorted(data.draw(st.sets(st.integers(0, limit), min_size=2, max_size=2)))
    head = data.draw(st.integers(0, shape.kv_heads - 1))
    heads = data.draw(st.integers(1, shape.kv_heads - head))
    piece = Piece(number, layer_start, layer_stop, start, stop)
    out, part = staging(piece, heads, shape), HeadSlice(0, 0, head, head, heads)
    gather(src.rows(piece, part), out)
    wanted = dst.bytes.clone()
    for layer, plane, h, position in itertools.product(
        range(layer_start, layer_stop), range(shape.planes), range(head, head + heads), range(start, stop)
    ):
        wanted[dst.row(number, layer, plane, h, position)] = src.bytes[src.row(number, layer, plane, h, position)]
    assert scatter(dst.rows(piece, part), out)
    assert torch.equal(dst.bytes, wanted), "every byte of the piece, and no other"
