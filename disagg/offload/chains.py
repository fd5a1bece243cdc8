"""Which stored spans go on from which. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from disagg.offload.survey import StoredSpan


def without_parent(spans: Sequence[StoredSpan]) -> dict[str, StoredSpan]:
    """By path, those whose page before the first is in no span."""
    starts: dict[str, set[bytes]] = defaultdict(set)
    for each in spans:
        starts[each.folder].update((each.span.root, *each.span.hashes))
    return {each.path: each for each in spans if each.span.parent not in starts[each.folder]}


def going_on_from(gone: Sequence[StoredSpan], spans: Sequence[StoredSpan]) -> list[StoredSpan]:
    """Of all spans, those that nobody can find any more when these are gone, and are not of them; whatever follows before what is
    before it."""
    holders = Counter((each.folder, page_hash) for each in spans for page_hash in each.span.hashes)
    children: dict[tuple[str, bytes], list[StoredSpan]] = defaultdict(list)
    for each in spans:
        children[each.folder, each.span.parent].append(each)
    found: list[StoredSpan] = []
    known, left = {each.path for each in gone}, list(gone)
    while left:
        each = left.pop()
        for page in [(each.folder, page_hash) for page_hash in each.span.hashes]:
            holders[page] -= 1
            if holders[page]:
                continue
            behind = [child for child in children[page] if child.path not in known]
            known |= {child.path for child in behind}
            found += behind
            left += behind
    return found[::-1]
