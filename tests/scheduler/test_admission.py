"""Waiting for another prompt: what both begin with, and when it is worth it."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from disagg.memory.hashing import chain_root, extend_hashes
from disagg.scheduler.admission import MOST_BEFORE_AWAITED, Growing, common_pages, peak_growth, should_wait

PAGE_TOKENS = 4
texts = st.lists(st.integers(0, 1), max_size=40)


def named(tokens: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, chain_root("test"), tokens, PAGE_TOKENS)
    return hashes


@given(one=texts, other=texts, shared=texts)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_what_two_prompts_share_is_counted_in_whole_pages(one: list[int], other: list[int], shared: list[int]) -> None:
    one, other = shared + one, shared + other
    equal = 0
    while equal < min(len(one), len(other)) and one[equal] == other[equal]:
        equal += 1
    assert common_pages(named(one), named(other)) == equal // PAGE_TOKENS


def test_a_prompt_waits_for_as_much_as_a_step_computes() -> None:
    assert should_wait(common_tokens=512, cached_tokens=0, computed_tokens=0, last_tokens=512, step_tokens=512)
    assert not should_wait(common_tokens=511, cached_tokens=0, computed_tokens=0, last_tokens=512, step_tokens=512)


def test_what_the_first_found_in_the_cache_the_second_finds_too() -> None:
    assert not should_wait(
        common_tokens=2048, cached_tokens=2048, computed_tokens=2048, last_tokens=9000, step_tokens=512
    )


def test_nobody_waits_when_it_is_all_there() -> None:
    assert should_wait(common_tokens=2048, cached_tokens=0, computed_tokens=2047, last_tokens=2048, step_tokens=512)
    assert not should_wait(common_tokens=2048, cached_tokens=0, computed_tokens=2048, last_tokens=2048, step_tokens=512)


def test_nobody_waits_for_one_that_its_tenants_others_keep_from_going_on() -> None:
    def waits(tokens: int, others_first: int) -> bool:
        return should_wait(
            tokens, cached_tokens=0, computed_tokens=0, last_tokens=tokens, step_tokens=512, others_first=others_first
        )

    assert waits(1024, 0) and waits(1024, MOST_BEFORE_AWAITED) and not waits(1024, MOST_BEFORE_AWAITED + 1)
    assert waits(100_000, 100_000) and not waits(100_000, 100_001), "what is longer waits longer"


# ---- how much those that decode will come to need


def growth_by_steps(growing: list[Growing], page_tokens: int, lookahead_tokens: int, lag_steps: int) -> int:
    """Step by step."""
    most = 0
    for step in range(lookahead_tokens + 1):
        pages = 0
        for each in growing:
            if each.steps + lag_steps < step:
                grown = -(-max(0, each.steps - each.room_tokens) // page_tokens)
                pages -= max(0, each.own_tokens // page_tokens - grown)
            else:
                pages += -(-max(0, min(step, each.steps) - each.room_tokens) // page_tokens)
        most = max(most, pages)
    return most


GROWING = st.builds(Growing, steps=st.integers(0, 40), room_tokens=st.integers(-20, 30), own_tokens=st.integers(0, 60))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(GROWING, max_size=8), st.integers(1, 8), st.integers(0, 60), st.integers(0, 3))
def test_the_peak_is_never_less_than_what_is_needed_step_by_step(
    growing: list[Growing], page_tokens: int, lookahead_tokens: int, lag_steps: int
) -> None:
    needed = growth_by_steps(growing, page_tokens, lookahead_tokens, lag_steps)
    said = peak_growth(growing, page_tokens, lookahead_tokens, lag_steps)
    assert needed <= said + 1e-9
    assert said <= needed + len(growing) * 2, "a page or two for each at the most"


def test_what_ends_before_gives_its_pages_to_what_goes_on() -> None:
    ends, goes_on = Growing(steps=10, room_tokens=10, own_tokens=100), Growing(steps=80, room_tokens=0, own_tokens=100)
    assert peak_growth([goes_on], 1, 1000) == 80
    assert peak_growth([ends, goes_on], 1, 1000) == 10, "all but the first ten find room in what the other had"
    assert peak_growth([goes_on], 1, 30) == 30, "nobody looks further"
