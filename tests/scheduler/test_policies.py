"""Policies: within the budget, first come first served, every token once, a sample only where a prompt ends."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from disagg.scheduler.policies import POLICIES, Candidate, StepRun, decode_only, prefill_only

prompts = st.lists(st.integers(0, 40), max_size=8).map(
    lambda lengths: tuple(Candidate(seq_id, remaining) for seq_id, remaining in enumerate(lengths))
)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(candidates=prompts, budget=st.integers(0, 64))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_policy_exceeds_its_budget_or_runs_a_sequence_twice(
    name: str, candidates: tuple[Candidate, ...], budget: int
) -> None:
    plan = POLICIES[name](candidates, budget)
    assert plan.num_tokens <= budget
    assert all(run.num_tokens > 0 for run in plan.runs)
    ids = [run.seq_id for run in plan.runs]
    assert ids == sorted(set(ids)), "in order of arrival, each once"
    assert set(ids) <= {candidate.seq_id for candidate in candidates}


@given(candidates=prompts, budget=st.integers(1, 64))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_prefill_computes_every_token_once_and_samples_with_the_last(
    candidates: tuple[Candidate, ...], budget: int
) -> None:
    remaining = {c.seq_id: c.remaining for c in candidates}
    computed = dict.fromkeys(remaining, 0)
    steps = 0
    while any(remaining.values()):
        plan = prefill_only(tuple(Candidate(s, left) for s, left in remaining.items()), budget)
        assert plan.num_tokens == min(budget, sum(remaining.values())), "no token of the budget is left over"
        for run in plan.runs:
            earlier = [s for s, left in remaining.items() if s < run.seq_id and left]
            done = {r.seq_id for r in plan.runs if r.sample}
            assert set(earlier) <= done, "nobody overtakes a prompt that is not finished by this step"
            computed[run.seq_id] += run.num_tokens
            remaining[run.seq_id] -= run.num_tokens
            assert remaining[run.seq_id] >= 0
            assert run.sample == (remaining[run.seq_id] == 0)
        steps += 1
        assert steps < 400
    assert computed == {c.seq_id: c.remaining for c in candidates}


@given(candidates=prompts, budget=st.integers(0, 64))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_decode_gives_one_token_to_each_that_decodes(candidates: tuple[Candidate, ...], budget: int) -> None:
    decoding = [c.seq_id for c in candidates if c.remaining == 0]
    assert decode_only(candidates, budget).runs == tuple(StepRun(s, 1, True) for s in decoding[:budget])


def test_a_long_prompt_is_cut_where_the_budget_ends() -> None:
    plan = prefill_only((Candidate(1, 5), Candidate(2, 9), Candidate(3, 1)), 8)
    assert plan.runs == (StepRun(1, 5, True), StepRun(2, 3, False))
