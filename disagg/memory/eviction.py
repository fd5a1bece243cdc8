"""In which order pages are evicted: by their ages, the oldest first. Knows page numbers and ages; nothing of groups."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

# When a page was last used, then minus the length of the prefix that ends with it: the smallest is the oldest, so of
# pages that were last used in one step the longest prefix goes first. A large page is as young as its youngest page.
Age = tuple[int, int]
NEVER: Age = (-(1 << 62), 0)
_PASSED = 1 << 61


def passed(step: int) -> int:
    """What to release a page with, for `last_access`, that was written and passed at `step`, and that nobody is known to need
    again: older than all that was ever of use, the first passed the oldest. (Insertion at the LRU end: LIP, Qureshi
    et al., ISCA 2007.) A page that was of use before keeps the step of that.
    """
    return step - _PASSED


class EvictionQueue:
    """Evictable pages in the order of their ages, then of their numbers.

    last use    10 ─> {7: -64, 3: -128, 2: -128}     pages and ranks (the second part of an age); the first to be
                12 ─> {4: -48}                       evicted are sorted, and go from the end: page 2 is next
                14 ─> {5: -16, 9: -32}

    ages: by page number; that of a page does not change while it is here.
    """

    def __init__(self, ages: Sequence[Age]) -> None:
        self._ages = ages
        self._ranks: dict[int, dict[int, int]] = {}  # by last use, then by page
        self._last_uses: list[int] = []  # the keys of the above, in rising order
        self._sorted: int | None = None  # the last use whose pages are in order

    def add(self, pages: Iterable[int]) -> None:
        """These can be evicted from now on."""
        ages, by_last_use = self._ages, self._ranks
        for page in pages:
            last_use, rank = ages[page]
            if last_use not in by_last_use:
                by_last_use[last_use] = {}
                bisect.insort(self._last_uses, last_use)
            elif last_use == self._sorted:
                self._sorted = None
            by_last_use[last_use][page] = rank

    def remove(self, pages: Sequence[int]) -> None:
        """These cannot be evicted any more."""
        ages, by_last_use = self._ages, self._ranks
        if pages:
            last_use = ages[pages[0]][0]
            if len(pages) == len(by_last_use[last_use]) and by_last_use[last_use].keys() == set(pages):
                self._drop(last_use)  # quick, and usual: a sequence let go of them together
                return
        for page in pages:
            last_use = ages[page][0]
            ranks = by_last_use[last_use]
            del ranks[page]
            if not ranks:
                self._drop(last_use)

    def pop(self, count: int) -> list[int]:
        """Removes the `count` oldest pages, or as many as there are, and returns them, the oldest first."""
        popped: list[int] = []
        while len(popped) < count and self._last_uses:
            last_use = self._last_uses[0]
            ranks = self._ranks[last_use]
            if self._sorted != last_use:
                in_order = sorted(zip(ranks.values(), ranks, strict=True), reverse=True)
                ranks = self._ranks[last_use] = {page: rank for rank, page in in_order}
                self._sorted = last_use
            while ranks and len(popped) < count:
                popped.append(ranks.popitem()[0])
            if not ranks:
                self._drop(last_use)
        return popped

    def _drop(self, last_use: int) -> None:
        del self._ranks[last_use]
        del self._last_uses[bisect.bisect_left(self._last_uses, last_use)]
        if self._sorted == last_use:
            self._sorted = None

    def pages(self) -> set[int]:
        """All of them, found to be where their ages say."""
        assert self._last_uses == sorted(self._ranks) and all(self._ranks.values())
        found = {page: (last_use, rank) for last_use, ranks in self._ranks.items() for page, rank in ranks.items()}
        assert all(self._ages[page] == age for page, age in found.items()), "a page's age changed while it was in line"
        return set(found)
