"""What a router is told of a prefix cache: everything first, then changes, in parts; never wrong, and never without bound."""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disagg.messages.legs import KvEvents, Tier
from disagg.router.view import CachedPages
from disagg.server.kv_feed import KvFeed, KvFeeds
from disagg.wire.server import KvUpdate

A, B, C, D = ((0, b"a"), (0, b"b"), (1, b"c"), (1, b"d"))


def begun(*cached: tuple[int, bytes], **limits: int) -> KvFeed:
    """A feed whose router knows these pages."""
    feed = KvFeed(**limits)
    feed.begin()
    while feed.pending:
        feed.take(lambda: KvEvents(stored=cached))
    return feed


def taken(feed: KvFeed, *cached: tuple[int, bytes]) -> list[KvUpdate]:
    """Everything that is due. cached: what a snapshot would have."""
    parts = []
    while feed.pending:
        part = feed.take(lambda: KvEvents(stored=cached))
        assert part is not None
        parts.append(part)
    return parts


def test_it_begins_with_everything_in_parts_of_which_only_the_first_is_a_reset() -> None:
    feed = KvFeed(part_pages=2)
    assert not feed.pending
    feed.begin()
    assert taken(feed, A, B, C) == [
        KvUpdate(KvEvents(stored=(A, B)), reset=True),
        KvUpdate(KvEvents(stored=(C,)), reset=False),
    ]
    assert feed.take(lambda: KvEvents()) is None


def test_an_empty_cache_is_told_too() -> None:
    feed = KvFeed()
    feed.begin()
    assert taken(feed) == [KvUpdate(KvEvents(), reset=True)]


def test_changes_follow_and_the_latest_of_each_page_counts() -> None:
    feed = begun(A)
    feed.add(KvEvents(stored=(B, C), removed=(A,)))
    feed.add(KvEvents(stored=(A,), removed=(B,)))
    [part] = taken(feed)
    assert (set(part.events.stored), set(part.events.removed), part.reset) == ({A, C}, {B}, False)


def test_changes_come_in_parts_first_what_was_removed() -> None:
    feed = begun(A, B, C, part_pages=2)
    feed.add(KvEvents(stored=(D, (0, b"e")), removed=(A, B, C)))
    assert taken(feed) == [
        KvUpdate(KvEvents(removed=(A, B))),
        KvUpdate(KvEvents(stored=(D,), removed=(C,))),
        KvUpdate(KvEvents(stored=((0, b"e"),))),
    ]


def test_what_happens_before_everything_was_looked_up_is_in_it() -> None:
    feed = KvFeed()
    feed.begin()
    feed.add(KvEvents(removed=(A,)))
    assert taken(feed, B) == [KvUpdate(KvEvents(stored=(B,)), reset=True)]


def test_what_happens_between_the_parts_comes_after_them() -> None:
    feed = KvFeed(part_pages=1)
    feed.begin()
    feed.take(lambda: KvEvents(stored=(A, B)))
    feed.add(KvEvents(removed=(B,)))
    assert feed.waiting_pages == 2
    assert taken(feed) == [KvUpdate(KvEvents(stored=(B,))), KvUpdate(KvEvents(removed=(B,)))]


def test_too_many_changes_are_dropped_and_everything_is_told_again() -> None:
    feed = begun(A, max_changes=2)
    feed.add(KvEvents(stored=(B, C)))
    feed.add(KvEvents(stored=(D,)))
    assert feed.waiting_pages == 0
    assert taken(feed, B, C, D) == [KvUpdate(KvEvents(stored=(B, C, D)), reset=True)]


def test_to_begin_again_drops_what_was_due() -> None:
    feed = KvFeed(part_pages=1)
    feed.begin()
    feed.take(lambda: KvEvents(stored=(A, B)))
    feed.begin()
    assert taken(feed, C) == [KvUpdate(KvEvents(stored=(C,)), reset=True)]


def test_a_router_that_is_slower_than_the_cache_changes_lets_a_bounded_number_wait() -> None:
    feed = begun(part_pages=1, max_changes=4)
    resets = 0
    for number in range(0, 100, 2):
        feed.add(KvEvents(stored=((0, bytes([number])), (0, bytes([number + 1])))))
        part = feed.take(lambda: KvEvents())
        assert part is not None
        resets += part.reset
        assert feed.waiting_pages <= 8
    assert resets > 0


class Telling(RuleBasedStateMachine):
    """A cache that changes, and a router that takes a part now and then. Once it has taken all, it knows all."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: set[tuple[int, bytes]] = set()
        self.feed = KvFeed(part_pages=3, max_changes=7)
        self.feed.begin()
        self.router = CachedPages()

    @rule(pages=st.sets(st.tuples(st.integers(0, 1), st.sampled_from([bytes([n]) for n in range(12)])), max_size=4))
    def change(self, pages: set[tuple[int, bytes]]) -> None:
        """These pages come, or go if they are there."""
        stored, removed = tuple(pages - self.cache), tuple(pages & self.cache)
        self.cache ^= pages
        self.feed.add(KvEvents(stored, removed))

    @rule()
    def begin_again(self) -> None:
        self.feed.begin()

    @precondition(lambda self: self.feed.pending)
    @rule()
    def take(self) -> None:
        part = self.feed.take(lambda: KvEvents(stored=tuple(self.cache)))
        assert part is not None
        assert len(part.events.stored) + len(part.events.removed) <= 3
        self.router.apply(part.events, reset=part.reset)

    @invariant()
    def what_waits_is_bounded(self) -> None:
        assert self.feed.waiting_pages <= 24 + 7

    @invariant()
    def a_router_that_has_taken_everything_knows_the_cache(self) -> None:
        if not self.feed.pending:
            known = {(g, bytes([n])) for g in range(2) for n in range(12) if self.router.holds(g, bytes([n]))}
            assert known == self.cache
            assert sum(self.router.counts()) == len(self.cache)


TestTelling: Any = Telling.TestCase
TestTelling.settings = settings(derandomize=True, deadline=None, max_examples=60, stateful_step_count=40)


def test_tiers_take_turns_and_each_begins_with_all_that_it_has() -> None:
    has = {Tier.GPU: (A,), Tier.HOST: (B, C), Tier.STORAGE: ()}
    feeds = KvFeeds({tier: partial(KvEvents, pages) for tier, pages in has.items()})
    feeds.begin()

    def take() -> KvUpdate | None:
        feeds.add(Tier.GPU, KvEvents(stored=((0, bytes([len(heard)])),)))  # always has news
        return feeds.take()

    heard: list[KvUpdate | None] = []
    for _ in range(4):
        heard.append(take())
    assert heard[:3] == [KvUpdate(KvEvents(stored=pages), True, tier) for tier, pages in has.items()]
    assert heard[3] is not None and heard[3].tier is Tier.GPU and not heard[3].reset
    feeds.add(Tier.STORAGE, KvEvents(stored=(D,)))
    assert [part and part.tier for part in (take(), take())] == [Tier.STORAGE, Tier.GPU]


def test_a_tier_that_a_server_has_not_got_is_not_spoken_of() -> None:
    feeds = KvFeeds({Tier.GPU: KvEvents})
    feeds.begin()
    feeds.add(Tier.HOST, KvEvents(stored=(A,)))
    assert feeds.take() == KvUpdate(KvEvents(), True, Tier.GPU)
    assert not feeds.pending
