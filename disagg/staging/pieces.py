"""Pieces: rectangles of layers and positions of one layer group, how many bytes they take, and what has landed.

A piece in the ring (positions are tokens; of a state group they are states, each one head of one plane):

    [layers, planes, heads, tokens, head_dim]   valid rows only, canonical order
    zero bytes up to a multiple of 8
    checksum, 8 bytes, little-endian

Knows numbers only; nothing of memory, ranks or messages.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from msgspec import Struct

from disagg.messages.layout import LayerGroup
from disagg.messages.pieces import Piece
from disagg.types.arithmetic import ceil_div, round_up

TRAILER_BYTES = 8
WORD_BYTES = 8


def group_payload_bytes(piece: Piece, heads: int, group: LayerGroup) -> int:
    """Bytes of the valid rows of a slice of `heads` heads: rows of tokens, or whole states."""
    return piece.layers * group.planes * heads * piece.tokens * group.head_dim * group.dtype_bytes


def framed_bytes(payload: int) -> int:
    """Bytes in the ring of `payload` bytes of rows: padded to words, and the trailer."""
    return round_up(payload, WORD_BYTES) + TRAILER_BYTES


def group_piece_bytes(piece: Piece, heads: int, group: LayerGroup) -> int:
    """Bytes that a slice of a piece takes in the ring, trailer included."""
    return framed_bytes(group_payload_bytes(piece, heads, group))


def split_group_piece(
    whole: Piece, heads: int, group: LayerGroup, max_bytes: int, page_tokens: int
) -> tuple[Piece, ...]:
    """`split_pieces` for slices of at most `heads` heads of this group. A state is cut by layers only."""
    row_bytes = group.planes * heads * group.head_dim * group.dtype_bytes
    return split_pieces(whole, row_bytes, max_bytes, group.rows_per_page(page_tokens))


def split_pieces(whole: Piece, bytes_per_token_layer: int, max_bytes: int, page_tokens: int = 1) -> tuple[Piece, ...]:
    """Cut `whole` into pieces of at most `max_bytes` in the ring each, by layers, then tokens, in order.

    `bytes_per_token_layer`: of one token of one layer in the widest slice, all planes together. A model computes layer
    after layer, so pieces of few layers can go while the others are computed. Tokens are cut only where one layer of all of
    them is too large, at page boundaries unless a single page is too large. Raises ValueError if not even one token of one
    layer fits.
    """
    assert bytes_per_token_layer > 0
    assert page_tokens > 0
    most = _most_rows(max_bytes, bytes_per_token_layer)
    step = max(1, most // whole.tokens)
    pieces = []
    for layer in range(whole.layer_start, whole.layer_stop, step):
        start = whole.token_start
        while start < whole.token_stop:
            stop = min(start + most, whole.token_stop)
            if stop < whole.token_stop:
                on_page = stop // page_tokens * page_tokens
                stop = on_page if on_page > start else stop
            pieces.append(Piece(whole.group, layer, min(layer + step, whole.layer_stop), start, stop))
            start = stop
    return tuple(pieces)


def most_group_pieces(positions: int, heads: int, group: LayerGroup, max_bytes: int, page_tokens: int) -> int:
    """So many pieces at most does `split_group_piece` make of all layers of positions [0, positions). Makes none.

    Raises ValueError if not even one token of one layer fits.
    """
    row_bytes, page_tokens = group.planes * heads * group.head_dim * group.dtype_bytes, group.rows_per_page(page_tokens)
    most, layers = _most_rows(max_bytes, row_bytes), len(group.layers)
    if most >= positions:
        return ceil_div(layers, most // positions)
    if most >= page_tokens:
        return layers * ceil_div(positions, most // page_tokens * page_tokens)
    pages, rest = divmod(positions, page_tokens)
    return layers * (pages * ceil_div(page_tokens, most) + ceil_div(rest, most))


def _most_rows(max_bytes: int, row_bytes: int) -> int:
    """So many rows, each of one token of one layer, fit into a piece of `max_bytes`. Raises ValueError if none does."""
    rows = (max_bytes - TRAILER_BYTES) // WORD_BYTES * WORD_BYTES // row_bytes
    if rows < 1:
        raise ValueError(f"one token of one layer takes {framed_bytes(row_bytes)} bytes; at most {max_bytes} fit")
    return rows


class _Band(Struct, frozen=True):
    """Adjacent layers in which the same tokens landed. `spans`: sorted, disjoint, not touching [start, stop)."""

    layer_start: int
    layer_stop: int
    spans: tuple[tuple[int, int], ...]


class Coverage:
    """Which (layer, token) cells of each group have landed. Its cost grows with the pieces' corners, not their cells.

    Kept as bands of layers; pieces of all layers, the usual case, make one band.
    """

    def __init__(self) -> None:
        self._bands: dict[int, list[_Band]] = {}  # by group; sorted, disjoint, none empty

    def add(self, piece: Piece) -> bool:
        """Note that a piece landed. False if nothing of it was new."""
        bands: list[_Band] = []
        whole = ((piece.token_start, piece.token_stop),)
        changed = False
        layer = piece.layer_start  # first layer of the piece that is not dealt with
        for band in self._bands.get(piece.group, []):
            start, stop = max(band.layer_start, piece.layer_start), min(band.layer_stop, piece.layer_stop)
            if start >= stop:
                bands.append(band)
                continue
            if layer < start:
                bands.append(_Band(layer, start, whole))
                changed = True
            if band.layer_start < start:
                bands.append(_Band(band.layer_start, start, band.spans))
            spans = _with_span(band.spans, piece.token_start, piece.token_stop)
            changed |= spans != band.spans
            bands.append(_Band(start, stop, spans))
            if stop < band.layer_stop:
                bands.append(_Band(stop, band.layer_stop, band.spans))
            layer = stop
        if layer < piece.layer_stop:
            bands.append(_Band(layer, piece.layer_stop, whole))
            changed = True
        if changed:
            self._bands[piece.group] = _merged(bands)
        return changed

    def missing(self, due: Iterable[Piece]) -> tuple[Piece, ...]:
        """What of the due rectangles has not landed, rectangle by rectangle."""
        return tuple(hole for piece in due for hole in self._holes(piece))

    def tokens(self, group: int) -> tuple[tuple[int, int], ...]:
        """Spans of tokens of which something has landed, in any layer; they may overlap."""
        return tuple(span for band in self._bands.get(group, []) for span in band.spans)

    def complete(self, due: Iterable[Piece]) -> bool:
        """True when every due cell has landed."""
        return not any(self._holes(piece) for piece in due)

    def _holes(self, piece: Piece) -> list[Piece]:
        parts: list[_Band] = []  # of the layers that landed, with the tokens that did not
        layer = piece.layer_start
        whole = ((piece.token_start, piece.token_stop),)
        for band in self._bands.get(piece.group, []):
            start, stop = max(band.layer_start, piece.layer_start), min(band.layer_stop, piece.layer_stop)
            if start >= stop:
                continue
            if layer < start:
                parts.append(_Band(layer, start, whole))
            parts.append(_Band(start, stop, _gaps(band.spans, piece.token_start, piece.token_stop)))
            layer = stop
        if layer < piece.layer_stop:
            parts.append(_Band(layer, piece.layer_stop, whole))
        return [
            Piece(piece.group, band.layer_start, band.layer_stop, start, stop)
            for band in _merged(parts)
            for start, stop in band.spans
        ]

    def check_integrity(self) -> None:
        """What must hold between any two calls."""
        for bands in self._bands.values():
            assert bands == _merged(bands), "bands overlap, are out of order, or could be merged"
            for band in bands:
                assert band.layer_start < band.layer_stop
                assert band.spans
                ends = [end for span in band.spans for end in span]
                assert ends == sorted(set(ends)), f"spans overlap or touch: {band.spans}"


def _merged(bands: list[_Band]) -> list[_Band]:
    """`bands` in order of layers, equal neighbours joined, empty ones dropped."""
    out: list[_Band] = []
    for band in sorted(bands, key=lambda b: b.layer_start):
        if not band.spans:
            continue
        if out and out[-1].layer_stop == band.layer_start and out[-1].spans == band.spans:
            out[-1] = _Band(out[-1].layer_start, band.layer_stop, band.spans)
        else:
            out.append(band)
    return out


def _with_span(spans: tuple[tuple[int, int], ...], start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """`spans` and [start, stop), joined where they touch."""
    first = bisect.bisect_left(spans, start, key=lambda span: span[1])  # first that ends at or after start
    last = bisect.bisect_right(spans, stop, key=lambda span: span[0])  # first that begins after stop
    if first < last:
        start, stop = min(start, spans[first][0]), max(stop, spans[last - 1][1])
    return (*spans[:first], (start, stop), *spans[last:])


def _gaps(spans: tuple[tuple[int, int], ...], start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """[start, stop) without `spans`."""
    gaps = []
    for span_start, span_stop in spans:
        if span_stop <= start:
            continue
        if span_start >= stop:
            break
        if start < span_start:
            gaps.append((start, span_start))
        start = max(start, span_stop)
    if start < stop:
        gaps.append((start, stop))
    return tuple(gaps)
