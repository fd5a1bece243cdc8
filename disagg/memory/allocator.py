"""Hands out the small pages of every layer group from one pool of large pages. Knows page numbers, holders and ages;
nothing of tokens, hashes or tensors.

    large page   empty ── assigned to a group ──> used <── idle, or shared again ──> evictable
                   ^──────────────── all its small pages are empty ─────────────────────┘

    small page   EMPTY ── allocate ──> USED ── keep ──> KEPT ── last release ──> EVICTABLE
                   ^── last release ───┘ ^── forget ──┘  ^──────── share ──────────┘ │
                   └──────────────────────── evicted, or forgotten ──────────────────┘

A small page is *used* while it has holders: USED if its content is of no further use, KEPT if a prefix cache knows it.
Without holders the former is EMPTY and the latter EVICTABLE. A large page is evictable if no small page of it is used
and at least one is evictable.

Each small page comes from the first of these steps that can give one:

    1  an empty small page of a large page that was taken for the same owner
    2  an empty large page, which is the owner's from then on
    3  the oldest evictable large page, of any group, evicted and then used as in 2
    4  an empty small page of any large page of the group
    5  the oldest evictable small page of the group, evicted

So caches are given up only when no large page is empty, and small pages that are needed together, and end together, lie
in one large page.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from disagg.memory.eviction import NEVER, EvictionQueue
from disagg.memory.extents import extents_of
from disagg.memory.layout import PoolLayout
from disagg.memory.small_pages import EMPTY, EVICTABLE, KEPT, USED, SmallPages
from disagg.memory.stats import PoolStats
from disagg.types.arithmetic import ceil_div

NOBODY = -1  # owns the large pages whose owner has ended


class PageAllocator:
    """The pages of one pool of num_large large pages.

    on_evict(g, page) is told of each small page whose content is given up for another's; it must not call back. An
    owner is any number that stands for one sequence, until `forget_owner`; after that it is not used again.
    """

    def __init__(self, layout: PoolLayout, num_large: int, on_evict: Callable[[int, int], None]) -> None:
        assert num_large > 0, "a pool has at least one large page"
        self.layout = layout
        self.num_large = num_large
        self._on_evict = on_evict
        self._small = [SmallPages(per_large, num_large) for per_large in layout.per_large]
        # By large page. Group, owner and number of used small pages mean something only while it is not empty.
        self._is_empty = bytearray(b"\1" * num_large)
        self._group = [0] * num_large
        self._owner = [NOBODY] * num_large
        self._num_used = [0] * num_large
        self._num_empty_large = num_large
        self._lowest_empty = 0  # no large page below it is empty
        self._large_ages = [NEVER] * num_large  # as they were when it last became evictable
        self._oldest_large = EvictionQueue(self._large_ages)
        self._live_owners: set[int] = set()

    # ---- getting pages

    def allocate(self, g: int, count: int, owner: int) -> list[int] | None:
        """`count` small pages of group g, with one holder each. None, and nothing has changed, if there are fewer."""
        return self._take(g, count, owner) if self._can_take([(g, count)], owner) else None

    def allocate_all(self, needs: Sequence[int], owner: int) -> list[list[int]] | None:
        """`needs[g]` small pages of every group g: what `allocate` gives if asked for one group after the other.

        None if one of them would be refused; that is found out by counting, before anything is taken or evicted.
        """
        wanted = [(g, count) for g, count in enumerate(needs) if count]
        if not self._can_take(wanted, owner):
            return None
        pages: list[list[int]] = [[] for _ in needs]
        for g, count in wanted:
            pages[g] = self._take(g, count, owner)
        return pages

    def can_allocate(self, needs: Sequence[int], after: Sequence[int] = ()) -> bool:
        """`allocate_all` would not refuse an owner who has no pages yet, not even after it gave somebody the pages of `after`,
        which are of other groups."""
        wanted = [(g, count) for each in (after, needs) for g, count in enumerate(each) if count]
        return self._can_take(wanted, NOBODY - 1)

    def _can_take(self, wanted: Sequence[tuple[int, int]], owner: int) -> bool:
        """Whether the five steps give `count` pages of each (group, count), one after the other. Exact.

        One large page is as good as another, so it is enough to count them, except where the owner has an evictable one
        with empty small pages: step 1 of its group would use it, unless step 3 of a group before has evicted it.
        """
        empty_large, evictable_large = self._num_empty_large, self.evictable_large
        if sum([ceil_div(count, self._small[g].per_large) for g, count in wanted]) <= empty_large:
            return True  # enough, and usual
        kept_back: set[int] = set()  # evictable large pages of which step 1 takes a page
        evicted: set[int] = set()
        for i, (g, count) in enumerate(wanted):
            small = self._small[g]
            own = taken_back = 0
            for large in small.spacious.get(owner, ()):
                if own >= count:
                    break
                if large in evicted:
                    continue
                own += small.count(large, EMPTY)
                if self._num_used[large] == 0:
                    kept_back.add(large)
                    taken_back += 1
            evictable_large -= taken_back
            if (rest := count - own) <= 0:
                continue
            num_large = ceil_div(rest, small.per_large)
            from_empty = min(num_large, empty_large)
            from_evictable = min(num_large - from_empty, evictable_large)
            empty_large -= from_empty
            evictable_large -= from_evictable
            rest -= (from_empty + from_evictable) * small.per_large
            if rest > 0:
                # No large page is empty or evictable now, so steps 4 and 5 reach every small page that is not used.
                mixed_large = small.num_large - small.num_idle_large + taken_back
                if rest > mixed_large * small.per_large - small.num_used - own:
                    return False
            if from_evictable and any(self._has_idle(later, owner) for later, _ in wanted[i + 1 :]):
                evicted.update(self._next_evicted(from_evictable, kept_back | evicted))
        return True

    def _has_idle(self, g: int, owner: int) -> bool:
        """The owner has an evictable large page with empty small pages in group g."""
        return any(self._num_used[large] == 0 for large in self._small[g].spacious.get(owner, ()))

    def _next_evicted(self, count: int, excluded: set[int]) -> list[int]:
        """The oldest evictable large pages but these. Looks at every large page."""
        left = ((self._large_ages[large], large) for large in self._oldest_large.pages() - excluded)
        return [large for _, large in heapq.nsmallest(count, left)]

    def _take(self, g: int, count: int, owner: int) -> list[int]:
        """Follows the five steps. The pages are known to be there."""
        self._live_owners.add(owner)
        small = self._small[g]
        pages: list[int] = []
        while len(pages) < count and owner in small.spacious:
            pages += self._fill(g, next(iter(small.spacious[owner])), count - len(pages))
        if len(pages) < count and self._num_empty_large:
            for first, stop in self._empty_extents(ceil_div(count - len(pages), small.per_large)):
                pages += self._assign(g, first, stop, owner, count - len(pages))
        if len(pages) < count:
            whole, part = divmod(count - len(pages), small.per_large)
            evicted = self._evict_large(whole + (part > 0))
            # Adjacent ones together, but the last remains the last, because it is not filled.
            for first, stop in extents_of(sorted(evicted[:whole])) + extents_of(evicted[whole:]):
                pages += self._assign(g, first, stop, owner, count - len(pages))
        while len(pages) < count and small.spacious:
            other = NOBODY if NOBODY in small.spacious else next(iter(small.spacious))
            pages += self._fill(g, next(iter(small.spacious[other])), count - len(pages))
        if len(pages) < count:
            pages += self._evict_small(g, count - len(pages))
        return pages

    def _empty_extents(self, count: int) -> list[tuple[int, int]]:
        """Extents [first, stop) of `count` empty large pages, or as many as there are: the lowest that are all adjacent,
        else the longest extents that halving finds. They are marked as not empty, so that none is found twice.
        """
        extents = []
        left = length = min(count, self._num_empty_large)
        start = self._lowest_empty
        if left == 1:
            first = self._is_empty.find(1, start)
            self._is_empty[first] = 0
            self._lowest_empty = first + 1
            return [(first, first + 1)]
        while left:
            first = self._is_empty.find(b"\1" * length, start)
            if first < 0:
                length, start = (length + 1) // 2, self._lowest_empty
                continue
            if length == 1 or first == self._lowest_empty:
                self._lowest_empty = first + length
            self._is_empty[first : first + length] = bytes(length)
            extents.append((first, first + length))
            left -= length
            start = first + length
            if left < length:
                length, start = left, self._lowest_empty
        return extents

    def _assign(self, g: int, first: int, stop: int, owner: int, count: int) -> range:
        """Gives large pages [first, stop), which are empty, to the owner. Takes `count` small pages of them, or all."""
        small = self._small[g]
        num_large = stop - first
        if num_large == 1:
            return self._assign_one(small, g, first, owner, min(count, small.per_large))
        start = first * small.per_large
        taken = min(count, num_large * small.per_large)
        self._is_empty[first:stop] = bytes(num_large)
        self._num_empty_large -= num_large
        self._group[first:stop] = [g] * num_large
        self._owner[first:stop] = [owner] * num_large
        self._num_used[first:stop] = [small.per_large] * num_large
        small.num_large += num_large
        if taken < num_large * small.per_large:
            self._num_used[stop - 1] = taken - (num_large - 1) * small.per_large
            small.spacious.setdefault(owner, {})[stop - 1] = None
        small.states[start : start + taken] = bytes((USED,)) * taken
        small.holders[start : start + taken] = [1] * taken
        small.num_used += taken
        return range(start, start + taken)

    def _assign_one(self, small: SmallPages, g: int, large: int, owner: int, count: int) -> range:
        """As `_assign`, of one large page: what a decode step does all the time."""
        start = large * small.per_large
        self._is_empty[large] = 0
        self._num_empty_large -= 1
        self._group[large] = g
        self._owner[large] = owner
        self._num_used[large] = count
        small.num_large += 1
        if count < small.per_large:
            small.spacious.setdefault(owner, {})[large] = None
        for page in range(start, start + count):
            small.states[page] = USED
            small.holders[page] = 1
        small.num_used += count
        return range(start, start + count)

    def _fill(self, g: int, large: int, count: int) -> list[int]:
        """Takes `count` of the empty small pages of a large page, or all."""
        small = self._small[g]
        page, end = small.span(large)
        room = small.count(large, EMPTY)
        pages = []
        for _ in range(min(room, count)):
            page = small.states.find(EMPTY, page, end)
            small.states[page] = USED
            small.holders[page] = 1
            pages.append(page)
        if self._num_used[large] == 0:
            self._leave_idle(small, [large])
        self._num_used[large] += len(pages)
        small.num_used += len(pages)
        if len(pages) == room:
            self._leave_spacious(small, large)
        return pages

    def _evict_large(self, count: int) -> list[int]:
        """Empties the oldest evictable large pages, `count` of them or as many as there are."""
        evicted = self._oldest_large.pop(count)
        for first, stop in extents_of(sorted(evicted), self._group):
            g = self._group[first]
            small = self._small[g]
            start, end = first * small.per_large, stop * small.per_large
            states = small.states
            pages = [page for page in range(start, end) if states[page] == EVICTABLE]
            small.leave_line(pages)
            for page in pages:
                self._on_evict(g, page)
            states[start:end] = bytes(end - start)
            small.ages[start:end] = [NEVER] * (end - start)
            small.evictions += len(pages)
            self._unassign(small, first, stop)
        return evicted

    def _evict_small(self, g: int, count: int) -> list[int]:
        """Evicts, and uses, the oldest evictable small pages of group g whose large page has used ones."""
        small = self._small[g]
        evicted = small.oldest.pop(count)
        assert len(evicted) == count, "pages were promised that are not there"
        for page in evicted:
            self._on_evict(g, page)
            small.states[page] = USED
            small.ages[page] = NEVER
            small.holders[page] = 1
            self._num_used[page // small.per_large] += 1
        small.num_evictable -= count
        small.num_used += count
        small.evictions += count
        return evicted

    # ---- using them

    def share(self, g: int, pages: Sequence[int]) -> None:
        """One more holder for each of these pages, which are used or evictable."""
        small = self._small[g]
        states, holders, per_large = small.states, small.holders, small.per_large
        num_used = self._num_used
        revived = [page for page in pages if not holders[page]]
        for page in pages:
            holders[page] += 1
        were_idle = []
        for page in revived:
            assert states[page] == EVICTABLE, f"page {page} of group {g} is empty, or named twice, and cannot be shared"
            states[page] = KEPT
            large = page // per_large
            used = num_used[large]
            if not used:
                were_idle.append(large)
            num_used[large] = used + 1
        small.num_used += len(revived)
        small.leave_line(revived)
        self._leave_idle(small, were_idle)

    def release(self, g: int, pages: Sequence[int], last_access: int, prefix_lens: Sequence[int]) -> None:
        """One holder fewer for each. Pages without holders are evictable if they are kept, else empty.

        last_access: the step at which this holder last used them; a page keeps the latest of all its holders.
        prefix_lens: how long the prefix is that ends with each page, in one unit for all groups.
        """
        small = self._small[g]
        states, holders, ages, per_large = small.states, small.holders, small.ages, small.per_large
        num_used = self._num_used
        evictable, emptied, idle = [], [], []
        for page, prefix_len in zip(pages, prefix_lens, strict=True):
            left = holders[page] = holders[page] - 1
            last_use = ages[page][0]
            ages[page] = (last_access if last_access > last_use else last_use, -prefix_len)
            if left:
                assert left > 0, f"page {page} of group {g} was released too often"
                continue
            large = page // per_large
            if states[page] == KEPT:
                states[page] = EVICTABLE
                evictable.append(page)
            else:
                states[page] = EMPTY
                ages[page] = NEVER
                emptied.append(large)
            num_used[large] -= 1
            if not num_used[large]:
                idle.append(large)
        small.num_used -= len(evictable) + len(emptied)
        small.line_up(evictable)
        small.num_idle_large += len(idle)
        self._have_emptied(small, dict.fromkeys(emptied))
        self._become_idle(small, idle)

    def keep(self, g: int, page: int) -> None:
        """A used page's content is worth keeping when nobody uses it any more."""
        small = self._small[g]
        assert small.holders[page], f"page {page} of group {g} is not in use"
        small.states[page] = KEPT

    def forget(self, g: int, page: int) -> None:
        """A page's content is not worth keeping any more."""
        small = self._small[g]
        if small.states[page] == KEPT:
            small.states[page] = USED
        elif small.states[page] == EVICTABLE:
            small.leave_line([page])
            small.states[page] = EMPTY
            small.ages[page] = NEVER
            large = page // small.per_large
            if not self._num_used[large]:
                self._oldest_large.remove([large])
            self._have_emptied(small, [large])
            if not self._num_used[large]:
                self._become_idle(small, [large])

    def forget_owner(self, owner: int) -> None:
        """The owner has ended: what is empty in its large pages is nobody's."""
        self._live_owners.discard(owner)
        for small in self._small:
            spacious = small.spacious.pop(owner, None)
            if spacious:
                for large in spacious:
                    self._owner[large] = NOBODY
                small.spacious.setdefault(NOBODY, {}).update(spacious)

    # ---- large pages as their small ones change

    def _become_idle(self, small: SmallPages, larges: Sequence[int]) -> None:
        """Large pages of which no small page is used any more; those that are not empty can be evicted now."""
        ages, per_large = small.ages, small.per_large
        in_line = [large for large in larges if not self._is_empty[large]]
        for large in in_line:
            age = ages[large] if per_large == 1 else max(ages[large * per_large : (large + 1) * per_large])
            self._large_ages[large] = age
        self._oldest_large.add(in_line)

    def _leave_idle(self, small: SmallPages, larges: Sequence[int]) -> None:
        """Large pages that were evictable, and of which small pages are used now."""
        small.num_idle_large -= len(larges)
        self._oldest_large.remove(larges)

    def _have_emptied(self, small: SmallPages, larges: Iterable[int]) -> None:
        """Large pages of which small pages have become empty: their owners may use those; if all are, the pool may."""
        gone = []
        for large in larges:
            if self._num_used[large] == 0 and not small.count(large, EVICTABLE):
                gone.append(large)
                continue
            if self._owner[large] not in self._live_owners:
                self._owner[large] = NOBODY
            small.spacious.setdefault(self._owner[large], {})[large] = None
        for first, stop in extents_of(sorted(gone)):
            self._unassign(small, first, stop)

    def _unassign(self, small: SmallPages, first: int, stop: int) -> None:
        """Large pages [first, stop), idle until now and without content, go back to the pool."""
        if small.spacious:
            for large in range(first, stop):
                self._leave_spacious(small, large)
        count = stop - first
        self._is_empty[first:stop] = b"\1" * count
        self._num_empty_large += count
        self._lowest_empty = min(self._lowest_empty, first)
        small.num_large -= count
        small.num_idle_large -= count

    def _leave_spacious(self, small: SmallPages, large: int) -> None:
        owner = self._owner[large]
        spacious = small.spacious.get(owner)
        if spacious is not None and large in spacious:
            del spacious[large]
            if not spacious:
                del small.spacious[owner]

    # ---- what there is

    @property
    def free_large(self) -> int:
        return self._num_empty_large

    @property
    def evictable_large(self) -> int:
        return sum(small.num_idle_large for small in self._small)

    @property
    def used_large(self) -> int:
        return self.num_large - self.free_large - self.evictable_large

    def small_counts(self, g: int) -> tuple[int, int, int]:
        """How many small pages of the group's large pages are (empty, evictable, used)."""
        small = self._small[g]
        return small.num_empty, small.num_evictable, small.num_used

    @property
    def evictions(self) -> tuple[int, ...]:
        """By group, small pages whose content was given up for another's, since the start."""
        return tuple(small.evictions for small in self._small)

    @property
    def fragmentation_bytes(self) -> int:
        """Bytes of assigned large pages in which no content can be: empty small pages, and padding."""
        return self.stats().fragmentation_bytes

    def all_holders(self) -> dict[tuple[int, int], int]:
        """(group, page) of every used page, and how many hold it."""
        return {
            (g, page): holders
            for g, small in enumerate(self._small)
            for page, holders in enumerate(small.holders)
            if holders
        }

    def stats(self) -> PoolStats:
        return PoolStats(
            large_bytes=self.layout.large_bytes,
            empty_large=self.free_large,
            evictable_large=self.evictable_large,
            used_large=self.used_large,
            groups=tuple(small.stats(self.layout, g) for g, small in enumerate(self._small)),
        )

    def check_integrity(self) -> None:
        """Walks every page. What is counted is counted again; every page is where it will be found."""
        assert self._num_empty_large == sum(self._is_empty)
        assert self._is_empty.find(1, 0, self._lowest_empty) < 0, "an empty large page would not be found"
        for g, small in enumerate(self._small):
            in_use = (large for large in range(self.num_large) if not self._is_empty[large])
            small.check_integrity()
            self._check_group(small, [large for large in in_use if self._group[large] == g])
        idle = {large for large in range(self.num_large) if not self._is_empty[large] and not self._num_used[large]}
        assert len(idle) == self.evictable_large
        assert self._oldest_large.pages() == idle
        for large in idle:
            small = self._small[self._group[large]]
            start, end = small.span(large)
            assert self._large_ages[large] == max(small.ages[start:end]), f"large page {large}"

    def _check_group(self, small: SmallPages, assigned: list[int]) -> None:
        counts = [0, 0, 0, 0]
        spacious = set()
        for large in assigned:
            start, end = small.span(large)
            states = small.states[start:end]
            counts = [count + states.count(state) for state, count in enumerate(counts)]
            assert self._num_used[large] == states.count(USED) + states.count(KEPT), f"large page {large}"
            assert states.count(EMPTY) < small.per_large, f"large page {large} is empty and not in the pool"
            if EMPTY in states:
                spacious.add((self._owner[large], large))
        assert small.num_large == len(assigned)
        assert small.num_idle_large == sum(self._num_used[large] == 0 for large in assigned)
        assert small.num_used == counts[USED] + counts[KEPT]
        assert small.num_evictable == counts[EVICTABLE]
        assert spacious == {(owner, large) for owner, found in small.spacious.items() for large in found}
        assert all(small.spacious.values())
