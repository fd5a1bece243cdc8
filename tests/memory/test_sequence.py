"""The pages of sequences, sentence by sentence; what must hold whatever happens is in test_sequence_machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from disagg.memory.groups import GroupSpec
from disagg.memory.hashing import chain_root
from disagg.memory.kv_memory import KvMemory
from disagg.memory.layout import pool_layout
from disagg.memory.sequence import SequencePages
from disagg.memory.spans import last_checkpoint, window_start
from disagg.messages.layout import GroupKind
from disagg.types.errors import ConfigError

ROOT = chain_root("weights")
FULL = GroupSpec("full", GroupKind.FULL, 4)
STATE = GroupSpec("state", GroupKind.STATE, 4)


def window(tokens: int) -> GroupSpec:
    return GroupSpec("window", GroupKind.WINDOW, 4, window_tokens=tokens)


def memory(*groups: GroupSpec, page_tokens: int = 4, num_large: int = 40, caching: bool = True) -> KvMemory:
    return KvMemory(pool_layout(groups, page_tokens, 2 * page_tokens), num_large, caching=caching)


def hashes_of(kv: KvMemory, tokens: int) -> list[bytes]:
    hashes: list[bytes] = []
    kv.extend_hashes(hashes, ROOT, range(tokens))
    return hashes


def computed(kv: KvMemory, tokens: int, chunk: int = 8) -> SequencePages:
    """A prompt of so many tokens, computed in chunks."""
    hashes = hashes_of(kv, tokens)
    pages = kv.open(hashes, tokens, tokens, chunk, 0)
    assert pages is not None
    for start in range(pages.computed, tokens, chunk):
        stop = min(start + chunk, tokens)
        assert pages.grow(start, stop) is not None
        pages.advance(stop, hashes, 0)
    pages.end_prefill(hashes, 0, goes_on=True)
    pages.seal(tokens, hashes)
    return pages


@given(
    tokens=st.integers(1, 40),
    more=st.integers(0, 40),
    every=st.sampled_from((4, 8, 16)),
    cached=st.integers(0, 40),
    caching=st.booleans(),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_what_was_reserved_for_an_answer_is_enough_though_the_pool_is_full(
    tokens: int, more: int, every: int, cached: int, caching: bool
) -> None:
    """Of full attention and states: prompts that end on a checkpoint, beside it, or begin behind a cached one."""
    kv = KvMemory(pool_layout((FULL, STATE), 4, every), 60, caching=caching)
    if cached:
        computed_in_runs(kv, cached, cached, every).close(0)
    pages = kv.open(hashes_of(kv, tokens), tokens, tokens + more, 8, 1)
    assert pages is not None
    blocked = []
    for g in range(2):  # nothing else can be had any more
        while (page := kv.allocator.allocate_all([int(g == 0), int(g == 1)], 999)) is not None:
            blocked.append(page)
    run_to(kv, pages, tokens, tokens + more, every)


def run_to(kv: KvMemory, pages: SequencePages, tokens: int, total: int, every: int) -> None:
    """A prompt in runs that end on checkpoints, then a token at a time."""
    hashes = hashes_of(kv, total)
    start = pages.computed
    while start < total:
        stop = min(tokens, start + 8, (start // every + 1) * every) if start < tokens else start + 1
        assert pages.grow(start, stop) is not None, f"a run of tokens {start} to {stop} has no page"
        pages.advance(stop, hashes[: stop // 4], 1)
        if stop == tokens:
            pages.end_prefill(hashes[: stop // 4], 1, goes_on=True)
            pages.seal(stop, hashes[: stop // 4])
        start = stop


def computed_in_runs(kv: KvMemory, tokens: int, total: int, every: int) -> SequencePages:
    pages = kv.open(hashes_of(kv, tokens), tokens, total, 8, 0)
    assert pages is not None
    run_to(kv, pages, tokens, total, every)
    return pages


@given(tokens=st.integers(1, 60), window_tokens=st.integers(1, 30), page_tokens=st.sampled_from((1, 2, 4, 16)))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_what_is_sent_of_a_window_is_enough_for_its_full_pages_to_be_a_hit_and_no_page_more(
    tokens: int, window_tokens: int, page_tokens: int
) -> None:
    kv = memory(FULL, window(window_tokens), page_tokens=page_tokens, num_large=300)
    hashes = hashes_of(kv, tokens)
    pages = kv.receive(hashes, tokens, 0, 1, 0)
    assert pages is not None
    start = window_start(tokens, window_tokens, page_tokens)
    assert pages.wants == (0, start)
    pages.landed(tokens, hashes, 0)
    pages.close(0)
    full = tokens // page_tokens * page_tokens
    assert kv.lookup(hashes, tokens + 1) == full
    assert start % page_tokens == 0
    assert start == 0 or start + page_tokens > full - window_tokens


@pytest.mark.parametrize(("tokens", "checkpoint"), [(0, 0), (7, 0), (8, 0), (9, 8), (16, 8), (17, 16)])
def test_the_last_checkpoint_is_before_the_end(tokens: int, checkpoint: int) -> None:
    assert last_checkpoint(tokens, 8) == checkpoint


def test_what_was_asked_for_and_what_was_there_is_counted_once_for_each_that_got_its_pages() -> None:
    kv = memory(FULL, num_large=5)
    computed(kv, 10).close(1)
    assert (kv.query_tokens, kv.hit_tokens) == (10, 0)
    again = computed(kv, 10)
    assert (kv.query_tokens, kv.hit_tokens) == (20, 8)
    assert kv.open(hashes_of(kv, 20), 20, 20, 8, 2) is None
    assert kv.receive(hashes_of(kv, 20), 20, 0, 1, 2) is None
    assert (kv.query_tokens, kv.hit_tokens) == (20, 8), "nothing was had"
    received = kv.receive(hashes_of(kv, 12), 12, 0, 1, 2)
    assert received is not None
    assert (kv.query_tokens, kv.hit_tokens) == (32, 16)
    received.close(3)
    again.close(3)


def test_what_is_refused_leaves_everything_as_it_was() -> None:
    kv = memory(FULL, window(6), STATE, num_large=14)
    computed(kv, 10).close(1)
    holder = computed(kv, 16)
    before = kv.allocator.all_holders(), kv.allocator.free_large, kv.allocator.evictable_large, len(kv.cache)
    assert kv.open(hashes_of(kv, 40), 40, 40, 8, 2) is None
    assert kv.receive(hashes_of(kv, 40), 40, 8, 3, 2) is None
    assert (kv.allocator.all_holders(), kv.allocator.free_large, kv.allocator.evictable_large, len(kv.cache)) == before
    holder.close(3)


def test_two_that_share_a_prefix_share_its_pages() -> None:
    kv = memory(FULL)
    one, other = computed(kv, 10), computed(kv, 10)
    pages, others = set(one.held()), set(other.held())
    assert len(pages & others) == 2
    one.close(1)
    assert {page for _, page in others} >= {
        page for (_, page), holders in kv.allocator.all_holders().items() if holders
    }
    other.close(1)
    assert kv.allocator.used_large == 0


def test_a_prompt_lies_in_one_run_of_adjacent_pages() -> None:
    kv = memory(FULL, window(40))
    assert computed(kv, 40).extent_pages() == 10


@pytest.mark.parametrize("groups", [(FULL,), (window(6),), (FULL, window(6)), (FULL, STATE)])
def test_what_was_set_aside_is_there_when_the_pool_is_full(groups: tuple[GroupSpec, ...]) -> None:
    kv = memory(*groups, num_large=12, caching=False)
    pages = computed(kv, 7)
    free = kv.allocator.num_large - kv.allocator.used_large
    assert pages.set_aside(7, 8) and kv.allocator.num_large - kv.allocator.used_large == free, "its last page has room"
    assert pages.set_aside(8, 10) and pages.set_aside(8, 10), "once, however often it is asked"
    assert kv.allocator.num_large - kv.allocator.used_large == free - sum(g.kind is not GroupKind.STATE for g in groups)
    others = []
    while (other := kv.open([], 4, 4, 4, 0)) is not None:
        others.append(other)
    before = [*pages.held()]
    assert pages.grow(7, 8) is not None and pages.grow(8, 9) is not None
    assert [*pages.held()] == before, "it held them already"
    pages.advance(9, [], 0)
    assert not pages.set_aside(12, 14) or groups == (window(6),), "nothing is free, but what a window writes again"
    for each in (pages, *others):
        each.close(0)
    assert kv.allocator.used_large == 0


def test_one_that_decodes_lets_go_of_its_window_page_by_page() -> None:
    kv = memory(window(5), caching=False)
    pages = computed(kv, 10)
    for tokens in range(11, 60):
        assert pages.grow(tokens - 1, tokens) is not None
        pages.advance(tokens, [], tokens)
        (table,) = pages.tables()
        assert table.first <= (tokens - 5) // 4, "the next token attends to that"
        assert len(set(pages.held())) <= 4, "which is looked at once a page"
    pages.close(60)


def ask(kv: KvMemory, tokens: list[int], step: int, chunk: int = 4) -> int:
    """A prompt is computed, ends, and lets go of everything. Returns how much of it was cached."""
    hashes: list[bytes] = []
    kv.extend_hashes(hashes, ROOT, tokens)
    pages = kv.open(hashes, len(tokens), len(tokens), chunk, step)
    assert pages is not None
    hit = pages.computed
    for start in range(hit, len(tokens), chunk):
        stop = min(start + chunk, len(tokens))
        assert pages.grow(start, stop) is not None
        pages.advance(stop, hashes, step)
    pages.end_prefill(hashes, step, goes_on=False)
    pages.close(step)
    return hit


def evict(kv: KvMemory, count: int) -> None:
    """So many of the pages that are cached, where each small page is a large one."""
    taken = kv.allocator.allocate(0, kv.allocator.free_large + count, owner=1 << 40)
    assert taken is not None
    kv.allocator.release(0, taken, 0, [0] * len(taken))


# Pages of a window of 8 tokens that a prompt of 64 in chunks of 4 leaves behind, but for its last 16 tokens.
PASSED = 12


def test_what_a_window_has_passed_goes_before_whatever_is_known_to_be_of_use() -> None:
    kv = memory(FULL, window(8), num_large=100)
    old, new = [*range(500, 520)], [*range(64)]
    ask(kv, old, 1)
    ask(kv, new, 2)
    evict(kv, PASSED)
    assert (ask(kv, [*old, 1], 3), ask(kv, [*new, 1], 4)) == (20, 64)


def test_where_prompts_are_seen_to_part_the_window_is_kept() -> None:
    kv = memory(FULL, window(8), num_large=200)
    one, other, third = ([*range(32), *range(many, many + 32)] for many in (1000, 2000, 3000))
    ask(kv, one, 1)
    evict(kv, PASSED)
    assert ask(kv, other, 2) == 0, "the first time that they part there"
    evict(kv, 10)  # of the second, pages 0 to 5 and 8 to 11: without 6 and 7, which are the window before 32
    assert ask(kv, third, 3) == 32


def test_a_state_that_was_passed_goes_before_the_last_one() -> None:
    kv = memory(FULL, STATE, num_large=100)
    old, new = [*range(500, 517)], [*range(65)]
    ask(kv, old, 1)
    ask(kv, new, 2)
    evict(kv, 7)  # after 8, 16, .. 56 tokens of the newer; the states after 64 and (of the older) after 16 are needed
    assert (ask(kv, [*old[:16], 1], 3), ask(kv, [*new[:64], 1], 4)) == (16, 64)


def run_prompts(kv: KvMemory, prompts: Iterable[Sequence[int]]) -> tuple[int, bool]:
    """Prompts in steps of 8 tokens, two of which are under way. How many ran at once, and whether one ever lacked a page."""
    waiting, plans, step, most = deque(prompts), deque[tuple[_Running, int]](), 0, 0
    running: list[_Running] = []
    while waiting or running:
        while waiting:
            hashes: list[bytes] = []
            kv.extend_hashes(hashes, ROOT, waiting[0])
            pages = kv.open(hashes, len(waiting[0]), len(waiting[0]), 8, step)
            if pages is None:
                break
            running.append(_Running(pages, hashes, len(waiting.popleft()), pages.computed))
        most = max(most, len(running))
        for each in running:
            if len(plans) == 2 or each.planned == each.tokens:
                continue
            stop = min((each.planned // 8 + 1) * 8, each.tokens)
            if each.pages.grow(each.planned, stop) is None:
                return most, True
            each.planned = stop
            plans.append((each, stop))
            kv.check_integrity([other.pages for other in running])
        step += 1
        each, stop = plans.popleft()
        each.pages.advance(stop, each.hashes, step)
        kv.check_integrity([other.pages for other in running])
        if stop == each.tokens:
            each.pages.end_prefill(each.hashes, step, goes_on=False)
            each.pages.close(step)
            running.remove(each)
    assert kv.allocator.used_large == 0
    return most, False


@dataclass(eq=False)
class _Running:
    pages: SequencePages
    hashes: list[bytes]
    tokens: int
    planned: int


def two_prompts(num_large: int) -> tuple[int, bool]:
    """See `run_prompts`. Each takes 10 pages for full attention, and 4 for its window; 4 more are enough for both."""
    kv = KvMemory(pool_layout((FULL, window(8)), 4, 8), num_large, common_late_tokens=16)
    return run_prompts(kv, [range(100 * number, 100 * number + 40) for number in range(2)])


def test_prompts_of_a_prefill_server_share_the_pages_for_runs_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert two_prompts(18) == (1, False)
    assert two_prompts(31) == (1, False)
    assert two_prompts(32) == (2, False)
    monkeypatch.setattr(KvMemory, "can_go_on", lambda self, after=(): True)
    monkeypatch.setattr(KvMemory, "check_integrity", lambda self, holders: None)
    assert two_prompts(28) == (2, True), "without asking for them, they are not there"


@pytest.mark.parametrize("num_large", range(14, 60, 3))
def test_a_checkpoint_takes_no_large_page_that_runs_under_way_may_come_to_need(num_large: int) -> None:
    groups = (
        GroupSpec("full", GroupKind.FULL, 16),
        GroupSpec("window", GroupKind.WINDOW, 24, window_tokens=8),
        GroupSpec("state", GroupKind.STATE, 8),
    )
    kv = KvMemory(pool_layout(groups, 4, 8), num_large, common_late_tokens=16)
    rng = Random(num_large)
    lengths = [rng.choice((16, 24, 40, 64)) for _ in range(12)]
    _, lacked = run_prompts(kv, [range(100 * i, 100 * i + length) for i, length in enumerate(lengths)])
    assert not lacked


def test_without_room_for_another_state_one_goes_on_in_place_and_makes_no_checkpoint() -> None:
    kv = memory(STATE, num_large=1)
    pages = kv.open([], 20, 20, 8, 0)
    assert pages is not None
    new_pages = [pages.grow(start, min(start + 8, 20)) for start in range(0, 20, 8)]
    assert [len(each[0]) if each else each for each in new_pages] == [1, (), ()]
    pages.close(1)


def test_whoever_reads_a_checkpoint_must_have_another_page_to_write_to() -> None:
    kv = memory(STATE, num_large=2)
    hashes = hashes_of(kv, 9)
    computed(kv, 9).close(1)
    pages = SequencePages(kv)
    pages.pin_hit(hashes, 8)
    other = kv.open([], 4, 4, 8, 2)
    assert other is not None
    assert pages.grow(8, 9) is None, "never over the checkpoint"
    other.close(3)
    assert pages.grow(8, 9) is not None
    pages.close(4)


@pytest.mark.parametrize(
    "group",
    [
        GroupSpec("images", GroupKind.IMAGE, page_bytes=64),
        GroupSpec("chosen", GroupKind.BUDGET, page_bytes=64, budget_tokens=8),
    ],
)
def test_a_kind_that_no_engine_serves_is_refused_where_a_sequence_is_opened(group: GroupSpec) -> None:
    kv = memory(FULL, group)
    hashes = hashes_of(kv, 16)
    for begin in (lambda: kv.open(hashes, 16, 20, 8, 0), lambda: kv.receive(hashes, 16, 4, 1, 0)):
        with pytest.raises(ConfigError, match=f"'{group.name}' keeps {group.kind.value} pages; engines serve full"):
            begin()
    assert not kv.allocator.used_large
