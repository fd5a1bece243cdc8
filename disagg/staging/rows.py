"""What a gather or a scatter moves: the rows of one slice of a piece, in the pages of one layer group of a pool.

    pool     [num_pages, page_bytes] uint8, strided; a page is [layers, planes, kv_heads, page_tokens, head_dim]
    staging  [layers, planes, heads, tokens, head_dim], zero bytes up to a word, checksum (see pieces)

Only the rows of the piece travel: a token range need not begin or end with a page, and the two pools may have pages of
different sizes, at different distances. A state is a page of one row: one plane, one head, one position. Knows shapes and
bytes; nothing of requests, peers or rings, nor of how rows are moved.
"""

from __future__ import annotations

import torch
from msgspec import Struct

from disagg.messages.layout import LayerGroup
from disagg.messages.pieces import HeadSlice, Piece
from disagg.staging.pieces import WORD_BYTES, framed_bytes
from disagg.types.arithmetic import ceil_div


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


class PagedRows(Struct, frozen=True, eq=False):
    """The rows of a slice of a piece, where they lie in a pool: that of the rank that sends them, or of the one they go to.

    A gather takes the heads that `head_slice` names at its source, a scatter fills those that it names at its destination.
    pool: [num_pages, >= shape.nbytes] uint8, rows contiguous, any distance apart; page_ids: [n] int64 on the same device,
    entry i being the page of tokens [(first_page + i) * page_tokens, ...), distinct where a scatter writes; seed: the
    piece's identity, 64 bits (staging/identity).
    """

    pool: torch.Tensor
    page_ids: torch.Tensor
    shape: PageShape
    piece: Piece
    head_slice: HeadSlice
    seed: int
    first_page: int = 0

    def __post_init__(self) -> None:
        shape, piece = self.shape, self.piece
        assert self.pool.dtype is torch.uint8
        assert self.pool.shape[1] >= shape.nbytes, f"pages of {self.pool.shape[1]} bytes do not hold {shape}"
        assert self.page_ids.dtype is torch.int64
        assert self.pool.stride(1) == self.page_ids.stride(0) == 1
        assert piece.layer_stop <= shape.layers, f"{piece} names layers that {shape} lacks"
        assert self.first_page <= self.first, f"the page table begins after page {self.first}"
        assert self.stop <= self.first_page + len(self.page_ids), f"the page table has no page {self.stop - 1}"

    @property
    def first(self) -> int:
        """Position of the first page that holds a row of the piece."""
        return self.piece.token_start // self.shape.page_tokens

    @property
    def stop(self) -> int:
        """Position behind the last page that holds a row of the piece."""
        return ceil_div(self.piece.token_stop, self.shape.page_tokens)

    @property
    def payload_bytes(self) -> int:
        return self.shape.payload_bytes(self.piece, self.head_slice.heads)

    @property
    def staged_bytes(self) -> int:
        """Bytes in staging, padding and trailer included."""
        return framed_bytes(self.payload_bytes)

    def head_start(self, *, gather: bool) -> int:
        """The first of the slice's heads, as this pool's rank numbers them."""
        part, heads = self.head_slice, self.head_slice.heads
        start = part.src_head_start if gather else part.dst_head_start
        assert 0 <= start < start + heads <= self.shape.kv_heads, f"heads {start}+{heads} of {self.shape}"
        return start

    def check_staging(self, staging: torch.Tensor) -> None:
        """Whether rows can be staged there. staging: [>= staged_bytes] uint8, contiguous, aligned to words."""
        assert staging.dtype is torch.uint8
        assert staging.is_contiguous()
        assert staging.data_ptr() % WORD_BYTES == 0, "staging is not aligned to words"
        assert staging.storage_offset() % WORD_BYTES == 0, "staging is not aligned to words of its memory"
        assert staging.numel() >= self.staged_bytes, (
            f"{staging.numel()} bytes of staging do not hold a piece of {self.staged_bytes}"
        )
