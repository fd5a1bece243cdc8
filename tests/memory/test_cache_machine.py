"""The prefix cache, on an allocator, against the model: 200 sequences of 200 operations, and 2,000 in the slow campaign."""

from __future__ import annotations

import collections

import pytest
from hypothesis.stateful import run_state_machine_as_test

from disagg.memory.allocator import PageAllocator
from disagg.memory.cache import PrefixCache
from tests.memory.machines import cache_machine, campaign


@pytest.mark.parametrize("examples", [200, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_a_hit_is_the_longest_prefix_valid_in_every_group(examples: int) -> None:
    hits: collections.Counter[int] = collections.Counter()
    run_state_machine_as_test(cache_machine(PageAllocator, PrefixCache, hits), settings=campaign(examples))
    for tokens in range(0, 9, 2):
        assert hits[tokens] >= examples // 2, f"only {hits[tokens]} lookups found {tokens} tokens"
