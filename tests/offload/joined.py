"""Pages put together from the units of their heads, as a rank does it one unit after the other."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.messages.layout import LayerGroup
from disagg.offload.units import Bytes, join_unit


def join_page(units: Sequence[Bytes], group: LayerGroup, page_tokens: int, out: Bytes) -> None:
    """The page of a rank whose group this is, from the units of its heads, in order. out: [page_bytes]."""
    assert len(units) == group.kv_heads, f"{len(units)} units for {group.kv_heads} heads"
    for head, unit in enumerate(units):
        join_unit(unit, head, group, page_tokens, out)
