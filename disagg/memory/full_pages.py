"""The pages of one sequence in a group that keeps every token. What the protocol's methods do: `memory/kinds`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from disagg.memory.groups import GroupSpec
from disagg.memory.kinds import Arrival, KindPages, Peak
from disagg.memory.spans import pages_for
from disagg.messages.layout import GroupPages

if TYPE_CHECKING:
    from disagg.memory.kv_memory import KvMemory


class FullPages:
    """Of a group in which every token is kept."""

    def __init__(self, memory: KvMemory, g: int) -> None:
        self.table: list[int] = []
        self.first = 0
        self.spare: list[int] = []
        self._memory = memory
        self._g = g
        self._page_tokens = memory.layout.page_tokens
        self._published = 0  # pages that were offered to the cache, or came from it

    @staticmethod
    def large_pages(group: GroupSpec, peak: Peak, page_tokens: int, per_large: int) -> int:
        shared = peak.shared_tokens // page_tokens
        each = pages_for(peak.total_tokens, page_tokens) - shared
        return pages_for(shared + each * peak.choices, per_large)

    # ---- how a sequence begins

    def pin_hit(self, hashes: Sequence[bytes], hit_tokens: int) -> None:
        self._begin(hashes, 0, hit_tokens // self._page_tokens)

    def _begin(self, hashes: Sequence[bytes], first: int, stop: int) -> None:
        """The table begins with the cached pages of numbers [first, stop)."""
        self.table += [0] * first
        self.first = first
        self._published = stop
        self.table += self._memory.pin(self._g, hashes, first, stop)

    def reserve(self, num_tokens: int, chunk_tokens: int) -> int:
        return max(0, pages_for(num_tokens, self._page_tokens) - len(self.table))

    def await_landing(self, hashes: Sequence[bytes], arrival: Arrival) -> tuple[int, int]:
        extra = arrival.extra_pages(self._page_tokens)
        return self._await(hashes, arrival, 0, extra)

    def _await(self, hashes: Sequence[bytes], arrival: Arrival, start: int, extra: int) -> tuple[int, int]:
        """start: the first page number that has to be held; extra: pages beside those for what lands."""
        page_tokens, num_tokens = self._page_tokens, arrival.num_tokens
        hit = start
        if arrival.reuse:
            full_tokens = num_tokens // page_tokens * page_tokens
            cache = self._memory.cache
            hit = cache.receivable(self._g, hashes, start * page_tokens, full_tokens) // page_tokens
        self._begin(hashes, start, hit)
        return min(hit * page_tokens, num_tokens), pages_for(num_tokens, page_tokens) - hit + extra

    def take_landing(self, arrival: Arrival, pages: list[int]) -> None:
        count = pages_for(arrival.num_tokens, self._page_tokens) - len(self.table)
        self.table += pages[:count]
        self.spare = pages[count:]

    def lacks_checkpoint(self, hashes: Sequence[bytes], num_tokens: int) -> bool:
        return False

    def hold_for_sending(self, num_tokens: int) -> None:
        pass  # all of it is kept anyway

    def branch_at(self, lengths: tuple[int, ...], tail_tokens: int) -> None:
        pass  # wherever prompts part, all of it is of use

    # ---- while it runs

    def needs(self, start: int, stop: int) -> int:
        count = -(-stop // self._page_tokens) - len(self.table)  # what a decode step asks all the time
        return count if count > 0 else 0

    def soon(self, start: int, stop: int) -> int:
        return max(0, self.needs(start, stop) - len(self.spare))

    def wishes(self, start: int) -> int:
        return 0

    def grow(self, start: int, pages: list[int]) -> int:
        self.table += pages
        return len(self.table) * self._page_tokens

    @property
    def recyclable(self) -> int:
        return 0

    def recycle(self, count: int) -> list[int]:
        assert not count
        return []

    def advance(self, num_tokens: int, hashes: Sequence[bytes], step: int) -> int:
        full = num_tokens // self._page_tokens
        if hashes and full > self._published:
            self._publish(full, hashes)
        return (full + 1) * self._page_tokens

    def _publish(self, stop: int, hashes: Sequence[bytes]) -> None:
        """Offer the pages of numbers before `stop`, which are full, to the cache."""
        memory, first = self._memory, self._published
        if stop > len(hashes):
            stop = len(hashes)
        if stop > first and memory.caching:
            if first < self.first:
                first = self.first
            g, table, insert, keep = self._g, self.table, memory.cache.insert, memory.allocator.keep
            for page_no in range(first, stop):
                if insert(g, hashes[page_no], table[page_no]):
                    keep(g, table[page_no])
            self._published = stop

    def end_prefill(self, num_tokens: int, hashes: Sequence[bytes], step: int, goes_on: bool) -> None:
        if not goes_on:
            self._drop_spare(step)

    def seal(self, num_tokens: int, hashes: Sequence[bytes]) -> None:
        pass  # nothing is written twice

    # ---- what landed, what goes on, the end

    def landed_partly(self, num_tokens: int, hashes: Sequence[bytes], ranges: Sequence[tuple[int, int]]) -> None:
        for first, stop in ranges:
            for page_no in range(first, min(stop, num_tokens // self._page_tokens)):
                self._memory.keep(self._g, hashes[page_no], self.table[page_no])

    def take_checkpoint(self, full_pages: int, hashes: Sequence[bytes], landed: bool, step: int) -> None:
        pass

    def fork(self, *, partial: bool) -> tuple[FullPages, tuple[int, int] | None]:
        other = type(self)(self._memory, self._g)
        other.first, other._published = self.first, self._published
        shared = len(self.table) - partial
        self._memory.allocator.share(self._g, self.table[self.first : shared])
        other.table = self.table[:shared]
        if shared == len(self.table):
            return other, None
        other.table.append(self.spare.pop())
        return other, (self.table[-1], other.table[-1])

    def share_out(self, forks: Sequence[KindPages]) -> None:
        spare = self.spare
        for index, other in enumerate(forks):
            other.spare = spare[index :: len(forks)]

    def close(self, num_tokens: int, step: int) -> None:
        self._release(self.first, len(self.table), step)
        self._drop_spare(step)
        self.table.clear()
        self.first = 0

    def _drop_spare(self, step: int) -> None:
        self._memory.release(self._g, self.spare, step, [0] * len(self.spare))
        self.spare.clear()

    def _release(self, first: int, stop: int, last_access: int) -> None:
        """Positions [first, stop)."""
        self._memory.release(self._g, self.table[first:stop], last_access, range(first + 1, stop + 1))

    # ---- what others need to know of it

    def to_run(self) -> GroupPages:
        return GroupPages(self.first, tuple(self.table[self.first :]))

    def to_land(self, num_tokens: int, want: int) -> GroupPages:
        first = want // self._page_tokens
        return GroupPages(first, tuple(self.table[first : pages_for(num_tokens, self._page_tokens)]))

    def pages(self, first: int, stop: int) -> tuple[int, ...]:
        assert first >= self.first, f"page number {first} of group {self._g} has left the window"
        return tuple(self.table[first:stop])

    def held(self) -> Iterator[int]:
        yield from self.table[self.first :]
        yield from self.spare

    @property
    def beyond_quota(self) -> int:
        return 0
