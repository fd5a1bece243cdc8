"""The largest logits of each row in one total order: value descending, then token id ascending.

A row with NaN or an infinitely large logit, or of which all are minus infinity, has no first token: `first_or_none` says -1.

`torch.topk` leaves the order of ties open, and logits computed in bf16 tie often. Here -0.0 equals 0.0; NaN has no
place in the order. Knows values and positions; nothing of sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from disagg.models.argmax.first import checked

_TILE = 64  # columns; large enough that tile maxima are few, small enough that a few tiles are little work
_ID_BASE = 0x7FFFFFFF


def first_argmax(x: Tensor) -> Tensor:
    """The lowest index of each row's maximum. x: [R, V] of any floating dtype; returns [R] int64."""
    rows, width = x.shape
    if x.device.type != "cpu" or width % _TILE or width < 16 * _TILE or not x.is_contiguous():
        return x.argmax(-1)
    # amax is vectorised on CPU and argmax is not: find the first tile that holds the maximum, then look inside.
    tiles = x.view(rows, -1, _TILE)
    tile = tiles.amax(-1).argmax(-1)
    inside = tiles[torch.arange(rows), tile].argmax(-1)
    return tile * _TILE + inside


def first_or_none(x: Tensor) -> Tensor:
    """`first_argmax`, -1 for a row that has none."""
    return checked(first_argmax(x), x)


def has_first(x: Tensor) -> Tensor:
    """[R] bool. x: [R, V] of any floating dtype."""
    return x.amax(-1).isfinite()


def largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k of each row in the order above. x: [R, V] float32; returns values [R, k], ids [R, k] int64."""
    rows, width = x.shape
    assert 0 < k <= width
    if k == width:
        values, ids = x.sort(dim=-1, descending=True, stable=True)
        return values, ids
    ids = torch.arange(width, device=x.device)
    if width % _TILE or 2 * k * _TILE > width or not x.is_contiguous():
        return _decode(_keys(x, ids).topk(k).values)
    # An element of the first k lies in one of the first k tiles, ordered by maximum and then position: a tile not among
    # them is preceded by k tiles, each of which holds an element that precedes everything in it.
    tiles = x.view(rows, -1, _TILE)
    _, tile = _decode(_keys(tiles.amax(-1), ids[: width // _TILE]).topk(k).values)
    values = tiles.gather(1, tile.unsqueeze(-1).expand(-1, -1, _TILE))
    positions = tile.unsqueeze(-1) * _TILE + ids[:_TILE]
    return _decode(_keys(values, positions).view(rows, -1).topk(k).values)


def _keys(x: Tensor, ids: Tensor) -> Tensor:
    """int64 keys, all different within a row, whose order is the order above."""
    return in_order(x).to(torch.int64).bitwise_left_shift_(32).add_(_ID_BASE - ids)


def in_order(x: Tensor) -> Tensor:
    """int32 of the order of values; -0.0 is 0.0. x: float32."""
    return _flip((x + 0.0).view(torch.int32))


def _decode(keys: Tensor) -> tuple[Tensor, Tensor]:
    values = _flip((keys >> 32).to(torch.int32)).view(torch.float32)
    return values, _ID_BASE - (keys & 0xFFFFFFFF)


def _flip(bits: Tensor) -> Tensor:
    """float32 bit patterns to integers of the same order, and back."""
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
