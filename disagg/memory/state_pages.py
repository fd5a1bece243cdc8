"""The states of one sequence in a group of recurrent layers. A page holds one state, whatever the number of tokens.

    table    [s0] [s512] [s1024, written in place by every run ...]
              │     └ superseded: the run that reads it has not reported yet
              └ let go; in the cache, if it was a checkpoint

A state that must stay as it is (a checkpoint in the cache, one that several sequences share) is *frozen*: the next run
reads it and writes another page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from disagg.memory.eviction import passed
from disagg.memory.groups import GroupSpec
from disagg.memory.kinds import Arrival, KindPages, Peak
from disagg.memory.spans import MAX_TOKENS, last_checkpoint, pages_for
from disagg.messages.layout import GroupPages

if TYPE_CHECKING:
    from disagg.memory.kv_memory import KvMemory


class StatePages:
    """The newest state is the last of the table."""

    def __init__(self, memory: KvMemory, g: int) -> None:
        self.table: list[int] = []
        self.first = 0
        self.spare: list[int] = []
        self.checkpoint: int | None = None  # the page of the last checkpoint, for a transfer
        self._memory = memory
        self._g = g
        self._page_tokens = memory.layout.page_tokens
        self._every = memory.layout.checkpoint_tokens
        self._frozen = False  # the newest is not to be written over
        # (tokens, page number) of a state that was the newest after so many tokens, until the run that reads it has reported.
        self._superseded: deque[tuple[int, int]] = deque()
        self._hold_checkpoint = -1
        self._branches: tuple[int, ...] = ()  # see `SequencePages.branch_at`

    @staticmethod
    def large_pages(group: GroupSpec, peak: Peak, page_tokens: int, per_large: int) -> int:
        return pages_for(2 + 2 * peak.choices, per_large)  # the shared one and a checkpoint; to read and to write

    # ---- how a sequence begins

    def pin_hit(self, hashes: Sequence[bytes], hit_tokens: int) -> None:
        """The checkpoint at its end."""
        stop = hit_tokens // self._page_tokens
        if stop:
            self.table += self._memory.pin(self._g, hashes, stop - 1, stop)
        self._frozen = bool(stop)

    def reserve(self, num_tokens: int, chunk_tokens: int) -> int:
        return 1

    def to_go_on(self, prompt_tokens: int) -> int:
        """Beside `reserve`, so that more tokens can follow a prompt of so many: its state is not written over if it is a
        checkpoint."""
        return int(prompt_tokens % self._every == 0 and self._memory.caching)

    def await_landing(self, hashes: Sequence[bytes], arrival: Arrival) -> tuple[int, int]:
        to_write = arrival.choices if arrival.choices > 1 else 0
        return 0, 1 + arrival.checkpoint + to_write

    def take_landing(self, arrival: Arrival, pages: list[int]) -> None:
        self.table.append(pages.pop())
        if arrival.checkpoint:
            self.checkpoint = pages.pop()
        self.spare = pages

    def lacks_checkpoint(self, hashes: Sequence[bytes], num_tokens: int) -> bool:
        page_no = last_checkpoint(num_tokens, self._every) // self._page_tokens
        if not page_no or not self._memory.caching:
            return False
        return not self._memory.cache.pages(self._g, hashes, page_no - 1, page_no)

    def hold_for_sending(self, num_tokens: int) -> None:
        """The last checkpoint."""
        self._hold_checkpoint = last_checkpoint(num_tokens, self._every)

    def branch_at(self, lengths: tuple[int, ...], tail_tokens: int) -> None:
        self._branches = lengths

    # ---- while it runs

    def needs(self, start: int, stop: int) -> int:
        return int(self._frozen or start == 0)

    def soon(self, start: int, stop: int) -> int:
        return 0  # it can write in place

    def wishes(self, start: int) -> int:
        """At a checkpoint, a page for the run, so that the state stays as it is and can be cached."""
        return int(not self._frozen and start > 0 and start % self._every == 0 and self._memory.caching)

    def grow(self, start: int, pages: list[int]) -> int:
        """The run writes a new state, if there is a page for it; the one that it reads stays as it is. It may end on a
        checkpoint, not cross it."""
        if pages:
            self._frozen = False
            if start:
                self._supersede(start)
            self.table += pages
        return (start // self._every + 1) * self._every

    def _supersede(self, start: int) -> None:
        self._superseded.append((start, len(self.table) - 1))
        if start == self._hold_checkpoint:
            self.checkpoint = self.table[-1]
            self._memory.allocator.share(self._g, [self.checkpoint])

    @property
    def recyclable(self) -> int:
        return 0

    def recycle(self, count: int) -> list[int]:
        assert not count
        return []

    def advance(self, num_tokens: int, hashes: Sequence[bytes], step: int) -> int:
        """Lets go of states that a reported run has read and replaced; those on a checkpoint enter the cache first."""
        while self._superseded and self._superseded[0][0] < num_tokens:
            tokens, page_no = self._superseded.popleft()
            self._keep(tokens, page_no, hashes)
            age = step if not self._branches or self._is_branch(tokens) else passed(step)
            pages = self.table[self.first : page_no + 1]
            self._memory.release(self._g, pages, age, [tokens // self._page_tokens] * len(pages))
            self.first = page_no + 1
        return self.due

    @property
    def due(self) -> int:
        """From how many tokens on `advance` has something to do."""
        return self._superseded[0][0] + 1 if self._superseded else MAX_TOKENS

    def _is_branch(self, tokens: int) -> bool:
        """The state after so many tokens is the last checkpoint before a length at which prompts part."""
        every = self._every
        return any(tokens in (last_checkpoint(length, every), length // every * every) for length in self._branches)

    def _keep(self, tokens: int, page_no: int, hashes: Sequence[bytes]) -> None:
        full = tokens // self._page_tokens
        if tokens % self._every == 0 and full <= len(hashes):
            self._memory.keep(self._g, hashes[full - 1], self.table[page_no])

    def end_prefill(self, num_tokens: int, hashes: Sequence[bytes], step: int, goes_on: bool) -> None:
        if not goes_on:
            self._drop_spare(step)

    def seal(self, num_tokens: int, hashes: Sequence[bytes]) -> None:
        if num_tokens and num_tokens % self._every == 0:
            self._keep(num_tokens, len(self.table) - 1, hashes)
            self._frozen = self._frozen or self._memory.caching

    # ---- what landed, what goes on, the end

    def landed_partly(self, num_tokens: int, hashes: Sequence[bytes], ranges: Sequence[tuple[int, int]]) -> None:
        pass  # a checkpoint is taken by itself: no rank writes into it any more then

    def take_checkpoint(self, full_pages: int, hashes: Sequence[bytes], landed: bool, step: int) -> None:
        if self.checkpoint is None:
            return
        if landed:
            self._memory.keep(self._g, hashes[full_pages - 1], self.checkpoint)
        self._drop_checkpoint(step, full_pages)

    def _drop_checkpoint(self, step: int, full_pages: int) -> None:
        if self.checkpoint is not None:
            self._memory.release(self._g, [self.checkpoint], step, [full_pages])
            self.checkpoint = None

    def fork(self, *, partial: bool) -> tuple[StatePages, tuple[int, int] | None]:
        other = StatePages(self._memory, self._g)
        other.first, other._branches = self.first, self._branches
        self._memory.allocator.share(self._g, self.table[self.first :])
        other.table = self.table[:]
        other._frozen = True
        return other, None

    def share_out(self, forks: Sequence[KindPages]) -> None:
        self._frozen = True
        spare = self.spare
        for index, other in enumerate(forks):
            other.spare = spare[index :: len(forks)]

    def close(self, num_tokens: int, step: int) -> None:
        pages = self.table[self.first :]
        self._memory.release(self._g, pages, step, [num_tokens // self._page_tokens] * len(pages))
        self._drop_spare(step)
        self._drop_checkpoint(step, max(0, self._hold_checkpoint) // self._page_tokens)
        self.table.clear()
        self._superseded.clear()
        self.first = 0

    def _drop_spare(self, step: int) -> None:
        self._memory.release(self._g, self.spare, step, [0] * len(self.spare))
        self.spare.clear()

    # ---- what others need to know of it

    def to_run(self) -> GroupPages:
        return GroupPages(0, tuple(self.table[-1:]))

    def to_land(self, num_tokens: int, want: int) -> GroupPages:
        """The state after the last token, then (if there is one) the last checkpoint."""
        return GroupPages(0, (self.table[0], *self._checkpoints()))

    def pages(self, first: int, stop: int) -> tuple[int, ...]:
        states = (self.table[-1], *self._checkpoints())
        assert stop <= len(states), f"the last checkpoint of group {self._g} is not kept"
        return states[first:stop]

    def _checkpoints(self) -> tuple[int, ...]:
        return () if self.checkpoint is None else (self.checkpoint,)

    def held(self) -> Iterator[int]:
        yield from self.table[self.first :]
        yield from self.spare
        yield from self._checkpoints()

    @property
    def beyond_quota(self) -> int:
        return 0
