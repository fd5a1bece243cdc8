"""The prefix cache, on an allocator, against the model: 200 sequences of 200 operations; 2,000 of them in `make test-slow`,
20 in `make check`."""

from __future__ import annotations

from disagg.memory.allocator import PageAllocator
from disagg.memory.cache import PrefixCache
from tests.memory.machines import EXAMPLES, cache_machine, run_campaign


@EXAMPLES
def test_a_hit_is_the_longest_prefix_valid_in_every_group(examples: int) -> None:
    """Lookups have to find every number of tokens that there may be."""
    run_campaign(
        lambda hits: cache_machine(PageAllocator, PrefixCache, hits), examples, range(0, 9, 2), at_least=examples // 2
    )
