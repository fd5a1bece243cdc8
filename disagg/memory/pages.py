"""Hands out the small pages of one pool and counts who uses them. Knows page numbers; nothing of tokens or tensors.

A page is *free*, or *used* by one or more holders (choices of a request share the pages of their prompt). Lowest numbers
first, so that one request's pages tend to be neighbours.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class PageAllocator:
    """Reference-counted pages 0 .. num_pages-1. All or nothing: `allocate` gives every page asked for, or None."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0
        self.total = num_pages
        self._free = list(range(num_pages))  # a heap; an ascending list already is one
        self._holders = [0] * num_pages

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    @property
    def evictable(self) -> int:
        """Pages kept for a prefix cache and held by nobody; there is none before that cache arrives."""
        return 0

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """`count` pages with one holder each, or None if fewer are free."""
        if count > len(self._free):
            return None
        pages = tuple(heapq.heappop(self._free) for _ in range(count))
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of these pages, which are in use."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder fewer for each; a page without holders is free again."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} released twice"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                heapq.heappush(self._free, page)

    def check_integrity(self) -> None:
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        for page, holders in enumerate(self._holders):
            assert (holders == 0) == (page in free), f"page {page} has {holders} holders and free is {page in free}"
        assert self.free + self.used + self.evictable == self.total


def pages_for(tokens: int, page_tokens: int) -> int:
    """How many pages hold this many tokens."""
    return -(-tokens // page_tokens)


class LegPages:
    """Page tables of one leg's choices: full prompt pages are shared, the partial last one is copied on write.

    shared: pages full of trunk tokens, one holder per choice. own: per choice, the pages after them. copies: (source,
    destination) of the partial page, to be copied once the trunk has landed and before any choice writes.
    """

    def __init__(self, shared: tuple[int, ...], own: tuple[tuple[int, ...], ...], partial: bool) -> None:
        self.shared = shared
        self.own = own
        self.copies = tuple((own[0][0], pages[0]) for pages in own[1:]) if partial else ()

    def table(self, choice_index: int) -> tuple[int, ...]:
        return self.shared + self.own[choice_index]

    @classmethod
    def allocate(
        cls, allocator: PageAllocator, trunk_tokens: int, total_tokens: int, choices: int, page_tokens: int
    ) -> LegPages | None:
        """Pages for `choices` sequences of total_tokens each that share trunk_tokens, or None if they do not fit now."""
        full = trunk_tokens // page_tokens
        each = pages_for(total_tokens, page_tokens) - full
        pages = allocator.allocate(full + each * choices)
        if pages is None:
            return None
        shared = pages[:full]
        for _ in range(choices - 1):
            allocator.share(shared)
        own = tuple(pages[full + i * each : full + (i + 1) * each] for i in range(choices))
        return cls(shared, own, partial=trunk_tokens % page_tokens != 0)

    @staticmethod
    def count(trunk_tokens: int, total_tokens: int, choices: int, page_tokens: int) -> int:
        """How many pages `allocate` would take."""
        full = trunk_tokens // page_tokens
        return full + (pages_for(total_tokens, page_tokens) - full) * choices
