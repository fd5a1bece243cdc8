"""Extents, adjacent page numbers: what one copy, or one read, can span."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def extents_of(numbers: Sequence[int], kinds: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Extents [first, stop) of rising numbers, each of one kind, if kinds (by number) are given."""
    extents: list[tuple[int, int]] = []
    first = stop = -1
    for number in numbers:
        if number != stop or (kinds is not None and kinds[number] != kinds[first]):
            if first >= 0:
                extents.append((first, stop))
            first = number
        stop = number + 1
    if first >= 0:
        extents.append((first, stop))
    return extents


def num_extents(pages: Sequence[int]) -> int:
    """How many extents a page table is."""
    return sum(after != before + 1 for before, after in pairwise(pages)) + bool(pages)
