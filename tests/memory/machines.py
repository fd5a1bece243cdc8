"""The state machines that drive an allocator, and a prefix cache on it, beside the model. Given the classes to be tested.

A machine is made for classes, so that a broken copy of a class can be put through exactly what the shipped one is.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from disagg.memory.cache import ImageRef, image_key, snapshot_key
from disagg.memory.groups import GroupSpec
from disagg.memory.hashing import chain_root, extend_hashes
from disagg.memory.layout import PageSizing, PoolLayout, pool_layout
from disagg.messages.layout import GroupKind
from tests.memory.images import image_rank
from tests.memory.model import CacheModel, Page, PoolModel

T = TypeVar("T")

PAGE_TOKENS = 2
PICK = st.integers(0, 2**16 - 1)  # which of the things that are there: modulo how many they are, or one bit for each
OWNERS = st.integers(0, 3)
MOST_HOLDINGS = 8
LAG = st.integers(0, 2)  # steps since a sequence that lets go of pages has used them


def campaign(examples: int, steps: int = 200, *, shrink: bool = True) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


# For `make check`, for CI and for the slow campaign.
EXAMPLES = pytest.mark.parametrize(
    "examples",
    [
        pytest.param(20, marks=pytest.mark.short),
        pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
        pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
COUNTED = 200  # with fewer examples nothing is expected of what is rare


def run_campaign(
    machine_for: Callable[[collections.Counter[Any]], type[RuleBasedStateMachine]],
    examples: int,
    must_happen: Iterable[Hashable],
    at_least: int,
    steps: int = 200,
) -> None:
    """Runs the machine that `machine_for` makes for a counter, in which each of `must_happen` has to come to `at_least`.

    What hypothesis draws depends on which modules are loaded: where something was too rare, more examples are run.
    """
    wanted = list(must_happen) if examples >= COUNTED else []
    seen: collections.Counter[Any] = collections.Counter()
    for factor in (1, 2, 4):
        seen.clear()
        run_state_machine_as_test(machine_for(seen), settings=campaign(factor * examples, steps))
        if all(seen[what] >= at_least for what in wanted):
            break
    for what in wanted:
        assert seen[what] >= at_least, f"{what} was too rare: {seen[what]} times"


def layout_of(*page_bytes: int, sizing: PageSizing = PageSizing.LCM) -> PoolLayout:
    groups = tuple(GroupSpec(f"group{i}", GroupKind.FULL, size) for i, size in enumerate(page_bytes))
    return pool_layout(groups, PAGE_TOKENS, checkpoint_tokens=2 * PAGE_TOKENS, sizing=sizing)


# Small pools, so that each of the five steps is needed again and again: (layout, large pages).
POOLS = {
    "one group": (layout_of(64), 8),
    "two to three": (layout_of(384, 256), 6),
    "five to one": (layout_of(100, 500), 5),
    "padded to the largest": (layout_of(100, 384, sizing=PageSizing.MAX), 6),
    "four groups": (layout_of(2, 3, 4, 6), 6),
}


def pick(things: Sequence[T], number: int) -> T:
    return things[number % len(things)]


def some(things: Sequence[T], bits: int) -> list[T]:
    return [thing for i, thing in enumerate(things) if bits >> i & 1]


@dataclass
class Holding:
    """What one sequence holds of one group."""

    group: int
    owner: int
    pages: list[int]


def allocator_machine(
    allocator_class: type[Any], steps: collections.Counter[int] | None = None
) -> type[RuleBasedStateMachine]:
    """steps: is told how often each of the five steps gave a page."""
    counter = collections.Counter() if steps is None else steps

    class AllocatorMachine(RuleBasedStateMachine):
        """A page allocator beside the model: every answer, every report of an eviction, every count."""

        @initialize(pool=st.sampled_from(sorted(POOLS)))
        def make(self, pool: str) -> None:
            self.layout, num_large = POOLS[pool]
            self.groups = range(len(self.layout.groups))
            self.model = PoolModel.empty(self.layout, num_large, counter)
            self.reported: list[Page] = []
            self.evictions = [0 for _ in self.groups]
            self.allocator = allocator_class(self.layout, num_large, lambda g, page: self.reported.append((g, page)))
            self.holdings: list[Holding] = []
            self.prefix_lens: dict[Page, int] = {}  # of the content that is written into a page
            self.owners = [0, 1, 2]  # sequences that run
            self.clock = self.forgot_at = 0

        def _owner(self, number: int) -> int:
            """One of those that run; beyond them, if there is one, one that may both use and evict a large page of its own."""
            torn = [
                large.owner
                for large in self.model.large
                if large
                and large.owner is not None
                and large.is_evictable
                and any(page.is_empty for page in large.small)
            ]
            return self.owners[number] if number < len(self.owners) else (torn or self.owners)[-1]

        # ---- asking for pages

        @rule(g=PICK, count=st.integers(0, 5), owner=OWNERS, prefix_len=st.integers(0, 3), kept=PICK)
        def allocate(self, g: int, count: int, owner: int, prefix_len: int, kept: int) -> None:
            g, owner = pick(self.groups, g), self._owner(owner)
            given = self.allocator.allocate(g, count, owner)
            self._follow([(g, count, given)], owner, prefix_len)
            self._keep(g, some(given or [], kept))
            if given is None:
                self._preempt()

        @rule(counts=PICK, owner=OWNERS, prefix_len=st.integers(0, 3))
        def allocate_in_all_groups(self, counts: int, owner: int, prefix_len: int) -> None:
            """All or nothing: it is refused exactly when asking for one group after the other would fail."""
            owner = self._owner(owner)
            needs = [counts >> 2 * g & 3 for g in self.groups]
            given = self.allocator.allocate_all(needs, owner)
            if given is not None:
                self._follow(list(zip(self.groups, needs, given, strict=True)), owner, prefix_len)
                return
            self.everything_adds_up()
            for g, count in enumerate(needs):
                pages = self.allocator.allocate(g, count, owner)
                self._follow([(g, count, pages)], owner, prefix_len)
                if pages is None:
                    self._preempt()
                    return
            raise AssertionError(f"{needs} were refused, and then given one by one")

        def _follow(self, answers: list[tuple[int, int, Sequence[int] | None]], owner: int, prefix_len: int) -> None:
            """answers: of each group that was asked, in order, how many pages it was asked for and what it gave."""
            evicted = []
            for g, count, given in answers:
                evicted += self.model.allocate(g, count, owner, given)
                if given:
                    self.holdings.append(Holding(g, owner, list(given)))
                    self.prefix_lens.update({(g, page): prefix_len + i for i, page in enumerate(given)})
            for g, _ in evicted:
                self.evictions[g] += 1
            assert sorted(self.reported) == sorted(evicted), "what was evicted is not what was reported"
            self.reported.clear()

        # ---- using them

        @precondition(lambda self: self.holdings)
        @rule(number=PICK, which=PICK)
        def keep(self, number: int, which: int) -> None:
            """Content enters the cache."""
            holding = pick(self.holdings, number)
            self._keep(holding.group, some(holding.pages, which))

        def _keep(self, g: int, pages: list[int]) -> None:
            for page in pages:
                if not self.model.page(g, page).kept:
                    self.allocator.keep(g, page)
                    self.model.keep(g, page)

        @precondition(lambda self: any(self.model.large))
        @rule(g=PICK, which=PICK, owner=OWNERS, lag=st.integers(-2, 2))
        def share(self, g: int, which: int, owner: int, lag: int) -> None:
            """A sequence takes what others use, or what is cached, and ends at once if there is a lag, or 0."""
            g = pick(self.groups, g)
            pages = some(self.model.where(g, lambda page: not page.is_empty), which)
            self.allocator.share(g, pages)
            self.model.share(g, pages)
            if lag >= 0 or len(self.holdings) >= MOST_HOLDINGS:
                self._release(g, pages, max(0, lag))
            elif pages:
                self.holdings.append(Holding(g, self._owner(owner), pages))

        @precondition(lambda self: self.holdings)
        @rule(number=PICK, lag=LAG, ended=st.booleans())
        def release(self, number: int, lag: int, ended: bool) -> None:
            """A sequence lets go of what it has in a group. When it has nothing any more, it may have ended."""
            holding = self.holdings.pop(number % len(self.holdings))
            self._release(holding.group, holding.pages, lag)
            if ended and not any(other.owner == holding.owner for other in self.holdings):
                self.allocator.forget_owner(holding.owner)
                self.model.forget_owner(holding.owner)
                self.owners = [max(self.owners) + 1 if owner == holding.owner else owner for owner in self.owners]

        def _preempt(self) -> None:
            """What lets pages be given again after a refusal, whichever rules hypothesis favours."""
            for holding in self.holdings[::2]:
                self._release(holding.group, holding.pages[::2], 0)
                del holding.pages[::2]
            self.holdings = [holding for holding in self.holdings if holding.pages]

        @precondition(lambda self: self.holdings)
        @rule(number=PICK, which=PICK, lag=LAG)
        def release_some(self, number: int, which: int, lag: int) -> None:
            """A running sequence can do without some of its pages: they left its window, or are old checkpoints."""
            holding = pick(self.holdings, number)
            gone = some(holding.pages, which)
            self._release(holding.group, gone, lag)
            holding.pages = [page for page in holding.pages if page not in gone]

        def _release(self, g: int, pages: list[int], lag: int) -> None:
            self.clock += 1
            last_access = self._last_access(lag)
            prefix_lens = [self.prefix_lens[g, page] for page in pages]
            self.allocator.release(g, pages, last_access, prefix_lens)
            self.model.release(g, pages, last_access, prefix_lens)

        def _last_access(self, lag: int) -> int:
            """Four things happen in one step, so that ages tie."""
            return max(0, self.clock // 4 - lag)

        @precondition(lambda self: self.clock > self.forgot_at + 3)
        @rule(g=PICK, number=PICK)
        def forget(self, g: int, number: int) -> None:
            """Content leaves the cache; not so often that nothing is left to be evicted."""
            self.forgot_at = self.clock
            g = pick(self.groups, g)
            kept = self.model.where(g, lambda page: page.kept)
            if kept:
                page = pick(kept, number)
                self.allocator.forget(g, page)
                self.model.forget(g, page)

        # ---- what is compared after each of these

        @invariant()
        def everything_adds_up(self) -> None:
            allocator, model = self.allocator, self.model
            allocator.check_integrity()
            assert self.reported == [], "an eviction that nobody asked for"
            assert (allocator.free_large, allocator.evictable_large, allocator.used_large) == model.large_counts()
            assert [allocator.small_counts(g) for g in self.groups] == model.small_counts()
            assert allocator.all_holders() == model.all_holders()
            assert allocator.fragmentation_bytes == model.fragmentation_bytes()
            assert list(allocator.evictions) == self.evictions

    return AllocatorMachine


# ---- the prefix cache on an allocator

CHECKPOINT_TOKENS = 4
FULL = GroupSpec("full", GroupKind.FULL, 12)
NARROW = GroupSpec("narrow", GroupKind.WINDOW, 12, window_tokens=2)
WIDE = GroupSpec("wide", GroupKind.WINDOW, 4, window_tokens=5)
STATE = GroupSpec("state", GroupKind.STATE, 24)
IMAGE = GroupSpec("image", GroupKind.IMAGE, 8)
BUDGET = GroupSpec("budget", GroupKind.BUDGET, 12, budget_tokens=5)

# (groups, large pages)
MODELS = {
    "full and window": ((FULL, NARROW), 16),
    "full and state": ((FULL, STATE), 9),
    "full and images": ((FULL, IMAGE), 8),
    "windows and state": ((NARROW, WIDE, STATE), 11),
    "budget and window": ((BUDGET, WIDE), 18),
    "everything": ((FULL, WIDE, STATE, IMAGE, BUDGET), 32),
}


@dataclass
class Document:
    """A prompt. hashes: of its whole pages."""

    tokens: str
    images: tuple[ImageRef, ...] = ()
    hashes: list[bytes] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        extend_hashes(self.hashes, chain_root("weights"), [ord(token) for token in self.tokens], PAGE_TOKENS)


CAT, DOG = b"cat", b"dog"
DOCUMENTS = (
    Document("abcdefghi", (ImageRef(CAT, 1, 2), ImageRef(DOG, 6, 1))),
    Document("abcdXfgh", (ImageRef(CAT, 1, 2), ImageRef(DOG, 7, 1))),
    Document("abXdef", (ImageRef(DOG, 3, 1), ImageRef(CAT, 4, 2))),
    Document("Xbcdefgh"),
)


def cache_machine(
    allocator_class: type[Any], cache_class: type[Any], hits: collections.Counter[int] | None = None
) -> type[RuleBasedStateMachine]:
    """hits: is told how often a lookup found so many tokens."""
    counter = collections.Counter() if hits is None else hits

    class CacheMachine(RuleBasedStateMachine):
        """A prefix cache whose pages come from an allocator, beside the model."""

        @initialize(model=st.sampled_from(sorted(MODELS)))
        def make(self, model: str) -> None:
            groups, num_large = MODELS[model]
            self.layout = pool_layout(groups, PAGE_TOKENS, CHECKPOINT_TOKENS)
            self.groups = range(len(groups))
            self.cache = cache_class(self.layout)
            self.allocator = allocator_class(self.layout, num_large, self.cache.remove)
            self.pool = PoolModel.empty(self.layout, num_large, collections.Counter())
            self.model = CacheModel(self.layout)
            self.prefix_lens: dict[Page, int] = {}
            self.holdings: list[Holding] = []
            self.told: set[tuple[int, bytes]] = set()  # what a listener to the events takes to be cached
            self.latest = DOCUMENTS[0]  # of those that were computed
            self.owner = 0
            self.clock = self.forgot_at = 0

        # ---- content comes

        @rule(document=st.sampled_from(DOCUMENTS), pages=st.integers(1, 4), without=PICK, held=st.booleans())
        def compute(self, document: Document, pages: int, without: int, held: bool) -> None:
            """A sequence computes a prefix, and leaves what it needs for going on. without: pages that it leaves out."""
            self.owner += 1
            self.latest = document
            pages = min(pages, len(document.hashes))
            for g in self.groups:
                contents = list(self._contents(g, document, pages).items())
                if g == without % (4 * len(self.groups)):
                    contents = some(contents, without >> 4)
                self._store(g, contents, held)
            self.allocator.forget_owner(self.owner)
            self.pool.forget_owner(self.owner)

        def _contents(self, g: int, document: Document, pages: int) -> dict[bytes, int]:
            """The keys, with their prefix lengths, of what a group has of the document's first so many pages."""
            group = self.layout.groups[g]
            prefixes = {key: (i + 1) * PAGE_TOKENS for i, key in enumerate(document.hashes[:pages])}
            stop = pages * PAGE_TOKENS
            if group.kind is GroupKind.STATE:
                return dict(list(prefixes.items())[-2:])  # a state at any page's end; not all of them are checkpoints
            if group.kind is GroupKind.IMAGE:
                begun = [
                    image.hash for image in document.images for _ in range(image.num_pages) if image.start_token < stop
                ]
                return {image_key(image, begun[:i].count(image)): image_rank(image) for i, image in enumerate(begun)}
            if group.kind is GroupKind.BUDGET and stop > group.budget_tokens:
                kept = range(-(-group.budget_tokens // PAGE_TOKENS))
                return prefixes | {snapshot_key(document.hashes[pages - 1], i): stop for i in kept}
            return prefixes

        def _store(self, g: int, contents: list[tuple[bytes, int]], held: bool) -> None:
            given = self.allocator.allocate(g, len(contents), self.owner)
            self.model.drop(self.pool.allocate(g, len(contents), self.owner, given))
            if given is None:
                self._preempt()
                return
            for (key, prefix_len), page in zip(contents, given, strict=True):
                self.prefix_lens[g, page] = prefix_len
                is_new = (g, key) not in self.model.page_of
                assert self.cache.insert(g, key, page) == is_new, "the page that was there first stays"
                if is_new:
                    self.model.page_of[g, key] = page
                    self.allocator.keep(g, page)
                    self.pool.keep(g, page)
            self.holdings.append(Holding(g, self.owner, list(given)))
            if not held:
                self._release(self.holdings.pop())

        # ---- content is looked for

        @precondition(lambda self: self.model.page_of)
        @rule(document=st.sampled_from(DOCUMENTS), cap=st.integers(0, 9))
        def hit(self, document: Document, cap: int) -> None:
            """A sequence begins with what is cached of it, and holds it."""
            found = self._compare_lookup(document, cap)
            self.owner += 1
            for g in self.groups:
                needed = self.model.needed(g, found, document.hashes, document.images)
                assert needed is not None
                pages = [self.cache.find(g, key) for key in dict.fromkeys(needed)]
                if pages and len(self.holdings) < MOST_HOLDINGS:
                    self.allocator.share(g, pages)
                    self.pool.share(g, pages)
                    self.holdings.append(Holding(g, self.owner, pages))

        def _compare_lookup(self, document: Document, cap: int) -> int:
            found: int = self.cache.lookup(document.hashes, cap, document.images)
            assert found == self.model.lookup(document.hashes, cap, document.images)
            counter[found] += 1
            return found

        @precondition(lambda self: self.model.page_of)
        @rule(g=PICK, document=st.sampled_from(DOCUMENTS), start=st.integers(0, 4), stop=st.integers(0, 9))
        def receive(self, g: int, document: Document, start: int, stop: int) -> None:
            """What of a transfer is cached already, and where that lies."""
            g = pick(self.groups, g)
            if self.layout.groups[g].kind not in (GroupKind.FULL, GroupKind.WINDOW):
                return
            first, hashes = start * PAGE_TOKENS, document.hashes
            stop = max(stop, first)
            token = self.cache.receivable(g, hashes, first, stop)
            assert token == self.model.receivable(g, hashes, first, stop)
            cached = range(start, token // PAGE_TOKENS)
            pages = self.cache.pages(g, hashes, start, stop // PAGE_TOKENS)
            assert pages[: len(cached)] == [self.model.page_of[g, hashes[page_no]] for page_no in cached]

        # ---- content goes

        @precondition(lambda self: self.holdings)
        @rule(number=PICK)
        def release(self, number: int) -> None:
            self._release(self.holdings.pop(number % len(self.holdings)))

        def _preempt(self) -> None:
            if self.holdings:
                self._release(self.holdings.pop(0))

        def _release(self, holding: Holding) -> None:
            self.clock += 1
            prefix_lens = [self.prefix_lens[holding.group, page] for page in holding.pages]
            self.allocator.release(holding.group, holding.pages, self.clock // 4, prefix_lens)
            self.pool.release(holding.group, holding.pages, self.clock // 4, prefix_lens)

        @precondition(lambda self: self.model.page_of and self.clock > self.forgot_at + 9)
        @rule(number=PICK)
        def forget(self, number: int) -> None:
            """Content that turned out to be of no use."""
            self.forgot_at = self.clock
            g, key = pick(sorted(self.model.page_of), number)
            page = self.model.page_of.pop((g, key))
            self.cache.remove(g, page)
            self.allocator.forget(g, page)
            self.pool.forget(g, page)

        @precondition(lambda self: self.model.page_of or self.told)
        @rule()
        def listen(self) -> None:
            """Who applies the events, in any order, knows what is cached."""
            self.allocator.check_integrity()
            events = self.cache.take_events()
            stored, removed = set(events.stored), set(events.removed)
            assert len(stored) == len(events.stored) and len(removed) == len(events.removed)
            assert removed <= self.told and not stored & self.told, "something came or went twice"
            self.told = (self.told - removed) | stored
            assert self.told == set(self.model.page_of)

        # ---- what is compared after each of these

        @invariant()
        def everything_is_found(self) -> None:
            self.cache.check_integrity()
            assert self.allocator.all_holders() == self.pool.all_holders()
            assert len(self.cache) == len(self.model.page_of)
            assert all(self.cache.find(g, key) == page for (g, key), page in self.model.page_of.items())
            self._compare_lookup(self.latest, len(self.latest.tokens))

    return CacheMachine
