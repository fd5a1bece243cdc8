"""What the allocator and the prefix cache must do, done naively: plain lists, everything recomputed at every question.

Where several answers are right (any empty page of one's own large page, any of two pages of equal age), the model takes
the answer that it is shown, and fails when that is none of the right ones. Knows nothing of how `memory/` does it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from disagg.memory.cache import ImageRef, image_key, snapshot_key
from disagg.memory.layout import PoolLayout
from disagg.messages.layout import GroupKind

OWN_EMPTY, EMPTY_LARGE, EVICT_LARGE, ANY_EMPTY, EVICT_SMALL = 1, 2, 3, 4, 5  # the five steps

Page = tuple[int, int]  # (group, small page)


@dataclass
class SmallPage:
    """holders: how many sequences use it. kept: its content is in the prefix cache."""

    holders: int = 0
    kept: bool = False
    last_access: int = 0
    prefix_len: int = 0

    @property
    def is_used(self) -> bool:
        return self.holders > 0

    @property
    def is_evictable(self) -> bool:
        return self.holders == 0 and self.kept

    @property
    def is_empty(self) -> bool:
        return self.holders == 0 and not self.kept

    @property
    def age(self) -> tuple[int, int]:
        """The smallest goes first: the longest ago, and of those the longest prefix."""
        return (self.last_access, -self.prefix_len)


@dataclass
class LargePage:
    """A large page that belongs to a group, with the owner for whom it was taken, None when that one has ended."""

    group: int
    owner: int | None
    small: list[SmallPage]

    @property
    def is_evictable(self) -> bool:
        return not any(page.is_used for page in self.small) and any(page.is_evictable for page in self.small)

    @property
    def age(self) -> tuple[int, int]:
        """That of its newest cached page."""
        return max(page.age for page in self.small if page.is_evictable)

    def copy(self) -> LargePage:
        return LargePage(self.group, self.owner, [SmallPage(**vars(page)) for page in self.small])


class NotLegalError(AssertionError):
    """The answer is none of those that the five steps allow."""


@dataclass
class PoolModel:
    """Large pages, None while they are empty. steps: how often each of the five steps gave a page."""

    layout: PoolLayout
    large: list[LargePage | None]
    steps: collections.Counter[int] = field(default_factory=collections.Counter)

    @classmethod
    def empty(cls, layout: PoolLayout, num_large: int, steps: collections.Counter[int]) -> PoolModel:
        return cls(layout, [None] * num_large, steps)

    def copy(self) -> PoolModel:
        return PoolModel(self.layout, [large and large.copy() for large in self.large])

    # ---- what is where

    def page(self, g: int, page: int) -> SmallPage:
        per_large = self.layout.per_large[g]
        large = self.large[page // per_large]
        assert large is not None and large.group == g, f"page {page} is none of group {g}"
        return large.small[page % per_large]

    def where(self, g: int, test: Callable[[SmallPage], bool]) -> list[int]:
        """Small pages of group g that pass the test."""
        per_large = self.layout.per_large[g]
        return [
            number * per_large + i
            for number, large in enumerate(self.large)
            if large is not None and large.group == g
            for i, page in enumerate(large.small)
            if test(page)
        ]

    def small_counts(self) -> list[tuple[int, int, int]]:
        """By group, empty, evictable and used small pages in its large pages."""
        counts = [[0, 0, 0] for _ in self.layout.groups]
        for large in self.large:
            if large is not None:
                for page in large.small:
                    counts[large.group][2 if page.is_used else 1 if page.is_evictable else 0] += 1
        return [(empty, evictable, used) for empty, evictable, used in counts]

    def large_counts(self) -> tuple[int, int, int]:
        """Empty, evictable and used large pages."""
        empty = sum(large is None for large in self.large)
        evictable = sum(large is not None and large.is_evictable for large in self.large)
        return empty, evictable, len(self.large) - empty - evictable

    def fragmentation_bytes(self) -> int:
        """Bytes of assigned large pages in which no content can be: empty small pages, and what strides are too long."""
        total = 0
        for large in self.large:
            if large is not None:
                stride, page_bytes = self.layout.strides[large.group], self.layout.groups[large.group].page_bytes
                total += sum(stride if page.is_empty else stride - page_bytes for page in large.small)
        return total

    def all_holders(self) -> dict[Page, int]:
        return {
            (large.group, number * len(large.small) + i): page.holders
            for number, large in enumerate(self.large)
            if large is not None
            for i, page in enumerate(large.small)
            if page.is_used
        }

    # ---- the five steps

    def legal(self, g: int, owner: int) -> tuple[int, list[int]]:
        """The step that gives the next small page, and the pages that it may give: (0, []) when there are none."""
        per_large = self.layout.per_large[g]
        mine = [n for n, large in enumerate(self.large) if large and large.group == g and large.owner == owner]
        own_empty = [page for page in self.where(g, lambda page: page.is_empty) if page // per_large in mine]
        if own_empty:
            return OWN_EMPTY, own_empty
        empty_large = [n for n, large in enumerate(self.large) if large is None]
        if empty_large:
            return EMPTY_LARGE, [n * per_large + i for n in empty_large for i in range(per_large)]
        evictable = [(large.age, n) for n, large in enumerate(self.large) if large and large.is_evictable]
        if evictable:
            oldest = [n for age, n in evictable if age == min(evictable)[0]]
            return EVICT_LARGE, [n * per_large + i for n in oldest for i in range(per_large)]
        any_empty = self.where(g, lambda page: page.is_empty)
        if any_empty:
            return ANY_EMPTY, any_empty
        cached = self.where(g, lambda page: page.is_evictable)
        if cached:
            oldest_age = min(self.page(g, page).age for page in cached)
            return EVICT_SMALL, [page for page in cached if self.page(g, page).age == oldest_age]
        return 0, []

    def give(self, g: int, owner: int, step: int, page: int) -> list[Page]:
        """Carry out one step for this page. Returns what was evicted."""
        per_large = self.layout.per_large[g]
        number = page // per_large
        evicted = []
        if step == EVICT_LARGE:
            evicted = self.evict(number)
        if step in (EMPTY_LARGE, EVICT_LARGE):
            self.large[number] = LargePage(g, owner, [SmallPage() for _ in range(per_large)])
        if step == EVICT_SMALL:
            evicted = [(g, page)]
        large = self.large[number]
        assert large is not None
        large.small[page % per_large] = SmallPage(holders=1)
        return evicted

    def evict(self, number: int) -> list[Page]:
        large = self.large[number]
        assert large is not None and large.is_evictable
        per_large = self.layout.per_large[large.group]
        return [(large.group, number * per_large + i) for i, page in enumerate(large.small) if page.is_evictable]

    def can_allocate(self, g: int, count: int, owner: int) -> bool:
        """Whether the steps give so many pages: tried on a copy."""
        trial = self.copy()
        for _ in range(count):
            step, pages = trial.legal(g, owner)
            if not pages:
                return False
            trial.give(g, owner, step, pages[0])
        return True

    def allocate(self, g: int, count: int, owner: int, given: Sequence[int] | None) -> list[Page]:
        """Follow an allocation that gave these pages, in whatever order they are listed. Returns what it had to evict."""
        if given is None:
            if self.can_allocate(g, count, owner):
                raise NotLegalError(f"{count} pages of group {g} were refused although the five steps give them")
            return []
        if len(given) != count or len(set(given)) != count:
            raise NotLegalError(f"{count} pages were asked for and {list(given)} given")
        per_large = self.layout.per_large[g]
        left = set(given)
        evicted = []
        while left:
            step, pages = self.legal(g, owner)
            chosen = [page for page in pages if page in left]
            if not chosen:
                raise NotLegalError(
                    f"step {step} gives one of {pages} of group {g}, and {sorted(left)} are none of them"
                )
            # Of several large pages the one that was used up comes first: what is left over of it would be step 1's.
            page = max(chosen, key=lambda page: (sum(other // per_large == page // per_large for other in left), -page))
            evicted += self.give(g, owner, step, page)
            self.steps[step] += 1
            left.remove(page)
        return evicted

    # ---- holders and contents

    def share(self, g: int, pages: Sequence[int]) -> None:
        for page in pages:
            assert not self.page(g, page).is_empty, "an empty page cannot be shared"
            self.page(g, page).holders += 1

    def release(self, g: int, pages: Sequence[int], last_access: int, prefix_lens: Sequence[int]) -> None:
        for number, prefix_len in zip(pages, prefix_lens, strict=True):
            page = self.page(g, number)
            assert page.is_used, "an unused page cannot be released"
            page.holders -= 1
            page.last_access = max(page.last_access, last_access)
            page.prefix_len = prefix_len
        self._return_empty()

    def keep(self, g: int, page: int) -> None:
        self.page(g, page).kept = True

    def forget(self, g: int, page: int) -> None:
        self.page(g, page).kept = False
        self._return_empty()

    def forget_owner(self, owner: int) -> None:
        for large in self.large:
            if large is not None and large.owner == owner:
                large.owner = None

    def _return_empty(self) -> None:
        """A large page whose small pages are all empty belongs to no group any more."""
        self.large = [
            None if large is not None and all(page.is_empty for page in large.small) else large for large in self.large
        ]


@dataclass
class CacheModel:
    """What is cached, as a plain table, and the rule of each kind of group read literally."""

    layout: PoolLayout
    page_of: dict[tuple[int, bytes], int] = field(default_factory=dict)  # (group, key) -> small page

    def drop(self, evicted: Sequence[Page]) -> None:
        self.page_of = {name: page for name, page in self.page_of.items() if (name[0], page) not in evicted}

    def needed(self, g: int, n: int, hashes: Sequence[bytes], images: Sequence[ImageRef]) -> list[bytes] | None:
        """The keys of all pages without which a prefix of n tokens is of no use in group g. None: it never is.

        FULL needs every page; WINDOW those of the tokens that the next one attends to; STATE the state after n tokens, of
        which only those at multiples of checkpoint_tokens are to be trusted; IMAGE every image that has begun; BUDGET every
        page while nothing had to be left out, then the choice that was made at n.
        """
        group, page_tokens = self.layout.groups[g], self.layout.page_tokens
        if n == 0:
            return []
        if group.kind is GroupKind.FULL:
            return list(hashes[: n // page_tokens])
        if group.kind is GroupKind.WINDOW:
            tokens = range(max(0, n - group.window_tokens), n)
            return [hashes[page_no] for page_no in sorted({token // page_tokens for token in tokens})]
        if group.kind is GroupKind.STATE:
            return [hashes[n // page_tokens - 1]] if n % self.layout.checkpoint_tokens == 0 else None
        if group.kind is GroupKind.IMAGE:
            begun = [image for image in images if image.start_token < n]
            return [image_key(image.hash, index) for image in begun for index in range(image.num_pages)]
        if n <= group.budget_tokens:
            return list(hashes[: n // page_tokens])
        count = -(-group.budget_tokens // page_tokens)
        return [snapshot_key(hashes[n // page_tokens - 1], index) for index in range(count)]

    def is_valid(self, n: int, hashes: Sequence[bytes], images: Sequence[ImageRef]) -> bool:
        """Whether every group holds all that it needs of a prefix of n tokens."""
        for g in range(len(self.layout.groups)):
            needed = self.needed(g, n, hashes, images)
            if needed is None or any((g, key) not in self.page_of for key in needed):
                return False
        return True

    def lookup(self, hashes: Sequence[bytes], cap: int, images: Sequence[ImageRef]) -> int:
        """The longest valid prefix of whole pages, found by trying every one."""
        page_tokens = self.layout.page_tokens
        lengths = range(0, min(cap, len(hashes) * page_tokens) + 1, page_tokens)
        return max(n for n in lengths if self.is_valid(n, hashes, images))

    def receivable(self, g: int, hashes: Sequence[bytes], start: int, stop: int) -> int:
        """The first token of [start, stop) whose page is not cached, or stop: tried token by token."""
        for token in range(start, stop):
            page_no = token // self.layout.page_tokens
            if page_no >= len(hashes) or (g, hashes[page_no]) not in self.page_of:
                return token
        return stop
