"""One pool's memory, and its prefix cache: how a sequence begins in it. What engines use of this package, with `memory/sequence`.

    KvMemory ── lookup ──> hit tokens           how much of a prompt is cached, valid in every group at once
       ├─────── open ────> SequencePages        prefill, or recomputation: after the longest prefix that is cached
       │        open_partly                     likewise, with pages for its first tokens only
       └─────── receive ─> SequencePages        decode: pages for what a transfer will bring

Knows tokens, pages and a logical clock (`step`, which engines count); nothing of requests, plans or tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from disagg.memory.allocator import PageAllocator
from disagg.memory.cache import ImageRef, PrefixCache
from disagg.memory.hashing import extend_hashes
from disagg.memory.kinds import Peak
from disagg.memory.layout import PoolLayout
from disagg.memory.pages_of import pages_of
from disagg.memory.sequence import SequencePages
from disagg.memory.spans import PLANS_IN_FLIGHT, window_pages
from disagg.messages.layout import GroupKind


class KvMemory:
    """One pool: its pages, its prefix cache, and what they have been asked for.

    caching: off, nothing is kept of a sequence that ends. late_runs: of one sequence, how many have not reported at
    most.

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
        self.cache = PrefixCache(layout)
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
            if pages.reserve(tokens, chunk_tokens, num_tokens):
                self.count_hit(num_tokens, hit_tokens)
                return pages
            pages.close(step)
            if self.allocator.used_large:
                break
        return None

    def open_partly(
        self, hashes: Sequence[bytes], num_tokens: int, chunk_tokens: int, step: int, spare_large: Callable[[], int]
    ) -> SequencePages | None:
        """As `open`, for a prompt that is too long for what is free: it begins with pages for some of it, and gets more as
        they come free (`SequencePages.extend`). None if that is not one page beyond what is cached.

        spare_large: large pages that it may use up, asked when it holds what is cached.
        """
        known = self.cache.known(hashes, num_tokens - 1) if self.caching else 0
        hit_tokens = self.cache.lookup_known(hashes, known) if known else 0
        pages = SequencePages(self)
        pages.branch_at(known, num_tokens, tail_tokens=self.late_runs * chunk_tokens)
        pages.pin_hit(hashes, hit_tokens)
        if pages.reserve_partly(num_tokens, chunk_tokens, spare_large()):
            self.count_hit(num_tokens, hit_tokens)
            return pages
        pages.close(step)
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
        request is not refused for what is only of use: without cached pages, which may lie so that they keep whole large pages
        from others, and of one choice without spare ones, it gets what it must have. enough: whether what is left when it has
        its pages is enough for the others. moved: see Arrival.
        """
        pages = SequencePages(self)
        pages.branch_at(num_tokens)
        reserved = pages.reserve_landing(hashes, num_tokens, spare_tokens, choices, reuse=self.caching, moved=moved)
        if not (reserved and enough()):
            pages.close(step)
            several = choices > 1
            if self.allocator.used_large or (several and reserved):
                return None
            pages = SequencePages(self)
            pages.branch_at(num_tokens)
            spare_tokens = spare_tokens if several else 0
            reserved = pages.reserve_landing(hashes, num_tokens, spare_tokens, choices, reuse=False, moved=moved)
            if not reserved or (several and not enough()):
                pages.close(step)
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

    def forget(self, hashes: Sequence[bytes]) -> None:
        """What is cached under these names may be wrong: nobody begins with it any more. Who holds it goes on."""
        for g, _ in enumerate(self.layout.groups):
            for key in hashes:
                if (page := self.cache.find(g, key)) is not None:
                    self.cache.remove(g, page)
                    self.allocator.forget(g, page)

    def pin(self, g: int, hashes: Sequence[bytes], first: int, stop: int) -> list[int]:
        """Hold the cached pages of numbers [first, stop), all of which are known to be there."""
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
