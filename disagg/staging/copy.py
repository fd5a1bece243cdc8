"""Gather pieces out of one layer group's pages and scatter them into them, bit for bit. The torch implementation, for CPU.

    pool     [num_pages, page_bytes] uint8, strided; a page is [layers, planes, kv_heads, page_tokens, head_dim]
    staging  [layers, planes, heads, tokens, head_dim], zero bytes up to a word, checksum (see pieces)

Only the rows of the piece travel: a token range need not begin or end with a page, and the two pools may have pages of
different sizes, at different distances. A state is a page of one row: one plane, one head, one position. Elements are
moved as integers of the widest size that fits, so no dtype is ever converted. Knows nothing of requests, peers or rings.
"""

from __future__ import annotations

import torch
from msgspec import Struct

from disagg.messages.lane import Piece
from disagg.messages.layout import LayerGroup
from disagg.staging.checksum import checksum
from disagg.staging.pieces import TRAILER_BYTES, framed_bytes

_INTEGERS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class PageShape(Struct, frozen=True):
    """A small page of one layer group on one rank: [layers, planes, kv_heads, page_tokens, head_dim] elements."""

    layers: int
    kv_heads: int  # that this rank holds
    page_tokens: int  # 1 where a page is a state
    head_dim: int
    dtype_bytes: int
    planes: int = 2  # K and V

    @classmethod
    def of(cls, group: LayerGroup, page_tokens: int) -> PageShape:
        """group: as this rank holds it."""
        rows = group.rows_per_page(page_tokens)
        return cls(len(group.layers), group.kv_heads, rows, group.head_dim, group.dtype_bytes, group.planes)

    @property
    def nbytes(self) -> int:
        return self.layers * self.planes * self.kv_heads * self.page_tokens * self.head_dim * self.dtype_bytes

    @property
    def row_bytes(self) -> int:
        """One token of one head of one plane of one layer."""
        return self.head_dim * self.dtype_bytes

    def payload_bytes(self, piece: Piece, heads: int) -> int:
        """Bytes of a piece's rows in a slice of `heads` heads."""
        return piece.layers * self.planes * heads * piece.tokens * self.row_bytes


def gather(
    pool: torch.Tensor,
    page_ids: torch.Tensor,
    shape: PageShape,
    piece: Piece,
    head_start: int,
    heads: int,
    out: torch.Tensor,
    seed: int,
    first_page: int = 0,
) -> int:
    """Copy a piece into `out` with its checksum; returns the bytes written (pieces.group_piece_bytes).

    pool: [num_pages, >= shape.nbytes] uint8, rows contiguous, any distance apart; page_ids: [n] int64, entry i being
    the page of tokens [(first_page + i) * page_tokens, ...); out: [>= returned] uint8, contiguous, 8-byte aligned.
    `seed` is the piece's identity.
    """
    rows = _Rows(pool, page_ids, shape, piece, head_start, heads, first_page)
    staged, framed = rows.staged(out)
    padded = framed - TRAILER_BYTES
    out[rows.payload : padded].zero_()
    for where, pages in rows.spans():
        target = staged[:, :, :, where.first : where.last]
        if isinstance(pages, int):
            target.copy_(rows.pool[pages][:, :, :, where.within : where.within + where.tokens])
        else:
            target.unflatten(3, (len(pages), shape.page_tokens)).copy_(
                rows.pool.index_select(0, pages).permute(1, 2, 3, 0, 4, 5)
            )
    total = checksum(out[:padded], rows.payload, seed)
    out[padded:framed].copy_(torch.frombuffer(bytearray(total.to_bytes(TRAILER_BYTES, "little")), dtype=torch.uint8))
    return framed


def scatter(
    staging: torch.Tensor,
    pool: torch.Tensor,
    page_ids: torch.Tensor,
    shape: PageShape,
    piece: Piece,
    head_start: int,
    heads: int,
    seed: int,
    first_page: int = 0,
) -> bool:
    """Copy a piece into the pool, if its checksum is right: False, and not one byte written, if it is not.

    staging: [>= bytes of the piece] uint8, contiguous, 8-byte aligned; everything else as in `gather`. Bytes of the pages
    outside of the piece are left alone. Pages of one call are distinct.
    """
    rows = _Rows(pool, page_ids, shape, piece, head_start, heads, first_page)
    staged, framed = rows.staged(staging)
    padded = framed - TRAILER_BYTES
    trailer = int.from_bytes(bytes(staging[padded:framed].tolist()), "little")
    if checksum(staging[:padded], rows.payload, seed) != trailer:
        return False
    for where, pages in rows.spans():
        source = staged[:, :, :, where.first : where.last]
        if isinstance(pages, int):
            rows.pool[pages][:, :, :, where.within : where.within + where.tokens].copy_(source)
        else:
            rows.pool.index_copy_(
                0, pages, source.unflatten(3, (len(pages), shape.page_tokens)).permute(3, 0, 1, 2, 4, 5)
            )
    return True


