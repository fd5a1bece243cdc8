"""The small pages of one layer group: their states, holders and ages, and which of them can be evicted. `PageAllocator` has one
of these for each group; it alone changes them, and knows the large pages that they lie in.
"""

from __future__ import annotations

from collections.abc import Sequence

from disagg.memory.eviction import NEVER, EvictionQueue
from disagg.memory.layout import PoolLayout
from disagg.memory.stats import GroupStats

# States of a small page; a byte each, so that they are searched, counted and set many at once.
EMPTY, USED, KEPT, EVICTABLE = range(4)


class SmallPages:
    """The small pages of one group, by number through the whole pool; those outside the group's large pages are EMPTY.

    ages: of used pages too, if they were released before; NEVER of EMPTY ones. oldest: the evictable pages, unless each
    is a large page by itself and evicted as such. spacious: the group's large pages that have an empty small page, by
    owner.
    """

    def __init__(self, per_large: int, num_large: int) -> None:
        count = per_large * num_large
        self.per_large = per_large
        self.states = bytearray(count)
        self.holders = [0] * count
        self.ages = [NEVER] * count
        self.oldest = EvictionQueue(self.ages)
        self.spacious: dict[int, dict[int, None]] = {}
        self.num_large = 0
        self.num_idle_large = 0  # of these, the ones without used pages, which are the evictable ones
        self.num_used = 0
        self.num_evictable = 0
        self.evictions = 0

    @property
    def num_empty(self) -> int:
        return self.num_large * self.per_large - self.num_used - self.num_evictable

    def line_up(self, pages: Sequence[int]) -> None:
        """These have become evictable, at the ages that they have now."""
        self.num_evictable += len(pages)
        if self.per_large > 1:
            self.oldest.add(pages)

    def leave_line(self, pages: Sequence[int]) -> None:
        """These are not evictable any more. Their ages have not changed since."""
        self.num_evictable -= len(pages)
        if self.per_large > 1:
            self.oldest.remove(pages)

    def span(self, large: int) -> tuple[int, int]:
        """Numbers of the first small page of a large page, and of the first behind it."""
        return large * self.per_large, (large + 1) * self.per_large

    def count(self, large: int, state: int) -> int:
        """How many small pages of a large page are in this state."""
        return self.states.count(state, large * self.per_large, (large + 1) * self.per_large)

    def stats(self, layout: PoolLayout, g: int) -> GroupStats:
        """What these pages, of group g, are used for."""
        page_bytes = layout.groups[g].page_bytes
        return GroupStats(
            name=layout.groups[g].name,
            large_pages=self.num_large,
            empty_pages=self.num_empty,
            evictable_pages=self.num_evictable,
            used_pages=self.num_used,
            empty_bytes=self.num_empty * page_bytes,
            used_bytes=self.num_used * page_bytes,
            padding_bytes=self.num_large * self.per_large * layout.padding_bytes(g),
            evictions=self.evictions,
        )

    def check_integrity(self) -> None:
        """Walks every page."""
        for page, (state, holders, age) in enumerate(zip(self.states, self.holders, self.ages, strict=True)):
            assert (holders > 0) == (state in (USED, KEPT)), f"page {page}, {holders} holders, state {state}"
            assert state != EMPTY or age == NEVER, f"page {page} is empty and has an age"
            assert state != EVICTABLE or age != NEVER, f"page {page} is evictable and has no age"
        assert len(self.states) - self.states.count(EMPTY) == self.num_used + self.num_evictable
        evictable = (page for page, state in enumerate(self.states) if state == EVICTABLE and self.per_large > 1)
        assert self.oldest.pages() == set(evictable)
