"""Gather pieces out of one layer group's pages and scatter them into them, bit for bit. The torch implementation, for CPU.

Elements are moved as integers of the widest size that fits, so no dtype is ever converted. What is moved, and the layout of
pages and of staging, is in staging/rows. Knows nothing of requests, peers or rings.
"""

from __future__ import annotations

import torch
from msgspec import Struct

from disagg.staging.checksum import checksum
from disagg.staging.pieces import TRAILER_BYTES
from disagg.staging.rows import PagedRows
from disagg.types.arithmetic import ceil_div

_INTEGERS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def gather(rows: PagedRows, out: torch.Tensor) -> int:
    """Copy rows into `out` with their checksum; returns the bytes written.

    out: [>= rows.staged_bytes] uint8, contiguous, aligned to words.
    """
    rows.check_staging(out)
    view = _IntegerView(rows, gather=True)
    staged = view.staged(out)
    padded = rows.staged_bytes - TRAILER_BYTES
    out[rows.payload_bytes : padded].zero_()
    for where, pages in _spans(rows):
        target = staged[:, :, :, where.first : where.last]
        if isinstance(pages, int):
            target.copy_(view.pool[pages][:, :, :, where.within : where.within + where.tokens])
        else:
            target.unflatten(3, (len(pages), rows.shape.page_tokens)).copy_(
                view.pool.index_select(0, pages).permute(1, 2, 3, 0, 4, 5)
            )
    total = checksum(out[:padded], rows.payload_bytes, rows.seed)
    trailer = torch.frombuffer(bytearray(total.to_bytes(TRAILER_BYTES, "little")), dtype=torch.uint8)
    out[padded : padded + TRAILER_BYTES].copy_(trailer)
    return rows.staged_bytes


def scatter(rows: PagedRows, staging: torch.Tensor) -> bool:
    """Copy rows into their pages, if the checksum is right: False, and not one byte written, if it is not.

    staging: as `gather` made it. Bytes of the pages outside of the rows are left alone.
    """
    rows.check_staging(staging)
    view = _IntegerView(rows, gather=False)
    staged = view.staged(staging)
    padded = rows.staged_bytes - TRAILER_BYTES
    trailer = int.from_bytes(bytes(staging[padded : padded + TRAILER_BYTES].tolist()), "little")
    if checksum(staging[:padded], rows.payload_bytes, rows.seed) != trailer:
        return False
    for where, pages in _spans(rows):
        source = staged[:, :, :, where.first : where.last]
        if isinstance(pages, int):
            view.pool[pages][:, :, :, where.within : where.within + where.tokens].copy_(source)
        else:
            view.pool.index_copy_(
                0, pages, source.unflatten(3, (len(pages), rows.shape.page_tokens)).permute(3, 0, 1, 2, 4, 5)
            )
    return True


class _IntegerView:
    """Rows as integers. pool: [num_pages, piece layers, planes, heads, page_tokens, integers of a row]."""

    def __init__(self, rows: PagedRows, *, gather: bool) -> None:
        pool, shape, piece = rows.pool, rows.shape, rows.piece
        unit_bytes, self._unit = next(
            (size, dtype)
            for size, dtype in _INTEGERS
            if shape.row_bytes % size == 0
            and pool.stride(0) % size == 0
            and pool.storage_offset() % size == 0
            and pool.data_ptr() % size == 0
        )
        row_units = shape.row_bytes // unit_bytes
        self._payload = rows.payload_bytes
        self._staged_dims = (piece.layers, shape.planes, rows.head_slice.heads, piece.tokens, row_units)
        page_dims = (shape.layers, shape.planes, shape.kv_heads, shape.page_tokens, row_units)
        layers = slice(piece.layer_start, piece.layer_stop)
        first_head = rows.head_start(gather=gather)
        heads = slice(first_head, first_head + rows.head_slice.heads)
        self.pool = pool[:, : shape.nbytes].view(self._unit).unflatten(1, page_dims)[:, layers, :, heads]

    def staged(self, staging: torch.Tensor) -> torch.Tensor:
        """[piece layers, planes, heads, tokens, integers of a row]."""
        return staging[: self._payload].view(self._unit).view(self._staged_dims)


class _Span(Struct, frozen=True):
    """Tokens [first, last) of a piece, counted from its first; `within` is the first one's place in its page."""

    first: int
    last: int
    within: int

    @property
    def tokens(self) -> int:
        return self.last - self.first


def _spans(rows: PagedRows) -> list[tuple[_Span, int | torch.Tensor]]:
    """The piece as at most three spans: the end of a page, whole pages, the beginning of a page. With their page ids."""
    size, table = rows.shape.page_tokens, rows.page_ids
    start, stop = rows.piece.token_start, rows.piece.token_stop
    first_whole, last_whole = ceil_div(start, size), stop // size

    def page(page_no: int) -> int:
        return int(table[page_no - rows.first_page])

    if first_whole > last_whole:  # within one page
        return [(_Span(0, stop - start, start % size), page(start // size))]
    spans: list[tuple[_Span, int | torch.Tensor]] = []
    if start % size:
        spans.append((_Span(0, first_whole * size - start, start % size), page(start // size)))
    whole = _Span(first_whole * size - start, last_whole * size - start, 0)
    if last_whole - first_whole == 1:  # directly; an index would copy a large state twice
        spans.append((whole, page(first_whole)))
    elif first_whole < last_whole:
        spans.append((whole, table[first_whole - rows.first_page : last_whole - rows.first_page]))
    if stop % size:
        spans.append((_Span(last_whole * size - start, stop - start, 0), page(last_whole)))
    return spans
