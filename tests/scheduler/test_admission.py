"""Waiting for another prompt: what both begin with, and when it is worth it."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from disagg.memory.hashing import chain_root, extend_hashes
from disagg.scheduler.admission import common_pages, should_wait

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
