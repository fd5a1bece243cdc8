"""The pages of one sequence in every layer group. `memory/kv_memory` makes them.

    SequencePages ── grow ──> new pages         before a run, for the tokens that it will write
                  ── advance                    after it: full pages enter the prefix cache, what left a window is let go
                  ── fork ──> SequencePages     choices share full pages; a partial last one is copied
                  ── close                      every page is let go, exactly once

What a sequence holds of a group, after n tokens (page_tokens = 4, a window of 5 tokens before the new one):

    full     [p0][p1][p2][p3]                     every page
    window    ·   · [p2][p3]    n = 15            pages that overlap [n - 5, n); those before are gone
    state    [s]                                  the state after n tokens; it is written in place, except after a
                                                  checkpoint: that page stays as it is, and the next run writes another

Knows tokens, pages and a logical clock (`step`, which engines count); nothing of requests, plans or tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from disagg.memory.extents import num_extents
from disagg.memory.kinds import Arrival, KindPages
from disagg.memory.pages_of import pages_of
from disagg.memory.spans import MAX_TOKENS, last_checkpoint, pages_for
from disagg.memory.state_pages import StatePages
from disagg.memory.window_pages import WindowPages
from disagg.messages.layout import GroupKind, GroupPages
from disagg.messages.plan import PageCopy
from disagg.types.arithmetic import ceil_div

if TYPE_CHECKING:
    from disagg.memory.kv_memory import KvMemory


class SequencePages:
    """The pages of one sequence in every layer group. Made by `KvMemory`; see the module.

    computed: tokens whose KV or state is final in the pages. grown_tokens: those for which `grow` has nothing to do. wants: of a
    sequence that receives, per group, the first position to be sent (see messages/link.Grant).
    """

    def __init__(self, memory: KvMemory) -> None:
        self.computed = 0
        self.wants: tuple[int, ...] = ()
        self._memory = memory
        self._allocator = memory.allocator
        self._owner = memory.new_owner()
        layout = memory.layout
        self._page_tokens = layout.page_tokens
        self._checkpoint_tokens = layout.checkpoint_tokens
        self._use([pages_of(group)(memory, g) for g, group in enumerate(layout.groups)])
        # From these tokens on `grow` and `advance` have something to do: for most steps there is nothing.
        self.grown_tokens = self._due = 0

    def _use(self, kinds: Sequence[KindPages]) -> None:
        """One for each group."""
        self._kinds = tuple(kinds)
        self._states = tuple(kind for kind in kinds if isinstance(kind, StatePages))
        self._paged = tuple(kind for kind in kinds if not isinstance(kind, StatePages))
        self._state_groups = tuple(g for g, kind in enumerate(kinds) if isinstance(kind, StatePages))
        self._full = tuple(g for g, kind in enumerate(kinds) if not isinstance(kind, StatePages | WindowPages))

    # ---- how a sequence begins

    def pin_hit(self, hashes: Sequence[bytes], hit_tokens: int) -> None:
        """Hold the pages of a prefix that `KvMemory.lookup` found."""
        for kind in self._kinds:
            kind.pin_hit(hashes, hit_tokens)
        self.computed = hit_tokens

    def branch_at(self, *lengths: int, tail_tokens: int = 0) -> None:
        """Prompts are known to go on differently after so many tokens, of which the last is where this one ends.

        So what windows and states need for a prefix of that length is cached like everything else. What else they leave
        behind while a sequence runs is of use only to a prompt that happens to part from this one just there, and goes
        first when pages are evicted. tail_tokens: a window for a prefix that is up to so much shorter than the prompt is
        kept, too, since its last part is what most likely differs in the next one: a question, say.
        Models without full attention do not know where prompts part, and keep everything alike.
        """
        if any(group.kind is GroupKind.FULL for group in self._memory.layout.groups):
            for kind in self._kinds:
                kind.branch_at(lengths, tail_tokens)

    def hold_for_sending(self, num_tokens: int) -> None:
        """Keep, until the end, what a transfer of num_tokens tokens may need: the last window, and the last checkpoint."""
        for kind in self._kinds:
            kind.hold_for_sending(num_tokens)

    def reserve(self, num_tokens: int, chunk_tokens: int, prompt_tokens: int) -> bool:
        """Pages with which `num_tokens` tokens can be computed in chunks, all or nothing; afterwards `grow` cannot fail.
        prompt_tokens: what of them is a prompt, which is whole before the rest follows."""
        needs = [kind.reserve(num_tokens, chunk_tokens) for kind in self._kinds]
        if num_tokens > prompt_tokens:
            for g, state in zip(self._state_groups, self._states, strict=True):
                needs[g] += state.to_go_on(prompt_tokens)
        return self._take_spare(needs) and self._memory.can_go_on()

    def reserve_partly(self, num_tokens: int, chunk_tokens: int, spare_large: int) -> bool:
        """As `reserve`, with pages of full attention for as many of the tokens only as so many large pages allow, at least a
        page more than are computed. `grow` cannot fail up to `room_tokens`."""
        needs = [kind.reserve(num_tokens, chunk_tokens) for kind in self._kinds]
        layout = self._memory.layout
        others = sum(ceil_div(needs[g], layout.per_large[g]) for g in range(len(needs)) if g not in self._full)
        return self._take_full(needs, num_tokens, spare_large - others) and self._memory.can_go_on()

    def extend(self, num_tokens: int, spare_large: int) -> bool:
        """Of a sequence that began with part of its pages: more of them, for at most num_tokens tokens in all and so many
        large pages. Whether it got any."""
        return self._take_full([0] * len(self._kinds), num_tokens, spare_large)

    def _take_full(self, needs: list[int], num_tokens: int, spare_large: int) -> bool:
        """Set aside `needs`, but of groups of full attention what so many large pages hold. All or nothing."""
        per_large = self._memory.layout.per_large
        pages = int(spare_large / sum(1 / per_large[g] for g in self._full)) if self._full else 0
        room = min(pages_for(num_tokens, self._page_tokens), self.room_tokens // self._page_tokens + pages)
        for g in self._full:
            needs[g] = max(0, room - len(self._kinds[g].table) - len(self._kinds[g].spare))
        of_full = [count if g in self._full else 0 for g, count in enumerate(needs)]
        if not any(of_full) or not self._memory.can_go_on(of_full):
            return False
        return self._take_spare(needs)

    def _take_spare(self, needs: Sequence[int]) -> bool:
        """Set aside so many pages of each group. All or nothing."""
        taken = self._allocator.allocate_all(needs, self._owner)
        if taken is None:
            return False
        for kind, more in zip(self._kinds, taken, strict=True):
            kind.spare += more
        return True

    def reserve_landing(
        self,
        hashes: Sequence[bytes],
        num_tokens: int,
        spare_tokens: int,
        choices: int,
        *,
        reuse: bool,
        moved: bool = False,
    ) -> bool:
        """See `KvMemory.receive`. Sets `wants`. reuse: begin with what is cached."""
        checkpoint = any(kind.lacks_checkpoint(hashes, num_tokens) for kind in self._kinds)
        arrival = Arrival(num_tokens, spare_tokens, choices, reuse, checkpoint, moved)
        wants, needs = zip(*(kind.await_landing(hashes, arrival) for kind in self._kinds), strict=True)
        taken = self._allocator.allocate_all(needs, self._owner)
        if taken is None:
            return False
        for kind, pages in zip(self._kinds, taken, strict=True):
            kind.take_landing(arrival, pages)
        self.wants = wants
        return True

    # ---- what others need to know of it

    def tables(self) -> tuple[GroupPages, ...]:
        """What a worker has to know before the first run: the pages that hold something, from the first one needed."""
        return tuple(kind.to_run() for kind in self._kinds)

    def landing(self, num_tokens: int) -> tuple[GroupPages, ...]:
        """Pages into which num_tokens tokens will land, from the first wanted position on.

        In state groups, as pieces count: the state after the last token, then (if there is one) the last checkpoint.
        """
        return tuple(kind.to_land(num_tokens, want) for kind, want in zip(self._kinds, self.wants, strict=True))

    def pages(self, g: int, first: int, stop: int) -> tuple[int, ...]:
        """Pages of positions [first, stop) of a group, as pieces count them; all of them are held."""
        return self._kinds[g].pages(first, stop)

    @property
    def hit_tokens(self) -> int:
        """Tokens that need not be sent, in any attention group, of a sequence that receives."""
        return min((self.wants[g] for g in self._full), default=0)

    @property
    def has_checkpoint(self) -> bool:
        """The state of the checkpoint that `hold_for_sending` asked for is kept."""
        return bool(self._states) and all(kind.checkpoint is not None for kind in self._states)

    @property
    def room_tokens(self) -> int:
        """Tokens for which it has pages in every group of full attention, those that it has included; no limit without such
        a group."""
        full = (self._kinds[g] for g in self._full)
        pages = min((len(kind.table) + len(kind.spare) for kind in full), default=1 << 31)
        return pages * self._page_tokens

    def own_pages(self, shared_tokens: int) -> int:
        """Of each group of tokens it lets go of so many pages at least, if others hold those of its first shared_tokens, too."""
        shared = shared_tokens // self._page_tokens
        own = (len(kind.table) - max(kind.first, shared) + len(kind.spare) for kind in self._paged)
        return min(own, default=0)

    def extent_pages(self) -> float:
        """Mean length of the extents that attention would read; 0 without such pages."""
        tables = [[*kind.table[kind.first :], *kind.spare] for kind in self._paged]
        pages = sum(map(len, tables))
        return pages / sum(map(num_extents, tables)) if pages else 0.0

    def beyond_quota(self) -> list[int]:
        """Own pages of each group that are held beyond a quota, now."""
        return [kind.beyond_quota for kind in self._kinds]

    def held(self) -> Iterable[tuple[int, int]]:
        """(group, page), once for each time that this sequence holds it."""
        return chain.from_iterable(((g, page) for page in kind.held()) for g, kind in enumerate(self._kinds))

    # ---- while it runs

    def grow(self, start: int, stop: int) -> tuple[tuple[int, ...], ...] | None:
        """Pages for a run of tokens [start, stop): those newly appended to each group's table, or () for none at all.

        None: there is no memory for it now, and nothing has changed. A run may end on a checkpoint, not cross it.
        """
        if stop <= self.grown_tokens:
            return ()
        kinds = self._kinds
        needs = [kind.needs(start, stop) for kind in kinds]
        taken = self._take_wishes(start, needs) if self._states else None
        if taken is None:
            taken = self._take(needs)
            if taken is None:
                return None
        room = MAX_TOKENS
        for kind, pages in zip(kinds, taken, strict=True):
            enough = kind.grow(start, pages)
            if enough < room:
                room = enough
        assert stop <= room, f"a run of tokens {start} to {stop} crosses a checkpoint"
        self.grown_tokens = room
        if self._states:
            self._due = min(self._due, *(state.due for state in self._states))
        return tuple(map(tuple, taken)) if any(taken) else ()

    def set_aside(self, start: int, stop: int) -> bool:
        """Take what a later run of tokens [start, stop) needs. Whether it has it; if not, nothing has changed."""
        needs = [kind.soon(start, stop) for kind in self._kinds]
        return not any(needs) or self._take_spare(needs)

    def _take_wishes(self, start: int, needs: list[int]) -> list[list[int]] | None:
        """As `_take`, with what is only of use beside what is needed; None: there is nothing, or no memory for it."""
        wishes = [kind.wishes(start) for kind in self._kinds]
        if not any(wishes) or not self._memory.can_go_on(wishes):
            return None
        taken = self._take(needs)
        if taken is None:
            return None
        # What is set aside is for what is needed, so wishes take nothing of it.
        more = self._allocator.allocate_all(wishes, self._owner) or [[] for _ in wishes]
        return [pages + wished for pages, wished in zip(taken, more, strict=True)]

    def _take(self, needs: list[int]) -> list[list[int]] | None:
        """Spare pages, then the allocator's, then those of our own that left a window. All or nothing."""
        kinds = self._kinds
        for kind in kinds:
            if kind.spare:
                break
        else:
            allocated = self._allocator.allocate_all(needs, self._owner)
            if allocated is not None or not any(kind.recyclable for kind in kinds):
                return allocated  # usual in decode
        rest = [max(0, need - len(kind.spare)) for kind, need in zip(kinds, needs, strict=True)]
        fresh: list[list[int]] = [[] for _ in needs]
        if any(rest):
            allocated = self._allocator.allocate_all(rest, self._owner)
            if allocated is None:
                own = [min(count, kind.recyclable) for kind, count in zip(kinds, rest, strict=True)]
                less = [count - have for count, have in zip(rest, own, strict=True)]
                allocated = self._allocator.allocate_all(less, self._owner)
                if allocated is None:
                    return None
                for kind, count, pages in zip(kinds, own, allocated, strict=True):
                    pages += kind.recycle(count)
            fresh = allocated
        taken = []
        for kind, need, pages in zip(kinds, needs, fresh, strict=True):
            from_spare = min(need, len(kind.spare))
            taken.append(kind.spare[:from_spare] + pages)
            del kind.spare[:from_spare]
        return taken

    def advance(self, num_tokens: int, hashes: Sequence[bytes], step: int) -> None:
        """Runs up to num_tokens have reported. hashes: of the sequence's full pages, as far as they are known."""
        self.computed = num_tokens
        if num_tokens < self._due:
            return
        due = MAX_TOKENS
        for kind in self._kinds:
            kind_due = kind.advance(num_tokens, hashes, step)
            if kind_due < due:
                due = kind_due
        self._due = due

    def end_prefill(self, hashes: Sequence[bytes], step: int, *, goes_on: bool) -> None:
        """The prompt has been computed: what windows kept back for `grow` enters the cache, and what left them is let go.

        goes_on: it decodes here, so pages that are not in its table yet stay with it.
        """
        for kind in self._kinds:
            kind.end_prefill(self.computed, hashes, step, goes_on)

    def seal(self, num_tokens: int, hashes: Sequence[bytes]) -> None:
        """All of num_tokens has been computed, and no run is under way: if the newest state is on a checkpoint, it enters the
        cache, and the next run writes another."""
        for kind in self._kinds:
            kind.seal(num_tokens, hashes)
        if self._states:
            self.grown_tokens = min(self.grown_tokens, num_tokens)

    # ---- what landed

    def landed(self, num_tokens: int, hashes: Sequence[bytes], step: int) -> None:
        """Everything that was wanted is here."""
        self.advance(num_tokens, hashes, step)
        self.seal(num_tokens, hashes)

    def landed_partly(
        self, num_tokens: int, hashes: Sequence[bytes], ranges: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        """The transfer broke. ranges: per group, positions [first, stop) that are whole on every rank: they are cached."""
        if self._memory.caching:
            for kind, whole in zip(self._kinds, ranges, strict=True):
                kind.landed_partly(num_tokens, hashes, whole)

    def take_checkpoint(self, num_tokens: int, hashes: Sequence[bytes], landed: bool, step: int) -> None:
        """No rank writes into the last checkpoint's pages any more: they are cached if it landed, and let go."""
        full = last_checkpoint(num_tokens, self._checkpoint_tokens) // self._page_tokens
        for kind in self._kinds:
            kind.take_checkpoint(full, hashes, landed, step)

    def fork(self, choices: int) -> tuple[list[SequencePages], list[PageCopy]]:
        """Split into `choices` sequences that go on after the computed tokens; this one is the first of them.

        They share what is full; a partial last page is copied, as returned, before any of them runs.
        """
        if choices == 1:
            return [self], []
        partial = self.computed % self._page_tokens != 0
        forks, copies = [self], []
        for _ in range(choices - 1):
            other = SequencePages(self._memory)
            other.computed = self.computed
            kinds = []
            for g, kind in enumerate(self._kinds):
                forked, copied = kind.fork(partial=partial)
                kinds.append(forked)
                if copied is not None:
                    copies.append(PageCopy(g, *copied))
            other._use(kinds)
            forks.append(other)
        for g, kind in enumerate(self._kinds):
            kind.share_out([other._kinds[g] for other in forks])
        for other in forks:
            other.grown_tokens = 0
        return forks, copies

    # ---- the end

    def close(self, step: int) -> None:
        """Let go of every page. step: now."""
        for kind in self._kinds:
            kind.close(self.computed, step)
        self._allocator.forget_owner(self._owner)