class _Span(Struct, frozen=True):
    """Tokens [first, last) of a piece, counted from its first; `within` is the first one's place in its page."""

    first: int
    last: int
    within: int

    @property
    def tokens(self) -> int:
        return self.last - self.first


class _Rows:
    """One piece's view of a pool, as integers."""

    def __init__(
        self,
        pool: torch.Tensor,
        page_ids: torch.Tensor,
        shape: PageShape,
        piece: Piece,
        head_start: int,
        heads: int,
        first_page: int,
    ) -> None:
        assert pool.dtype is torch.uint8
        assert pool.shape[1] >= shape.nbytes, f"pages of {pool.shape[1]} bytes do not hold {shape}"
        assert pool.stride(1) == 1
        assert piece.layer_stop <= shape.layers, f"{piece} names layers that {shape} lacks"
        assert 0 <= head_start < head_start + heads <= shape.kv_heads, f"heads {head_start}+{heads} of {shape}"
        self._piece = piece
        self._heads = heads
        self._shape = shape
        self._page_ids = page_ids
        self._first_page = first_page
        self.payload = shape.payload_bytes(piece, heads)
        row_bytes = shape.row_bytes
        unit = next(
            (size, dtype)
            for size, dtype in _INTEGERS
            if row_bytes % size == 0
            and pool.stride(0) % size == 0
            and pool.storage_offset() % size == 0
            and pool.data_ptr() % size == 0
        )
        self._unit_bytes, self._unit = unit
        self._row_units = row_bytes // self._unit_bytes
        dims = (shape.layers, shape.planes, shape.kv_heads, shape.page_tokens, self._row_units)
        # [num_pages, piece layers, planes, heads, page_tokens, units of a row]
        self.pool = (
            pool[:, : shape.nbytes]
            .view(self._unit)
            .unflatten(1, dims)[:, piece.layer_start : piece.layer_stop, :, head_start : head_start + heads]
        )

    def staged(self, staging: torch.Tensor) -> tuple[torch.Tensor, int]:
        """(the payload as [layers, planes, heads, tokens, units of a row], bytes of the framed piece)."""
        framed = framed_bytes(self.payload)
        assert staging.dtype is torch.uint8
        assert staging.is_contiguous()
        assert staging.data_ptr() % 8 == 0
        assert staging.storage_offset() % 8 == 0
        assert staging.numel() >= framed, f"{staging.numel()} bytes of staging do not hold a piece of {framed}"
        dims = (self._piece.layers, self._shape.planes, self._heads, self._piece.tokens, self._row_units)
        return staging[: self.payload].view(self._unit).view(dims), framed

    def spans(self) -> list[tuple[_Span, int | torch.Tensor]]:
        """The piece as at most three spans: the end of a page, whole pages, the beginning of a page."""
        size = self._shape.page_tokens
        start, stop = self._piece.token_start, self._piece.token_stop
        first_whole, last_whole = -(-start // size), stop // size
        if first_whole > last_whole:  # within one page
            return [(_Span(0, stop - start, start % size), self._page(start // size))]
        spans: list[tuple[_Span, int | torch.Tensor]] = []
        if start % size:
            spans.append((_Span(0, first_whole * size - start, start % size), self._page(start // size)))
        if last_whole - first_whole == 1:  # directly; an index would copy a large state twice
            spans.append((_Span(first_whole * size - start, last_whole * size - start, 0), self._page(first_whole)))
        elif first_whole < last_whole:
            pages = self._page_ids[first_whole - self._first_page : last_whole - self._first_page]
            assert len(pages) == last_whole - first_whole, f"the page table ends before token {last_whole * size}"
            assert first_whole >= self._first_page, f"the page table begins after token {first_whole * size}"
            spans.append((_Span(first_whole * size - start, last_whole * size - start, 0), pages))
        if stop % size:
            spans.append((_Span(last_whole * size - start, stop - start, 0), self._page(last_whole)))
        return spans

    def _page(self, page: int) -> int:
        index = page - self._first_page
        assert 0 <= index < len(self._page_ids), f"the page table has no page {page}"
        return int(self._page_ids[index])
