"""Policies: within the budget, first come first served, every token once, a sample only where a prompt ends."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from disagg.scheduler.budget import of_tokens
from disagg.scheduler.policies import (
    POLICIES,
    PREEMPTION,
    Candidate,
    Phase,
    Running,
    StepPlan,
    StepRun,
    StepState,
    decodes_first,
    fewest_tokens,
    latest,
    prefill_only,
)

lengths = st.lists(st.integers(0, 40), max_size=8)
# One token of a prompt is left as often as one is decoded: nothing but its phase says which it is.
phases = st.tuples(st.just(Phase.PREFILL), st.integers(0, 40)) | st.tuples(
    st.sampled_from((Phase.PREFILL, Phase.DECODE)), st.just(1)
)
prompts = st.lists(st.tuples(phases, st.sampled_from((0, 0, 1, 7))), max_size=8).map(
    lambda each: tuple(
        Candidate(seq_id, phase, remaining, most) for seq_id, ((phase, remaining), most) in enumerate(each)
    )
)


def prefill(candidates: tuple[Candidate, ...], budget: int) -> StepPlan:
    return prefill_only(candidates, StepState(of_tokens(budget)))


def decode(candidates: tuple[Candidate, ...], budget: int) -> StepPlan:
    return decodes_first(candidates, StepState(of_tokens(budget)))


batches = st.lists(st.integers(1, 9), min_size=1, max_size=8).map(
    lambda tokens: tuple(Running(seq_id, 100 - seq_id, each) for seq_id, each in enumerate(tokens))
)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(candidates=prompts, budget=st.integers(0, 64))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_policy_exceeds_its_budget_or_runs_a_sequence_twice(
    name: str, candidates: tuple[Candidate, ...], budget: int
) -> None:
    plan = POLICIES[name].schedule(candidates, StepState(of_tokens(budget), whole=POLICIES[name].whole_prompts))
    assert plan.num_tokens <= budget
    ids = [run.seq_id for run in plan.runs]
    assert len(ids) == len(set(ids)), "each once"
    known = {candidate.seq_id: candidate for candidate in candidates}
    for run in plan.runs:
        candidate = known[run.seq_id]
        assert 0 < run.num_tokens <= (candidate.most or run.num_tokens), "at most what one run may have"
        assert run.sample == (run.num_tokens == candidate.remaining), "a sample with the last known token only"


@given(remaining=lengths, budget=st.integers(1, 64))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_prefill_computes_every_token_once_and_samples_with_the_last(remaining: list[int], budget: int) -> None:
    left = dict(enumerate(remaining))
    computed = dict.fromkeys(left, 0)
    steps = 0
    while any(left.values()):
        plan = prefill(tuple(Candidate(s, Phase.PREFILL, tokens) for s, tokens in left.items()), budget)
        assert plan.num_tokens == min(budget, sum(left.values())), "no token of the budget is left over"
        for run in plan.runs:
            earlier = [s for s, tokens in left.items() if s < run.seq_id and tokens]
            done = {r.seq_id for r in plan.runs if r.sample}
            assert set(earlier) <= done, "nobody overtakes a prompt that is not finished by this step"
            computed[run.seq_id] += run.num_tokens
            left[run.seq_id] -= run.num_tokens
            assert left[run.seq_id] >= 0
            assert run.sample == (left[run.seq_id] == 0)
        steps += 1
        assert steps < 400
    assert computed == dict(enumerate(remaining))


@given(candidates=prompts, budget=st.integers(0, 64))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_decode_gives_one_token_to_each_that_decodes_before_anything_is_computed_again(
    candidates: tuple[Candidate, ...], budget: int
) -> None:
    decoding = [c.seq_id for c in candidates if c.phase is Phase.DECODE][:budget]
    runs = decode(candidates, budget).runs
    assert runs[: len(decoding)] == tuple(StepRun(s, 1, True) for s in decoding)
    again = tuple(c for c in candidates if c.phase is Phase.PREFILL)
    assert runs[len(decoding) :] == prefill(again, budget - len(decoding)).runs


def test_a_long_prompt_is_cut_where_the_budget_ends() -> None:
    plan = prefill(tuple(Candidate(seq_id, Phase.PREFILL, tokens) for seq_id, tokens in ((1, 5), (2, 9), (3, 1))), 8)
    assert plan.runs == (StepRun(1, 5, True), StepRun(2, 3, False))


def test_a_run_that_stops_at_a_checkpoint_leaves_the_rest_of_the_budget_to_the_next() -> None:
    plan = prefill((Candidate(1, Phase.PREFILL, 9, most=2), Candidate(2, Phase.PREFILL, 9)), 8)
    assert plan.runs == (StepRun(1, 2, False), StepRun(2, 6, False))


def test_what_is_computed_again_takes_what_decoding_leaves_and_samples_at_its_end() -> None:
    recomputed, short = Candidate(1, Phase.PREFILL, 9, most=4), Candidate(3, Phase.PREFILL, 2)
    plan = decode((recomputed, Candidate(2, Phase.DECODE, 1), short, Candidate(4, Phase.DECODE, 1)), 8)
    assert plan.runs == (StepRun(2, 1, True), StepRun(4, 1, True), StepRun(1, 4, False), StepRun(3, 2, True))


def test_the_last_token_of_a_prompt_is_no_decode() -> None:
    prompt, decoding = Candidate(1, Phase.PREFILL, 1), Candidate(2, Phase.DECODE, 1)
    assert decode((prompt, decoding), 1).runs == (StepRun(2, 1, True),)


@pytest.mark.parametrize("name", sorted(PREEMPTION))
@given(running=batches)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_a_victim_is_one_of_those_that_run(name: str, running: tuple[Running, ...]) -> None:
    assert PREEMPTION[name](running) in running


@given(running=batches)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_whoever_came_first_never_gives_way_to_one_who_came_later(running: tuple[Running, ...]) -> None:
    victim = latest(running)
    assert all(other.arrival <= victim.arrival for other in running)


@given(running=batches)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_whoever_loses_least_gives_way_and_of_equals_the_latest(running: tuple[Running, ...]) -> None:
    victim = fewest_tokens(running)
    for other in running:
        assert victim.tokens <= other.tokens
        assert other.tokens > victim.tokens or other.arrival <= victim.arrival


def test_the_least_urgent_gives_way() -> None:
    running = (Running(1, 5, 9, priority=0), Running(2, 1, 30, priority=1), Running(3, 9, 2, priority=-1))
    assert latest(running).seq_id == fewest_tokens(running).seq_id == 2
