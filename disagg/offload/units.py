"""Head units: one KV head of one page, all layers and planes. The smallest thing that storage holds.

    a rank's page     [layers, planes, heads of the rank, page_tokens, head_dim]
    a unit            [layers, planes,                    page_tokens, head_dim]     of one head
    a part in storage [heads, pages] units: whoever reads some of the heads reads one range

A unit is written by one rank: where ranks replicate a head, by the first of them. A state is one head, which all ranks
replicate. So writers partition a page exactly once, whatever their number, and readers of any number find their heads.
Knows shapes and bytes; nothing of files or tensors.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from disagg.messages.heads import heads_per_rank
from disagg.messages.layout import LayerGroup

Bytes = npt.NDArray[np.uint8]


def unit_bytes(group: LayerGroup, page_tokens: int) -> int:
    """group: of the whole model, or of a rank."""
    return group.page_bytes(page_tokens) // group.kv_heads


def heads_of(rank: int, tp: int, group: LayerGroup) -> range:
    """The heads of the model's that one of `tp` ranks holds. group: of the whole model. Raises SliceError."""
    if group.is_state:
        return range(1)
    held = heads_per_rank(tp, group.kv_heads)
    first = rank // max(1, tp // group.kv_heads) * held
    return range(first, first + held)


def written_by(rank: int, tp: int, group: LayerGroup) -> range:
    """Those of its heads that a rank writes to storage; empty where another one holds the same and writes them."""
    heads = heads_of(rank, tp, group)
    if rank and heads_of(rank - 1, tp, group) == heads:
        return range(0)
    return heads


def cut_page(page: Bytes, group: LayerGroup, page_tokens: int) -> Bytes:
    """page: [page_bytes], of a rank whose group this is. Returns [heads, unit_bytes], contiguous."""
    rows = len(group.layers) * group.planes
    units = page.reshape(rows, group.kv_heads, unit_bytes(group, page_tokens) // rows)
    return np.ascontiguousarray(units.transpose(1, 0, 2)).reshape(group.kv_heads, -1)


def join_unit(unit: Bytes, head: int, group: LayerGroup, page_tokens: int, out: Bytes) -> None:
    """One head of such a page, counted among the rank's."""
    rows = len(group.layers) * group.planes
    view = out.reshape(rows, group.kv_heads, unit_bytes(group, page_tokens) // rows)
    view[:, head] = unit.reshape(rows, -1)
