"""What the allocator does in situations that a state machine seldom meets, one by one."""

from __future__ import annotations

import pytest

from disagg.memory.allocator import PageAllocator
from disagg.memory.extents import num_extents
from disagg.memory.groups import GroupSpec
from disagg.memory.layout import PageSizing, pool_layout
from disagg.messages.layout import GroupKind

ALICE, BOB, CAROL = 1, 2, 3


def allocator_of(num_large: int, *page_bytes: int, sizing: PageSizing = PageSizing.LCM) -> PageAllocator:
    groups = [GroupSpec(f"group{g}", GroupKind.FULL, size) for g, size in enumerate(page_bytes)]
    return PageAllocator(pool_layout(groups, page_tokens=16, sizing=sizing), num_large, lambda g, page: None)


def allocate(allocator: PageAllocator, g: int, count: int, owner: int) -> list[int]:
    pages = allocator.allocate(g, count, owner)
    assert pages is not None
    return pages


def cache(allocator: PageAllocator, g: int, pages: list[int], step: int) -> None:
    """Their holder lets go of pages that are worth keeping; the first is the shortest prefix."""
    for page in pages:
        allocator.keep(g, page)
    allocator.release(g, pages, step, range(1, len(pages) + 1))
    allocator.check_integrity()


# ---- which large pages


def test_adjacent_large_pages_are_preferred_to_lower_ones() -> None:
    allocator = allocator_of(8, 64)
    pages = allocate(allocator, 0, 8, ALICE)
    allocator.release(0, [pages[1], *pages[4:7]], 0, [0] * 4)
    assert allocate(allocator, 0, 3, BOB) == [4, 5, 6]
    assert allocate(allocator, 0, 1, BOB) == [1]
    allocator.check_integrity()


def test_the_longest_runs_are_taken_when_no_run_is_long_enough() -> None:
    allocator = allocator_of(12, 64)
    pages = allocate(allocator, 0, 12, ALICE)
    free = [0, 2, 3, 5, 6, 7, 8, 10]
    allocator.release(0, [pages[i] for i in free], 0, [0] * len(free))
    taken = allocate(allocator, 0, 7, BOB)
    assert taken[:4] == [5, 6, 7, 8]
    assert num_extents(taken) == 3
    assert allocate(allocator, 0, 1, BOB) == [next(page for page in free if page not in taken)]
    allocator.check_integrity()


def test_large_pages_that_are_evicted_together_are_handed_out_side_by_side() -> None:
    allocator = allocator_of(6, 64)
    cache(allocator, 0, allocate(allocator, 0, 6, ALICE), step=1)  # the last one is the oldest: the longest prefix
    assert allocate(allocator, 0, 3, BOB) == [3, 4, 5]


def test_the_large_page_that_is_not_filled_is_the_youngest_of_those_evicted() -> None:
    allocator = allocator_of(2, 64, 192)
    for step in (2, 1):
        cache(allocator, 1, allocate(allocator, 1, 1, ALICE), step)
    assert allocate(allocator, 0, 4, BOB) == [3, 4, 5, 0]
    assert allocate(allocator, 0, 1, BOB) == [1]


# ---- all groups at once


def test_a_refusal_evicts_nothing_and_changes_nothing() -> None:
    allocator = allocator_of(4, 64, 64)
    cache(allocator, 0, allocate(allocator, 0, 3, ALICE), step=1)
    before = allocator.stats()
    assert allocator.allocate_all([2, 3], BOB) is None
    assert allocator.stats() == before
    assert allocator.evictions == (0, 0)
    taken = allocator.allocate_all([2, 2], BOB)
    assert taken is not None
    assert sorted(taken[0] + taken[1]) == [0, 1, 2, 3]


def test_a_large_page_that_one_group_takes_is_not_there_for_the_next() -> None:
    allocator = allocator_of(1, 64, 64)
    assert allocator.allocate_all([1, 1], ALICE) is None
    assert allocator.allocate_all([0, 1], ALICE) == [[], [0]]


def test_what_step_3_evicts_for_one_group_is_not_counted_as_the_next_group_s_own() -> None:
    """Alice's large page of group 1 is evictable and has an empty page. Group 0 needs a large page, and evicts it."""
    allocator = allocator_of(1, 128, 64)
    kept, empty = allocate(allocator, 1, 2, ALICE)
    allocator.keep(1, kept)
    allocator.release(1, [empty], 1, [2])
    allocator.release(1, [kept], 1, [1])
    assert allocator.evictable_large == 1
    assert allocator.allocate_all([1, 1], ALICE) is None
    assert allocator.allocate_all([0, 1], ALICE) == [[], [empty]]
    allocator.check_integrity()


