"""The pages of one sequence in a group whose layers attend to the last tokens only. As of full attention, but it lets go.

    page number  0   1   2   3   4   5   6                      runs up to here have reported ──┐
                 ·   ·  [left left] [in the window        ] [not written yet]                    n
                 gone    └ own pages that `grow` writes again, and caches then, while a quota holds them

So that `grow` cannot fail, `reserve` sets a quota of pages aside for good; nobody can share a page that will have to be
written again, so they enter the cache only when they are let go, or when the prompt has been computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from disagg.memory.eviction import passed
from disagg.memory.full_pages import FullPages
from disagg.memory.groups import GroupSpec
from disagg.memory.kinds import Arrival, Peak
from disagg.memory.spans import pages_for, window_first, window_pages, window_start

if TYPE_CHECKING:
    from disagg.memory.kv_memory import KvMemory


class WindowPages(FullPages):
    """Positions before `first` are gone."""

    def __init__(self, memory: KvMemory, g: int) -> None:
        super().__init__(memory, g)
        self._window_tokens = memory.layout.groups[g].window_tokens
        self._own_from = 0  # the page number after the hit's
        self._quota = 0  # own pages that are held for good, and known to nobody else, so that `grow` cannot fail
        self._beyond = 0  # what `KvMemory.beyond_quotas` has of it
        self._left: deque[tuple[int, int]] = deque()  # (page number, step) of those that are out of the window
        self._hold_from: int | None = None  # page numbers that stay until the end
        self._branches: tuple[int, ...] = ()  # see `SequencePages.branch_at`
        self._tail_tokens = 0

    @staticmethod
    def large_pages(group: GroupSpec, peak: Peak, page_tokens: int, per_large: int) -> int:
        held = window_pages(group.window_tokens, peak.late_tokens, page_tokens)
        shared = peak.shared_tokens // page_tokens
        each = min(pages_for(peak.total_tokens, page_tokens) - shared, held)
        # What is held moves on, and then begins and ends within a large page.
        return pages_for(min(min(shared, held) + each * peak.choices, held * peak.choices), per_large) + 1

    # ---- how a sequence begins

    def pin_hit(self, hashes: Sequence[bytes], hit_tokens: int) -> None:
        first = window_first(hit_tokens, self._window_tokens, self._page_tokens)
        self._begin(hashes, first, hit_tokens // self._page_tokens)

    def _begin(self, hashes: Sequence[bytes], first: int, stop: int) -> None:
        super()._begin(hashes, first, stop)
        self._own_from = stop

    def reserve(self, num_tokens: int, chunk_tokens: int) -> int:
        pages = pages_for(num_tokens, self._page_tokens) - len(self.table)
        common = self._memory.common_late_pages[self._g]
        late_tokens = 0 if common else self._memory.late_runs * chunk_tokens
        self._quota = window_pages(self._window_tokens, late_tokens, self._page_tokens)
        if common:
            self._beyond = max(0, pages - self._quota)
            self._memory.beyond_quotas[self._g] += self._beyond
        return max(0, min(pages, self._quota))

    def await_landing(self, hashes: Sequence[bytes], arrival: Arrival) -> tuple[int, int]:
        start = window_start(arrival.num_tokens, self._window_tokens, self._page_tokens) // self._page_tokens
        if arrival.moved:
            start = window_first(arrival.num_tokens, self._window_tokens, self._page_tokens)
        held = window_pages(self._window_tokens, self._memory.late_runs, self._page_tokens)
        extra = min(arrival.extra_pages(self._page_tokens), arrival.choices * held)
        return self._await(hashes, arrival, start, extra)

    def hold_for_sending(self, num_tokens: int) -> None:
        """The last window."""
        self._hold_from = window_start(num_tokens, self._window_tokens, self._page_tokens) // self._page_tokens

    def branch_at(self, lengths: tuple[int, ...], tail_tokens: int) -> None:
        self._branches, self._tail_tokens = lengths, tail_tokens

    # ---- while it runs

    def soon(self, start: int, stop: int) -> int:
        """None once something has left the window: from then on a page leaves for each that comes, and those that were taken
        before that would be one more of each sequence, for which others gave way without end."""
        return 0 if self.first or self._left else super().soon(start, stop)

    @property
    def recyclable(self) -> int:
        return len(self._left)

    def recycle(self, count: int) -> list[int]:
        """The first pages that left the window, which are in no cache yet."""
        page_nos = [self._left.popleft()[0] for _ in range(count)]
        if page_nos:
            self.first = page_nos[-1] + 1
        return [self.table[page_no] for page_no in page_nos]

    def advance(self, num_tokens: int, hashes: Sequence[bytes], step: int) -> int:
        full = num_tokens // self._page_tokens
        if hashes and full > self._published and not self._quota:
            self._publish(full, hashes)
        self._leave(num_tokens, hashes, step)
        return (full + 1) * self._page_tokens

    def _leave(self, num_tokens: int, hashes: Sequence[bytes], step: int) -> None:
        """What the window has left is let go, but for what a quota or a transfer holds."""
        gone = window_first(num_tokens, self._window_tokens, self._page_tokens)
        left, own_from = self._left, self._own_from
        first = left[-1][0] + 1 if left else self.first
        if gone <= first and not left:
            return
        if self._hold_from is not None:
            gone = min(gone, self._hold_from)
        if first < own_from and first < gone:
            stop = min(gone, own_from)
            self._let_go(stop, step)
            first = stop
        left.extend((page_no, step) for page_no in range(first, gone))
        held = self._own if self._quota else len(left)
        count = min(held - self._quota, len(left))
        if count <= 0:
            return
        if self._quota:
            self._publish(left[count - 1][0] + 1, hashes)  # it was kept back
        stop, age = self.first, 0
        for _ in range(count):
            page_no, left_at = left.popleft()
            before, age = age, left_at if self._is_branch(page_no) else passed(left_at)
            if age != before and page_no > stop:
                self._let_go(page_no, before)
                stop = page_no
        self._let_go(page_no + 1, age)

    def _is_branch(self, page_no: int) -> bool:
        """A prefix at which prompts part needs this page."""
        if not self._branches:
            return True
        page_tokens, window_tokens = self._page_tokens, self._window_tokens
        first, stop = page_no * page_tokens, (page_no + 1) * page_tokens
        if first < self._branches[-1] and stop > self._branches[-1] - window_tokens - self._tail_tokens:
            return True
        return any(first < length and stop > length - window_tokens for length in self._branches)

    def _let_go(self, stop: int, last_access: int) -> None:
        """Of page numbers before `stop`."""
        first = self.first
        self._memory.release(self._g, self.table[first:stop], last_access, range(first + 1, stop + 1))
        self.first = stop

    @property
    def _own(self) -> int:
        """Pages that it has for itself: in its table, and set aside."""
        return len(self.table) - max(self.first, self._own_from) + len(self.spare)

    @property
    def beyond_quota(self) -> int:
        return max(0, self._own - self._quota) if self._quota else 0

    def end_prefill(self, num_tokens: int, hashes: Sequence[bytes], step: int, goes_on: bool) -> None:
        self._drop_quota()
        self._publish(num_tokens // self._page_tokens, hashes)
        self._leave(num_tokens, hashes, step)
        super().end_prefill(num_tokens, hashes, step, goes_on)

    def _drop_quota(self) -> None:
        self._memory.beyond_quotas[self._g] -= self._beyond
        self._quota = self._beyond = 0

    # ---- what goes on, the end

    def fork(self, *, partial: bool) -> tuple[FullPages, tuple[int, int] | None]:
        other, copy = super().fork(partial=partial)
        other.branch_at(self._branches, self._tail_tokens)
        return other, copy

    def close(self, num_tokens: int, step: int) -> None:
        self._drop_quota()
        for page_no, left_at in self._left:
            self._let_go(page_no + 1, left_at)
        self._left.clear()
        super().close(num_tokens, step)
