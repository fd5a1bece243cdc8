"""The pages of one sequence in every layer group, and the memory that they come from. What engines use of this package.

    KvMemory ── lookup ──> hit tokens           how much of a prompt is cached, valid in every group at once
       │ ├──── open ─────> SequencePages        prefill, or recomputation: after the longest prefix that is cached
       │ └──── receive ──> SequencePages        decode: pages for what a transfer will bring
       v
    SequencePages ── grow ──> new pages         before a run, for the tokens that it will write
                  ── advance                    after it: full pages enter the prefix cache, what left a window is let go
                  ── fork ──> SequencePages     choices share full pages; a partial last one is copied
                  ── close                      every page is let go, exactly once

What a sequence holds of a group, after n tokens (page_tokens = 4, a window of 5 tokens before the new one):

    full     [p0][p1][p2][p3]                     every page
    window    ·   · [p2][p3]    n = 15            pages that overlap [n - 5, n); positions before are gone
    state    [s]                                  the state after n tokens; it is written in place, except after a
                                                  checkpoint: that page stays as it is, and the next run writes another

Knows tokens, pages and a logical clock (`step`, which engines count); nothing of requests, plans or tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from random import Random
from types import MappingProxyType

from disagg.memory.allocator import PageAllocator
from disagg.memory.cache import ImageRef, PrefixCache
from disagg.memory.hashing import extend_hashes
from disagg.memory.kinds import Arrival, KindPages, Peak
from disagg.memory.layout import PoolLayout
from disagg.memory.pages_of import pages_of
from disagg.memory.runs import adjacent_runs
from disagg.memory.spans import MAX_TOKENS, PLANS_IN_FLIGHT, last_checkpoint, window_pages
from disagg.memory.state_pages import StatePages
from disagg.memory.window_pages import WindowPages
from disagg.messages.layout import GroupKind, GroupPages
from disagg.messages.plan import PageCopy


class KvMemory:
    """One pool: its pages, its prefix cache, and what they have been asked for.

    caching: off, nothing is kept of a sequence that ends. seed: of the draws that rank images for eviction. late_runs: of one
    sequence, how many have not reported at most.

    common_late_tokens: of a pool in which only sequences of `open` run (a prefill server's): tokens of all of them together
    whose runs have not reported, at most. A window's pages for them need not be set aside for each sequence then: it is
    enough that they can be had, until when they may be what is cached. Not so with several window groups, since one of
    them can take a large page for a small one, of which another would have been made.
    """

    def __init__(
        self,
        layout: PoolLayout,
        num_large: int,
        *,
        caching: bool = True,
        seed: int = 0,
        common_late_tokens: int = 0,
        late_runs: int = PLANS_IN_FLIGHT,
    ) -> None:
        self.layout = layout
        self.late_runs = late_runs
        self.caching = caching
        windows = [g for g, group in enumerate(layout.groups) if group.kind is GroupKind.WINDOW]
        self.common_late_pages = [0 for _ in layout.groups]  # by group
        if len(windows) == 1:
            window_tokens, page_tokens = layout.groups[windows[0]].window_tokens, layout.page_tokens
            most, alone = (window_pages(window_tokens, late, page_tokens) for late in (common_late_tokens, 0))
            self.common_late_pages[windows[0]] = most - alone
        self.beyond_quotas = [0 for _ in layout.groups]  # pages that sequences will come to need beyond their quotas
        self.cache = PrefixCache(layout, Random(seed))
        self.allocator = PageAllocator(layout, num_large, self.cache.remove)
        self.hit_tokens = 0
        self.query_tokens = 0
        self.releases = 0  # how often pages were let go: as long as it stays, what did not fit does not fit
        self._next_owner = 0

    @property
    def keeps_back(self) -> bool:
        """Not all of a prompt enters the cache as it is computed: what windows need to go on, only when it is complete."""
        return any(group.kind is GroupKind.WINDOW for group in self.layout.groups)

    def extend_hashes(self, hashes: list[bytes], root: bytes, tokens: Sequence[int]) -> None:
        """Append the hash of every page that `tokens`, the whole sequence so far, fills beyond those that are there."""
        if self.caching:
            extend_hashes(hashes, root, tokens, self.layout.page_tokens)

    def lookup(self, hashes: Sequence[bytes], num_tokens: int, images: Sequence[ImageRef] = ()) -> int:
        """Tokens, less than num_tokens, of the longest prefix that is valid in every group."""
        return self.cache.lookup(hashes, num_tokens - 1, images) if self.caching else 0

    def open(
        self, hashes: Sequence[bytes], num_tokens: int, total_tokens: int, chunk_tokens: int, step: int
    ) -> SequencePages | None:
        """Pages with which num_tokens tokens can be computed in chunks, after the longest prefix that is cached, and go on
        to total_tokens. None if they do not fit now; the pool to itself, as for `receive`, is enough for num_tokens.
        """
        known = self.cache.known(hashes, num_tokens - 1) if self.caching else 0
        hit = self.cache.lookup_known(hashes, known) if known else 0
        for hit_tokens, tokens in ((hit, total_tokens), (0, num_tokens)):
            pages = SequencePages(self)
            pages.branch_at(known, num_tokens, tail_tokens=self.late_runs * chunk_tokens)
            pages.pin_hit(hashes, hit_tokens)
            if pages.reserve(tokens, chunk_tokens):
                self.count_hit(num_tokens, hit_tokens)
                return pages
            pages.close(step)
            if self.allocator.used_large:
                break
        return None

    def receive(
        self,
        hashes: Sequence[bytes],
        num_tokens: int,
        spare_tokens: int,
        choices: int,
        step: int,
        enough: Callable[[], bool] = lambda: True,
        *,
        moved: bool = False,
    ) -> SequencePages | None:
        """Pages for num_tokens tokens that will land, less what is cached, and spare ones for what `choices` sequences will
        write after them: spare_tokens each, and copies of a partial page. None if they do not fit now.

        What is cached counts group by group: whatever one of them lacks, the transfer brings. With the pool to itself a
        request is not refused for what is only of use: without spare pages and cached ones, which may lie so that they
        keep whole large pages from others, it gets what it must have. enough: whether what is left when it has its pages
        is enough for the others. moved: see Arrival.
        """
        pages = SequencePages(self)
        pages.branch_at(num_tokens)
        reserved = pages.reserve_landing(hashes, num_tokens, spare_tokens, choices, reuse=self.caching, moved=moved)
        if not (reserved and enough()):
            pages.close(step)
            if self.allocator.used_large:
                return None
            pages = SequencePages(self)
            pages.branch_at(num_tokens)
            if not pages.reserve_landing(hashes, num_tokens, 0, choices, reuse=False, moved=moved):
                return None
        self.count_hit(num_tokens, pages.hit_tokens)
        return pages

    def can_go_on(self, after: Sequence[int] = ()) -> bool:
        """The pages that are set aside for nobody can be had; `after`: even when a sequence has taken so many of each group
        without windows, for which it may use up large pages."""
        late = [*map(min, self.common_late_pages, self.beyond_quotas)]
        return not any(late) or self.allocator.can_allocate(late, after)

    def count_hit(self, num_tokens: int, hit_tokens: int) -> None:
        """So many tokens were asked for, and so many of them were there."""
        self.query_tokens += num_tokens
        self.hit_tokens += hit_tokens

    def large_pages_to_prefill(self, num_tokens: int, chunk_tokens: int) -> int:
        """Large pages with which a prompt can always be computed in chunks when nothing else is held."""
        return self._large_pages(Peak(num_tokens, num_tokens, 1, self.late_runs * chunk_tokens))

    def large_pages_to_decode(self, num_tokens: int, total_tokens: int, choices: int) -> int:
        """Large pages with which `choices` sequences that share num_tokens tokens can always grow to total_tokens each."""
        return self._large_pages(Peak(num_tokens, total_tokens, choices, self.late_runs))

    def _large_pages(self, peak: Peak) -> int:
        return sum(
            pages_of(group).large_pages(group, peak, self.layout.page_tokens, per_large)
            for group, per_large in zip(self.layout.groups, self.layout.per_large, strict=True)
        )

    def new_owner(self) -> int:
        """A number for `PageAllocator.allocate`, so that a sequence's small pages lie together."""
        self._next_owner += 1
        return self._next_owner

    def release(self, g: int, pages: Sequence[int], step: int, prefix_lens: Sequence[int]) -> None:
        """Let go of pages, last used at `step`; see `PageAllocator.release`."""
        if pages:
            self.releases += 1
            self.allocator.release(g, pages, step, prefix_lens)

    def keep(self, g: int, key: bytes, page: int) -> None:
        """A page that is held has what the key names: it enters the cache, unless another one is there."""
        if self.caching and self.cache.insert(g, key, page):
            self.allocator.keep(g, page)

    def pin(self, g: int, hashes: Sequence[bytes], first: int, stop: int) -> list[int]:
        """Hold the cached pages of positions [first, stop), all of which are known to be there."""
        if first >= stop:
            return []
        pages = self.cache.pages(g, hashes, first, stop)
        assert len(pages) == stop - first, "a hit names pages that are not cached"
        self.allocator.share(g, pages)
        return pages

    def check_integrity(
        self, holders: Iterable[SequencePages], others: Mapping[tuple[int, int], int] = MappingProxyType({})
    ) -> None:
        """What must hold between any two calls: states add up, and pages are held by these sequences and nobody else.

        others: how often pages are held by what will let go of them soon, by group and page.
        """
        self.allocator.check_integrity()
        self.cache.check_integrity()
        counts = dict(others)
        late = [*map(min, self.common_late_pages, self.beyond_quotas)]
        for pages in holders:
            for g, page in pages.held():
                counts[g, page] = counts.get((g, page), 0) + 1
            late = [max(0, left - held) for left, held in zip(late, pages.beyond_quota(), strict=True)]
        assert counts == self.allocator.all_holders(), "pages of sequences and used pages differ"
        assert others or self.allocator.can_allocate(late), "what no sequence has set aside cannot be had"


class SequencePages:
    """The pages of one sequence in every layer group. Made by `KvMemory`; see the module.

    computed: tokens whose KV or state is final in the pages. wants: of a sequence that receives, per group, the first
    position to be sent (see messages/link.Grant).
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
        # Tokens up to which `grow`, and from which on `advance`, have something to do: for most steps there is nothing.
        self._room = self._due = 0

    def _use(self, kinds: Sequence[KindPages]) -> None:
        """One for each group."""
        self._kinds = tuple(kinds)
        self._states = tuple(kind for kind in kinds if isinstance(kind, StatePages))
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

    def reserve(self, num_tokens: int, chunk_tokens: int) -> bool:
        """Pages with which `num_tokens` tokens can be computed in chunks, all or nothing; afterwards `grow` cannot fail."""
        needs = [kind.reserve(num_tokens, chunk_tokens) for kind in self._kinds]
        taken = self._allocator.allocate_all(needs, self._owner)
        if taken is None:
            return False
        for kind, pages in zip(self._kinds, taken, strict=True):
            kind.spare = pages
        return self._memory.can_go_on()

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

    def run_pages(self) -> float:
        """Mean length of the runs of adjacent pages that attention would read; 0 without such pages."""
        paged = (kind for kind in self._kinds if kind not in self._states)
        tables = [[*kind.table[kind.first :], *kind.spare] for kind in paged]
        pages = sum(map(len, tables))
        return pages / sum(map(adjacent_runs, tables)) if pages else 0.0

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
        if stop <= self._room:
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
        self._room = room
        if self._states:
            self._due = min(self._due, *(state.due for state in self._states))
        return tuple(map(tuple, taken)) if any(taken) else ()

    def _take_wishes(self, start: int, needs: list[int]) -> list[list[int]] | None:
        """As `_take`, with what is only of use beside what is needed; None: there is nothing, or no memory for it."""
        wishes = [kind.wishes(start) for kind in self._kinds]
        if not any(wishes) or not self._memory.can_go_on(wishes):
            return None
        return self._take([need + wish for need, wish in zip(needs, wishes, strict=True)])

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
            self._room = min(self._room, num_tokens)

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
            other._room = 0
        return forks, copies

    # ---- the end

    def close(self, step: int) -> None:
        """Let go of every page. step: now."""
        for kind in self._kinds:
            kind.close(self.computed, step)
        self._allocator.forget_owner(self._owner)
