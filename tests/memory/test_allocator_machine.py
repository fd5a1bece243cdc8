"""The page allocator against the model: 200 sequences of 200 operations; 2,000 of them in `make test-slow`, 20 in
`make check`."""

from __future__ import annotations

import collections
from random import Random

import pytest

from disagg.memory.allocator import PageAllocator
from tests.memory.machines import EXAMPLES, POOLS, allocator_machine, run_campaign
from tests.memory.model import ANY_EMPTY, EMPTY_LARGE, EVICT_LARGE, EVICT_SMALL, OWN_EMPTY, Page, PoolModel


@EXAMPLES
def test_the_allocator_follows_the_five_steps(examples: int) -> None:
    """Each step has to give pages."""
    steps = (OWN_EMPTY, EMPTY_LARGE, EVICT_LARGE, ANY_EMPTY, EVICT_SMALL)
    run_campaign(lambda counter: allocator_machine(PageAllocator, counter), examples, steps, at_least=examples // 2)


def test_groups_before_may_evict_what_a_later_group_counts_on() -> None:
    """An owner whose only empty small pages lie in an evictable large page. Asked for both groups, step 3 for the first one
    takes that large page, so that step 1 for the second has nothing: all or nothing is nothing, and nothing is evicted."""
    layout, _ = POOLS["two to three"]
    evicted: list[Page] = []
    allocator = PageAllocator(layout, 2, lambda g, page: evicted.append((g, page)))
    mine = allocator.allocate(1, 3, owner=1)
    others = allocator.allocate(0, 2, owner=2)
    assert mine is not None and others is not None
    allocator.keep(1, mine[0])
    allocator.release(1, mine, 1, [1, 2, 3])
    assert allocator.small_counts(1) == (2, 1, 0) and allocator.evictable_large == 1
    assert allocator.allocate_all([1, 2], owner=1) is None
    assert evicted == []
    assert allocator.allocate_all([0, 2], owner=1) == [[], mine[1:]]


@pytest.mark.parametrize("pool", sorted(POOLS))
def test_the_order_of_eviction_outlives_thousands_of_uses(pool: str) -> None:
    """Whatever is remembered of earlier uses of a page neither piles up nor comes back. One sequence fills the pool and
    keeps one page in use; others come, each for some pages, and end; then all of it is asked for again."""
    layout, num_large = POOLS[pool]
    random = Random(pool)
    evicted: list[Page] = []
    allocator = PageAllocator(layout, num_large, lambda g, page: evicted.append((g, page)))
    model = PoolModel.empty(layout, num_large, collections.Counter())
    count = num_large * layout.per_large[0]
    pages = allocator.allocate(0, count, owner=1)
    model.allocate(0, count, 1, pages)
    assert pages is not None
    for page in pages:
        allocator.keep(0, page)
        model.keep(0, page)
    lens = {page: random.randrange(8) for page in pages}
    for both in (allocator, model):
        both.release(0, pages[1:], 0, [lens[page] for page in pages[1:]])
    for step in range(1, 2000):
        used = random.sample(pages[1:], random.randint(1, min(8, count - 1)))
        for both in (allocator, model):
            both.share(0, used)
            both.release(0, used, step // 2, [lens[page] for page in used])
    allocator.check_integrity()
    expected = []
    for owner in range(2, count + 1):
        given = allocator.allocate(0, 1, owner)
        assert given is not None
        expected += model.allocate(0, 1, owner, given)
        assert sorted(evicted) == sorted(expected)
    assert allocator.allocate(0, 1, 0) is None