def test_an_own_large_page_that_step_3_leaves_alone_is_counted() -> None:
    """As above, but Bob's cached page is older, and so it is his that group 0 evicts."""
    allocator = allocator_of(2, 128, 64)
    kept, empty = allocate(allocator, 1, 2, ALICE)
    bobs = allocate(allocator, 1, 2, BOB)
    cache(allocator, 1, bobs, step=1)
    allocator.keep(1, kept)
    allocator.release(1, [kept, empty], 2, [1, 2])
    assert allocator.allocate_all([2, 1], ALICE) is None
    assert allocator.allocate_all([1, 1], ALICE) == [[1], [empty]]
    assert allocator.evictions == (0, 2)
    allocator.check_integrity()


# ---- owners


def test_an_owner_s_empty_pages_are_left_to_it_while_there_are_others() -> None:
    allocator = allocator_of(3, 64, 192)
    alices = allocate(allocator, 0, 1, ALICE)
    bobs = allocate(allocator, 0, 1, BOB)
    allocate(allocator, 0, 3, CAROL)
    allocator.forget_owner(BOB)
    assert allocate(allocator, 0, 2, CAROL) == [bobs[0] + 1, bobs[0] + 2]
    assert allocate(allocator, 0, 1, ALICE) == [alices[0] + 1]
    assert allocate(allocator, 0, 1, CAROL) == [alices[0] + 2]
    allocator.check_integrity()


def test_pages_that_empty_after_their_owner_ended_are_nobody_s() -> None:
    allocator = allocator_of(2, 64, 192)
    alices = allocate(allocator, 0, 3, ALICE)
    allocator.share(0, alices)
    allocator.forget_owner(ALICE)
    for _ in range(2):
        allocator.release(0, alices[:1], 1, [1])
    assert allocate(allocator, 0, 3, BOB) == [3, 4, 5]
    assert allocate(allocator, 0, 1, BOB) == alices[:1]
    allocator.check_integrity()


# ---- holders


def test_pages_are_used_until_their_last_holder_lets_go() -> None:
    allocator = allocator_of(4, 64)
    pages = allocate(allocator, 0, 2, ALICE)
    allocator.share(0, pages)
    allocator.release(0, pages, 1, [1, 2])
    assert allocator.small_counts(0) == (0, 0, 2)
    assert allocator.all_holders() == {(0, pages[0]): 1, (0, pages[1]): 1}
    allocator.release(0, pages, 1, [1, 2])
    assert allocator.free_large == 4
    with pytest.raises(AssertionError, match="released too often"):
        allocator.release(0, pages, 1, [1, 2])


def test_only_pages_that_hold_something_can_be_shared_or_kept() -> None:
    allocator = allocator_of(4, 64)
    with pytest.raises(AssertionError, match="cannot be shared"):
        allocator.share(0, [0])
    with pytest.raises(AssertionError, match="not in use"):
        allocator.keep(0, 1)


def test_the_last_use_of_a_page_never_goes_back() -> None:
    allocator = allocator_of(2, 64)
    often, once = allocate(allocator, 0, 2, ALICE)
    allocator.keep(0, often)
    allocator.share(0, [often])
    allocator.release(0, [often], 9, [1])
    allocator.release(0, [often], 3, [1])
    cache(allocator, 0, [once], step=5)
    assert allocate(allocator, 0, 1, BOB) == [once]


def test_a_page_that_is_used_again_for_other_content_does_not_inherit_its_age() -> None:
    allocator = allocator_of(2, 64)
    first, second = allocate(allocator, 0, 2, ALICE)
    allocator.release(0, [first], 9, [1])
    assert allocate(allocator, 0, 1, ALICE) == [first]
    cache(allocator, 0, [first], step=3)
    cache(allocator, 0, [second], step=5)
    assert allocate(allocator, 0, 1, BOB) == [first]


# ---- numbers


def test_bytes_of_every_state_add_up_to_the_large_pages_of_a_group() -> None:
    allocator = allocator_of(8, 1000, 7, sizing=PageSizing.MAX)
    allocate(allocator, 0, 2, ALICE)
    cache(allocator, 1, allocate(allocator, 1, 126, BOB), step=1)
    allocate(allocator, 1, 5, BOB)
    stats = allocator.stats()
    assert (stats.empty_large, stats.evictable_large, stats.used_large) == (4, 1, 3)
    for group, page_bytes in zip(stats.groups, (1000, 7), strict=True):
        in_all = group.empty_bytes + group.evictable_pages * page_bytes + group.used_bytes + group.padding_bytes
        assert in_all == group.large_pages * stats.large_bytes
    attention, draft = stats.groups
    assert (attention.used_bytes, attention.padding_bytes) == (2000, 0)
    assert (draft.empty_pages, draft.evictable_pages, draft.used_pages) == (119, 126, 5)
    assert stats.fragmentation_bytes == allocator.fragmentation_bytes == 119 * 7 + 250


def test_runs_of_adjacent_pages_are_counted() -> None:
    assert [num_extents(pages) for pages in ([], [4], [4, 5, 6], [4, 6, 7], [5, 4])] == [0, 1, 1, 2, 2]
