"""Which data-parallel rank a request goes to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.scheduler.rank_choice import RankState, pick_rank

STATES = st.builds(RankState, tokens=st.integers(0, 100), hit_tokens=st.integers(0, 50), empty_pages=st.integers(0, 9))


@given(st.lists(STATES, min_size=1, max_size=6))
def test_no_other_rank_would_have_less_to_do_nor_as_little_and_more_room(ranks: list[RankState]) -> None:
    picked = ranks[pick_rank(ranks)]
    for other in ranks:
        assert picked.tokens - picked.hit_tokens <= other.tokens - other.hit_tokens
        if picked.tokens - picked.hit_tokens == other.tokens - other.hit_tokens:
            assert picked.empty_pages >= other.empty_pages


def test_a_prefix_counts_as_much_as_it_spares() -> None:
    assert pick_rank([RankState(100, 0, 0), RankState(130, 31, 0)]) == 1
    assert pick_rank([RankState(100, 0, 0), RankState(130, 29, 0)]) == 0


def test_of_ranks_that_are_alike_the_one_with_the_emptiest_pool_is_taken_and_else_the_first() -> None:
    assert pick_rank([RankState(0, 0, 3), RankState(0, 0, 5), RankState(0, 0, 5)]) == 1
