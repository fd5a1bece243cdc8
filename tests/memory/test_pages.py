"""Pages: never handed out twice, never lost, shared and copied as the choices of a request need."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disagg.memory.pages import LegPages, PageAllocator, pages_for

NUM_PAGES = 12


class PagesMachine(RuleBasedStateMachine):
    """PageAllocator and LegPages against a list of holders, one name for each holder of each page."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES)
        self.holders: list[list[int]] = [[] for _ in range(NUM_PAGES)]
        self.groups: dict[int, tuple[int, ...]] = {}  # holder -> pages
        self.legs: list[tuple[LegPages, list[int]]] = []
        self.next_holder = 0

    def _hold(self, pages: tuple[int, ...]) -> int:
        holder = self.next_holder
        self.next_holder += 1
        for page in pages:
            self.holders[page].append(holder)
        self.groups[holder] = pages
        return holder

    def _release(self, holder: int) -> None:
        self.allocator.release(self.groups[holder])
        for page in self.groups.pop(holder):
            self.holders[page].remove(holder)

    @property
    def _free(self) -> list[int]:
        return [page for page, holders in enumerate(self.holders) if not holders]

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def allocate(self, count: int) -> None:
        free = self._free
        pages = self.allocator.allocate(count)
        if count > len(free):
            assert pages is None
        else:
            assert pages == tuple(free[:count]), "the lowest free pages"
            self._hold(pages)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = self.groups[data.draw(st.sampled_from(sorted(self.groups)))]
        self.allocator.share(pages)
        self._hold(pages)

    @precondition(lambda self: set(self.groups) - {h for _, hs in self.legs for h in hs})
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        of_legs = {holder for _, holders in self.legs for holder in holders}
        self._release(data.draw(st.sampled_from(sorted(set(self.groups) - of_legs))))

    @rule(trunk=st.integers(1, 9), more=st.integers(0, 9), choices=st.integers(1, 3), page_tokens=st.integers(1, 5))
    def allocate_leg(self, trunk: int, more: int, choices: int, page_tokens: int) -> None:
        total = trunk + more
        free = self._free
        needed = LegPages.count(trunk, total, choices, page_tokens)
        pages = LegPages.allocate(self.allocator, trunk, total, choices, page_tokens)
        assert (pages is None) == (needed > len(free))
        if pages is None:
            return
        tables = [pages.table(i) for i in range(choices)]
        assert all(len(table) == pages_for(total, page_tokens) for table in tables)
        assert len({page for table in tables for page in table}) == needed
        assert set().union(*tables) <= set(free)
        self._check_leg(pages, trunk, choices, page_tokens)
        self.legs.append((pages, [self._hold(table) for table in tables]))

    def _check_leg(self, pages: LegPages, trunk: int, choices: int, page_tokens: int) -> None:
        """A cell that a choice writes is its own; a cell of the trunk is shared, or copied from choice 0's."""
        first_written = trunk // page_tokens
        tables = [pages.table(i) for i in range(choices)]
        written = [page for table in tables for page in table[first_written:]]
        assert len(written) == len(set(written)), "two choices write one page"
        assert all(table[:first_written] == tables[0][:first_written] for table in tables)
        if trunk % page_tokens:
            assert pages.copies == tuple((tables[0][first_written], table[first_written]) for table in tables[1:])
        else:
            assert pages.copies == ()

    @precondition(lambda self: self.legs)
    @rule(data=st.data())
    def release_leg(self, data: st.DataObject) -> None:
        _, holders = self.legs.pop(data.draw(st.integers(0, len(self.legs) - 1)))
        for holder in holders:
            self._release(holder)

    @invariant()
    def the_allocator_agrees(self) -> None:
        self.allocator.check_integrity()
        assert self.allocator.free == len(self._free)
        assert self.allocator.used == NUM_PAGES - len(self._free)
        assert self.allocator.evictable == 0


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


def test_a_page_that_is_free_can_be_neither_shared_nor_released() -> None:
    allocator = PageAllocator(2)
    with pytest.raises(AssertionError, match="free and cannot be shared"):
        allocator.share((0,))
    pages = allocator.allocate(1)
    assert pages is not None
    allocator.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        allocator.release(pages)


def test_integrity_notices_a_page_that_is_free_and_held() -> None:
    allocator = PageAllocator(2)
    allocator._holders[1] = 1
    with pytest.raises(AssertionError, match="page 1"):
        allocator.check_integrity()


@given(tokens=st.integers(0, 1000), page_tokens=st.integers(1, 64))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_pages_for_is_the_least_that_holds_them(tokens: int, page_tokens: int) -> None:
    pages = pages_for(tokens, page_tokens)
    assert pages * page_tokens >= tokens
    assert tokens == 0 or (pages - 1) * page_tokens < tokens


def test_choices_of_a_leg_cost_a_prompt_once() -> None:
    assert LegPages.count(32, 40, 1, 16) == 3
    assert LegPages.count(32, 40, 4, 16) == 2 + 4
    assert LegPages.count(33, 48, 4, 16) == 2 + 4, "the partial page is each choice's own"
