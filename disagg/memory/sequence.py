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

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from random import Random

from disagg.memory.allocator import PageAllocator, adjacent_runs, passed
from disagg.memory.cache import ImageRef, PrefixCache
from disagg.memory.hashing import extend_hashes
from disagg.memory.layout import PoolLayout
from disagg.messages.layout import GroupKind, GroupPages
from disagg.messages.plan import PageCopy

# A window's pages are let go when a run has reported: while one is under way and another is planned, so many runs' tokens
# are held beside the window. It begins and ends within a page.
PLANS_IN_FLIGHT = 2
PARTIAL_PAGES = 2


def window_start(num_tokens: int, window_tokens: int, page_tokens: int) -> int:
    """First token, on a page boundary, that a window group must still hold after num_tokens tokens.

    Counted from the last full page and not from the last token, so that the prefix of full pages can be a cache hit.
    """
    return max(0, num_tokens // page_tokens * page_tokens - window_tokens) // page_tokens * page_tokens


def last_checkpoint(num_tokens: int, checkpoint_tokens: int) -> int:
    """Tokens after which a sequence of num_tokens was last checkpointed, before its end; 0 for never."""
    return max(0, num_tokens - 1) // checkpoint_tokens * checkpoint_tokens


def pages_for(tokens: int, page_tokens: int) -> int:
    """How many pages hold this many tokens."""
    return -(-tokens // page_tokens)


def window_pages(window_tokens: int, late_tokens: int, page_tokens: int) -> int:
    """Most pages that a sequence needs of a window, and of late_tokens beside it whose runs have not reported."""
    return pages_for(window_tokens + late_tokens, page_tokens) + PARTIAL_PAGES


class KvMemory:
    """One pool: its pages, its prefix cache, and what they have been asked for.

    caching: off, nothing is kept of a sequence that ends. seed: of the draws that rank images for eviction.

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
    ) -> None:
        self.layout = layout
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
            pages.branch_at(known, num_tokens, tail_tokens=PLANS_IN_FLIGHT * chunk_tokens)
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
    ) -> SequencePages | None:
        """Pages for num_tokens tokens that will land, less what is cached, and spare ones for what `choices` sequences will
        write after them: spare_tokens each, and copies of a partial page. None if they do not fit now.

        What is cached counts group by group: whatever one of them lacks, the transfer brings. With the pool to itself a
        request is not refused for what is only of use: without spare pages and cached ones, which may lie so that they
        keep whole large pages from others, it gets what it must have. enough: whether what is left when it has its pages
        is enough for the others.
        """
        pages = SequencePages(self)
        pages.branch_at(num_tokens)
        reserved = pages.reserve_landing(hashes, num_tokens, spare_tokens, choices, reuse=self.caching)
        if not (reserved and enough()):
            pages.close(step)
            if self.allocator.used_large:
                return None
            pages = SequencePages(self)
            pages.branch_at(num_tokens)
            if not pages.reserve_landing(hashes, num_tokens, 0, choices, reuse=False):
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
        return self._large_pages(num_tokens, num_tokens, 1, PLANS_IN_FLIGHT * chunk_tokens)

    def large_pages_to_decode(self, num_tokens: int, total_tokens: int, choices: int) -> int:
        """Large pages with which `choices` sequences that share num_tokens tokens can always grow to total_tokens each."""
        return self._large_pages(num_tokens, total_tokens, choices, PLANS_IN_FLIGHT)

    def _large_pages(self, shared_tokens: int, total_tokens: int, choices: int, late_tokens: int) -> int:
        page_tokens = self.layout.page_tokens
        total = 0
        for group, per_large in zip(self.layout.groups, self.layout.per_large, strict=True):
            if group.kind is GroupKind.STATE:
                total += -(-(2 + 2 * choices) // per_large)  # the shared one and a checkpoint; to read and to write
                continue
            shared = shared_tokens // page_tokens
            each = pages_for(total_tokens, page_tokens) - shared
            if group.kind is GroupKind.WINDOW:
                held = window_pages(group.window_tokens, late_tokens, page_tokens)
                shared, each = min(shared, held), min(each, held)
                # What is held moves on, and then begins and ends within a large page.
                total += -(-min(shared + each * choices, held * choices) // per_large) + 1
                continue
            total += -(-(shared + each * choices) // per_large)
        return total

    def new_owner(self) -> int:
        """A number for `PageAllocator.allocate`, so that a sequence's small pages lie together."""
        self._next_owner += 1
        return self._next_owner

    def release(self, g: int, pages: Sequence[int], step: int, prefix_lens: Sequence[int]) -> None:
        """Let go of pages, last used at `step`; see `PageAllocator.release`."""
        if pages:
            self.releases += 1
            self.allocator.release(g, pages, step, prefix_lens)

    def check_integrity(self, holders: Iterable[SequencePages]) -> None:
        """What must hold between any two calls: states add up, and pages are held by these sequences and nobody else."""
        self.allocator.check_integrity()
        self.cache.check_integrity()
        counts: dict[tuple[int, int], int] = {}
        late = [*map(min, self.common_late_pages, self.beyond_quotas)]
        for pages in holders:
            for g, page in pages.held():
                counts[g, page] = counts.get((g, page), 0) + 1
            late = [max(0, left - held) for left, held in zip(late, pages.beyond_quota(), strict=True)]
        assert counts == self.allocator.all_holders(), "pages of sequences and used pages differ"
        assert self.allocator.can_allocate(late), "what no sequence has set aside cannot be had"


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
        self._layout = layout
        self._page_tokens = layout.page_tokens
        groups = range(len(layout.groups))
        self._paged = tuple(g for g in groups if layout.groups[g].kind is not GroupKind.STATE)
        self._windows = tuple(g for g in groups if layout.groups[g].kind is GroupKind.WINDOW)
        self._states = tuple(g for g in groups if layout.groups[g].kind is GroupKind.STATE)
        self._tables: list[list[int]] = [[] for _ in groups]  # by position; entries before `_first` are gone
        self._first = [0 for _ in groups]
        self._spare: list[list[int]] = [[] for _ in groups]  # held, and not in the table yet
        self._published = [0 for _ in groups]  # positions that were offered to the cache, or came from it
        # Windows. own_from: the position after the hit's; quota: own pages that are held for good, and known to nobody
        # else, so that `grow` cannot fail; left: (position, step) of those that are out of the window; hold_from: positions
        # that stay until the end.
        self._own_from = [0 for _ in groups]
        self._quota = [0 for _ in groups]
        self._left: list[deque[tuple[int, int]]] = [deque() for _ in groups]
        self._beyond = [0 for _ in groups]  # what `beyond_quotas` has of it
        self._hold_from: list[int | None] = [None for _ in groups]
        self._branches: tuple[int, ...] = ()  # see `branch_at`
        self._tail_tokens = 0
        # States. frozen: the newest is not to be written over; superseded: (tokens, position) of a state that was the
        # newest after so many tokens, until the run that reads it has reported.
        self._frozen = False
        self._superseded: deque[tuple[int, int]] = deque()
        self._hold_checkpoint = -1
        self._checkpoint: dict[int, int] = {}  # by state group: the page of the last checkpoint, for a transfer
        # Tokens up to which `grow`, and from which on `advance`, have something to do: for most steps there is nothing.
        self._room = 0
        self._due = 0

    # ---- how a sequence begins

    def pin_hit(self, hashes: Sequence[bytes], hit_tokens: int) -> None:
        """Hold the pages of a prefix that `KvMemory.lookup` found."""
        stop = hit_tokens // self._page_tokens
        for g, group in enumerate(self._layout.groups):
            if group.kind is GroupKind.STATE:
                if stop:
                    self._tables[g] += self._pinned(g, hashes, stop - 1, stop)
            else:
                first = 0
                if group.kind is GroupKind.WINDOW:
                    first = max(0, hit_tokens - group.window_tokens) // self._page_tokens
                self._begin(g, hashes, first, stop)
        self.computed = hit_tokens
        self._frozen = bool(stop)

    def branch_at(self, *lengths: int, tail_tokens: int = 0) -> None:
        """Prompts are known to go on differently after so many tokens, of which the last is where this one ends.

        So what windows and states need for a prefix of that length is cached like everything else. What else they leave
        behind while a sequence runs is of use only to a prompt that happens to part from this one just there, and goes
        first when pages are evicted. tail_tokens: a window for a prefix that is up to so much shorter than the prompt is
        kept, too, since its last part is what most likely differs in the next one: a question, say.
        Models without full attention do not know where prompts part, and keep everything alike.
        """
        if any(group.kind is GroupKind.FULL for group in self._layout.groups):
            self._branches = lengths
            self._tail_tokens = tail_tokens

    def hold_for_sending(self, num_tokens: int) -> None:
        """Keep, until the end, what a transfer of num_tokens tokens may need: the last window, and the last checkpoint."""
        for g in self._windows:
            start = window_start(num_tokens, self._layout.groups[g].window_tokens, self._page_tokens)
            self._hold_from[g] = start // self._page_tokens
        self._hold_checkpoint = last_checkpoint(num_tokens, self._layout.checkpoint_tokens)

    def reserve(self, num_tokens: int, chunk_tokens: int) -> bool:
        """Pages with which `num_tokens` tokens can be computed in chunks, all or nothing; afterwards `grow` cannot fail.

        So that it cannot, a window's pages enter the cache only when they are let go, or when the prompt has been computed:
        nobody can share a page that will have to be written again.
        """
        needs = []
        for g, group in enumerate(self._layout.groups):
            pages = pages_for(num_tokens, self._page_tokens) - len(self._tables[g])
            if group.kind is GroupKind.STATE:
                pages = 1
            elif group.kind is GroupKind.WINDOW:
                common = self._memory.common_late_pages[g]
                late_tokens = 0 if common else PLANS_IN_FLIGHT * chunk_tokens
                self._quota[g] = window_pages(group.window_tokens, late_tokens, self._page_tokens)
                if common:
                    self._beyond[g] = max(0, pages - self._quota[g])
                    self._memory.beyond_quotas[g] += self._beyond[g]
                pages = min(pages, self._quota[g])
            needs.append(max(0, pages))
        taken = self._allocator.allocate_all(needs, self._owner)
        if taken is None:
            return False
        self._spare = taken
        return self._memory.can_go_on()

    def reserve_landing(
        self, hashes: Sequence[bytes], num_tokens: int, spare_tokens: int, choices: int, *, reuse: bool
    ) -> bool:
        """See `KvMemory.receive`. Sets `wants`. reuse: begin with what is cached."""
        page_tokens = self._page_tokens
        cache = self._memory.cache
        full, landing = num_tokens // page_tokens, pages_for(num_tokens, page_tokens)
        each = pages_for(num_tokens + spare_tokens, page_tokens) - landing
        extra = each * choices + (choices - 1 if full < landing else 0)
        bonus = self._wants_checkpoint(hashes, num_tokens)
        wants, needs = [], []
        for g, group in enumerate(self._layout.groups):
            if group.kind is GroupKind.STATE:
                wants.append(0)
                needs.append(1 + bonus + (choices if choices > 1 else 0))
                continue
            start = 0
            if group.kind is GroupKind.WINDOW:
                start = window_start(num_tokens, group.window_tokens, page_tokens) // page_tokens
            hit = start
            if reuse:
                hit = cache.receivable(g, hashes, start * page_tokens, full * page_tokens) // page_tokens
            most = extra
            if group.kind is GroupKind.WINDOW:
                held = window_pages(group.window_tokens, PLANS_IN_FLIGHT, page_tokens)
                most = min(extra, choices * held)
            self._begin(g, hashes, start, hit)
            wants.append(min(hit * page_tokens, num_tokens))
            needs.append(landing - hit + most)
        taken = self._allocator.allocate_all(needs, self._owner)
        if taken is None:
            return False
        for g, pages in enumerate(taken):
            if g in self._states:
                self._tables[g].append(pages.pop())
                if bonus:
                    self._checkpoint[g] = pages.pop()
                self._spare[g] = pages
            else:
                count = landing - len(self._tables[g])
                self._tables[g] += pages[:count]
                self._spare[g] = pages[count:]
        self.wants = tuple(wants)
        return True

    def _wants_checkpoint(self, hashes: Sequence[bytes], num_tokens: int) -> bool:
        position = last_checkpoint(num_tokens, self._layout.checkpoint_tokens) // self._page_tokens
        if not self._states or not position or not self._memory.caching:
            return False
        return not all(self._memory.cache.pages(g, hashes, position - 1, position) for g in self._states)

    def _begin(self, g: int, hashes: Sequence[bytes], first: int, stop: int) -> None:
        """The table begins with the cached pages of positions [first, stop)."""
        self._tables[g] += [0] * first
        self._first[g] = first
        self._published[g] = self._own_from[g] = stop
        self._tables[g] += self._pinned(g, hashes, first, stop)

    def _pinned(self, g: int, hashes: Sequence[bytes], first: int, stop: int) -> list[int]:
        if first >= stop:
            return []
        pages = self._memory.cache.pages(g, hashes, first, stop)
        assert len(pages) == stop - first, "a hit names pages that are not cached"
        self._allocator.share(g, pages)
        return pages

    # ---- what others need to know of it

    def tables(self) -> tuple[GroupPages, ...]:
        """What a worker has to know before the first run: the pages that hold something, from the first one needed."""
        return tuple(
            GroupPages(0, tuple(table[-1:])) if g in self._states else GroupPages(first, tuple(table[first:]))
            for g, (table, first) in enumerate(zip(self._tables, self._first, strict=True))
        )

    def landing(self, num_tokens: int) -> tuple[GroupPages, ...]:
        """Pages into which num_tokens tokens will land, from the first wanted position on.

        In state groups, as pieces count: the state after the last token, then (if there is one) the last checkpoint.
        """
        out = []
        for g, table in enumerate(self._tables):
            if g in self._states:
                checkpoint = (self._checkpoint[g],) if g in self._checkpoint else ()
                out.append(GroupPages(0, (table[0], *checkpoint)))
            else:
                first = self.wants[g] // self._page_tokens
                out.append(GroupPages(first, tuple(table[first : pages_for(num_tokens, self._page_tokens)])))
        return tuple(out)

    def pages(self, g: int, first: int, stop: int) -> tuple[int, ...]:
        """Pages of positions [first, stop) of a group, as pieces count them; all of them are held."""
        if g in self._states:
            return tuple(
                self._tables[g][-1] if position == 0 else self._checkpoint[g] for position in range(first, stop)
            )
        assert first >= self._first[g], f"position {first} of group {g} has left the window"
        return tuple(self._tables[g][first:stop])

    @property
    def hit_tokens(self) -> int:
        """Tokens that need not be sent, in any attention group, of a sequence that receives."""
        return min((self.wants[g] for g in self._paged if g not in self._windows), default=0)

    @property
    def has_checkpoint(self) -> bool:
        """The state of the checkpoint that `hold_for_sending` asked for is kept."""
        return bool(self._states) and len(self._checkpoint) == len(self._states)

    @property
    def room_tokens(self) -> int:
        """Tokens for which it has pages in every group of full attention, those that it has included; no limit without such
        a group."""
        full = [g for g in self._paged if g not in self._windows]
        pages = min((len(self._tables[g]) + len(self._spare[g]) for g in full), default=1 << 31)
        return pages * self._page_tokens

    def run_pages(self) -> float:
        """Mean length of the runs of adjacent pages that attention would read; 0 without such pages."""
        tables = [[*self._tables[g][self._first[g] :], *self._spare[g]] for g in self._paged]
        pages = sum(map(len, tables))
        return pages / sum(map(adjacent_runs, tables)) if pages else 0.0

    def beyond_quota(self) -> list[int]:
        """Own pages of each group that are held beyond a quota, now."""
        return [max(0, self._own(g) - quota) if quota else 0 for g, quota in enumerate(self._quota)]

    def _own(self, g: int) -> int:
        """Pages of a group that it has for itself: in its table, and set aside."""
        return len(self._tables[g]) - max(self._first[g], self._own_from[g]) + len(self._spare[g])

    def held(self) -> Iterable[tuple[int, int]]:
        """(group, page), once for each time that this sequence holds it."""
        for g, (table, first) in enumerate(zip(self._tables, self._first, strict=True)):
            for page in (*table[first:], *self._spare[g]):
                yield g, page
        yield from self._checkpoint.items()

    # ---- while it runs

    def grow(self, start: int, stop: int) -> tuple[tuple[int, ...], ...] | None:
        """Pages for a run of tokens [start, stop): those newly appended to each group's table, or () for none at all.

        None: there is no memory for it now, and nothing has changed. A run may end on a checkpoint, not cross it.
        """
        if stop <= self._room:
            return ()
        checkpoint_tokens = self._layout.checkpoint_tokens
        needs = [0] * len(self._tables)
        pages_after = -(-stop // self._page_tokens)
        for g in self._paged:
            needs[g] = max(0, pages_after - len(self._tables[g]))
        taken = None
        if self._states:
            must = self._frozen or start == 0
            wanted = [int(g in self._states) for g in range(len(needs))]
            may = self._memory.caching and start % checkpoint_tokens == 0 and self._memory.can_go_on(wanted)
            if must or may:
                for g in self._states:
                    needs[g] = 1
                taken = self._take(needs)
                if taken is None and must:
                    return None
                if taken is not None:
                    self._supersede(start)
                for g in self._states:
                    needs[g] = 0
        if taken is None:
            taken = self._take(needs)
            if taken is None:
                return None
        for table, pages in zip(self._tables, taken, strict=True):
            table += pages
        self._room = min([len(self._tables[g]) for g in self._paged]) * self._page_tokens if self._paged else stop
        if self._states:
            boundary = (start // checkpoint_tokens + 1) * checkpoint_tokens
            assert stop <= boundary, f"a run of tokens {start} to {stop} crosses a checkpoint"
            self._room = boundary if not self._paged else min(self._room, boundary)
        return tuple(map(tuple, taken)) if any(taken) else ()

    def _supersede(self, start: int) -> None:
        """The run from `start` on writes a new state; the one that it reads stays as it is."""
        self._frozen = False
        if start == 0:
            return
        position = len(self._tables[self._states[0]]) - 1
        self._superseded.append((start, position))
        self._due = 0
        if start == self._hold_checkpoint:
            for g in self._states:
                self._checkpoint[g] = self._tables[g][position]
                self._allocator.share(g, [self._checkpoint[g]])

    def _take(self, needs: list[int]) -> list[list[int]] | None:
        """Spare pages, then the allocator's, then those of our own that left a window. All or nothing."""
        if not any(self._spare):
            allocated = self._allocator.allocate_all(needs, self._owner)
            if allocated is not None or not any(self._left):
                return allocated  # usual in decode
        rest = [max(0, need - len(spare)) for need, spare in zip(needs, self._spare, strict=True)]
        fresh: list[list[int]] = [[] for _ in needs]
        if any(rest):
            allocated = self._allocator.allocate_all(rest, self._owner)
            if allocated is None:
                own = {g: min(rest[g], len(self._left[g])) for g in self._windows}
                for g, count in own.items():
                    rest[g] -= count
                allocated = self._allocator.allocate_all(rest, self._owner)
                if allocated is None:
                    return None
                for g, count in own.items():
                    allocated[g] += self._recycle(g, count)
            fresh = allocated
        taken = []
        for g, need in enumerate(needs):
            from_spare = min(need, len(self._spare[g]))
            taken.append(self._spare[g][:from_spare] + fresh[g])
            del self._spare[g][:from_spare]
        return taken

    def _recycle(self, g: int, count: int) -> list[int]:
        """The first pages that left the window, which are in no cache yet."""
        positions = [self._left[g].popleft()[0] for _ in range(count)]
        if positions:
            self._first[g] = positions[-1] + 1
        return [self._tables[g][position] for position in positions]

    def advance(self, num_tokens: int, hashes: Sequence[bytes], step: int) -> None:
        """Runs up to num_tokens have reported. hashes: of the sequence's full pages, as far as they are known."""
        self.computed = num_tokens
        if num_tokens < self._due:
            return
        page_tokens = self._page_tokens
        for g in self._paged:
            if not self._quota[g]:
                self._publish(g, num_tokens // page_tokens, hashes)
        for g in self._windows:
            self._leave_window(g, num_tokens, hashes, step)
        if self._superseded:
            self._let_go_of_states(num_tokens, hashes, step)
        self._due = num_tokens + 1 if self._superseded else (num_tokens // page_tokens + 1) * page_tokens

    def _publish(self, g: int, stop: int, hashes: Sequence[bytes]) -> None:
        """Offer the pages of positions before `stop`, which are full, to the cache."""
        stop = min(stop, len(hashes))
        if self._memory.caching and stop > self._published[g]:
            table, insert, keep = self._tables[g], self._memory.cache.insert, self._allocator.keep
            for position in range(max(self._published[g], self._first[g]), stop):
                if insert(g, hashes[position], table[position]):
                    keep(g, table[position])
            self._published[g] = stop

    def _keep(self, g: int, key: bytes, page: int) -> None:
        if self._memory.cache.insert(g, key, page):
            self._allocator.keep(g, page)

    def _leave_window(
        self, g: int, num_tokens: int, hashes: Sequence[bytes], step: int, *, ended: bool = False
    ) -> None:
        """ended: the prompt has. What the quota still has of it is near its end, where others may well part from it."""
        gone = max(0, num_tokens - self._layout.groups[g].window_tokens) // self._page_tokens
        left, own_from = self._left[g], self._own_from[g]
        first = left[-1][0] + 1 if left else self._first[g]
        if gone <= first and not left:
            return
        hold_from = self._hold_from[g]
        if hold_from is not None:
            gone = min(gone, hold_from)
        if first < own_from and first < gone:
            stop = min(gone, own_from)
            self._let_go(g, stop, step)
            first = stop
        left.extend((position, step) for position in range(first, gone))
        held = self._own(g) if self._quota[g] else len(left)
        count = min(held - self._quota[g], len(left))
        if count <= 0:
            return
        self._publish(g, left[count - 1][0] + 1, hashes)
        stop, age = self._first[g], 0
        for _ in range(count):
            position, left_at = left.popleft()
            before, age = age, left_at if self._is_branch(g, position) else passed(left_at)
            if age != before and position > stop:
                self._let_go(g, position, before)
                stop = position
        self._let_go(g, position + 1, age)

    def _is_branch(self, g: int, position: int) -> bool:
        """A prefix at which prompts part needs this page of a window."""
        if not self._branches:
            return True
        page_tokens, window_tokens = self._page_tokens, self._layout.groups[g].window_tokens
        first, stop = position * page_tokens, (position + 1) * page_tokens
        if first < self._branches[-1] and stop > self._branches[-1] - window_tokens - self._tail_tokens:
            return True
        return any(first < length and stop > length - window_tokens for length in self._branches)

    def _let_go(self, g: int, stop: int, last_access: int) -> None:
        """Of a window's pages before position `stop`."""
        first = self._first[g]
        self._memory.release(g, self._tables[g][first:stop], last_access, range(first + 1, stop + 1))
        self._first[g] = stop

    def _let_go_of_states(self, num_tokens: int, hashes: Sequence[bytes], step: int) -> None:
        """States that a reported run has read and replaced; those on a checkpoint enter the cache first."""
        while self._superseded and self._superseded[0][0] < num_tokens:
            tokens, position = self._superseded.popleft()
            self._keep_state(tokens, position, hashes)
            age = step if not self._branches or self._is_branch_state(tokens) else passed(step)
            for g in self._states:
                pages = self._tables[g][self._first[g] : position + 1]
                self._memory.release(g, pages, age, [tokens // self._page_tokens] * len(pages))
                self._first[g] = position + 1

    def _is_branch_state(self, tokens: int) -> bool:
        """The state after so many tokens is the last checkpoint before a length at which prompts part."""
        every = self._layout.checkpoint_tokens
        return any(tokens in (last_checkpoint(length, every), length // every * every) for length in self._branches)

    def _keep_state(self, tokens: int, position: int, hashes: Sequence[bytes]) -> None:
        full = tokens // self._page_tokens
        if tokens % self._layout.checkpoint_tokens == 0 and full <= len(hashes) and self._memory.caching:
            for g in self._states:
                self._keep(g, hashes[full - 1], self._tables[g][position])

    def end_prefill(self, hashes: Sequence[bytes], step: int, *, goes_on: bool) -> None:
        """The prompt has been computed: what windows kept back for `grow` enters the cache, and what left them is let go.

        goes_on: it decodes here, so pages that are not in its table yet stay with it.
        """
        for g in self._windows:
            self._drop_quota(g)
            self._publish(g, self.computed // self._page_tokens, hashes)
            self._leave_window(g, self.computed, hashes, step)
        if not goes_on:
            for g, spare in enumerate(self._spare):
                self._memory.release(g, spare, step, [0] * len(spare))
                spare.clear()

    def _drop_quota(self, g: int) -> None:
        self._memory.beyond_quotas[g] -= self._beyond[g]
        self._quota[g] = self._beyond[g] = 0

    def seal(self, num_tokens: int, hashes: Sequence[bytes]) -> None:
        """All of num_tokens has been computed, and no run is under way: if the newest state is on a checkpoint, it enters the
        cache, and the next run writes another."""
        if self._states and num_tokens and num_tokens % self._layout.checkpoint_tokens == 0:
            self._keep_state(num_tokens, len(self._tables[self._states[0]]) - 1, hashes)
            self._frozen = self._frozen or self._memory.caching
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
            for g in self._paged:
                for first, stop in ranges[g]:
                    for position in range(first, min(stop, num_tokens // self._page_tokens)):
                        self._keep(g, hashes[position], self._tables[g][position])

    def take_checkpoint(self, num_tokens: int, hashes: Sequence[bytes], landed: bool, step: int) -> None:
        """No rank writes into the last checkpoint's pages any more: they are cached if it landed, and let go."""
        full = last_checkpoint(num_tokens, self._layout.checkpoint_tokens) // self._page_tokens
        for g, page in self._checkpoint.items():
            if landed and self._memory.caching:
                self._keep(g, hashes[full - 1], page)
            self._memory.release(g, [page], step, [full])
        self._checkpoint.clear()

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
            other._first, other._published = list(self._first), list(self._published)
            other._branches, other._tail_tokens = self._branches, self._tail_tokens
            for g, table in enumerate(self._tables):
                shared = len(table) - (partial and g in self._paged)
                self._allocator.share(g, table[self._first[g] : shared])
                other._tables[g] = table[:shared]
                if shared < len(table):
                    page = self._spare[g].pop()
                    other._tables[g].append(page)
                    copies.append(PageCopy(g, table[-1], page))
            forks.append(other)
        for g, spare in enumerate([*self._spare]):
            for index, other in enumerate(forks):
                other._spare[g] = spare[index::choices]
        for other in forks:
            other._frozen = bool(self._states)
            other._room = 0
        return forks, copies

    # ---- the end

    def close(self, step: int) -> None:
        """Let go of every page. step: now."""
        release, page_tokens = self._memory.release, self._page_tokens
        for g in self._windows:
            self._drop_quota(g)
        for g, (table, spare) in enumerate(zip(self._tables, self._spare, strict=True)):
            first = self._first[g]
            if g in self._states:
                pages = table[first:]
                release(g, pages, step, [self.computed // page_tokens] * len(pages))
            else:
                for position, left_at in self._left[g]:
                    release(g, [table[position]], left_at, [position + 1])
                    first = position + 1
                release(g, table[first:], step, range(first + 1, len(table) + 1))
            release(g, spare, step, [0] * len(spare))
            table.clear()
            spare.clear()
            self._left[g].clear()
            self._first[g] = 0
        for g, page in self._checkpoint.items():
            release(g, [page], step, [max(0, self._hold_checkpoint) // page_tokens])
        self._checkpoint.clear()
        self._superseded.clear()
        self._allocator.forget_owner(self._owner)
