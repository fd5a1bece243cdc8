"""What a step may cost: chunks of equal cost, and never more than is allowed."""

from __future__ import annotations

import math
from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from disagg.scheduler.budget import Budget, of_tokens
from disagg.scheduler.policies import POLICIES, Candidate, Phase, StepRun, StepState, decodes_first

costs = st.floats(0, 1e6, allow_nan=False)
attention = st.floats(1, 1e7) | st.just(math.inf)
starts = st.integers(0, 1 << 20)


@given(cost=costs, attention_tokens=attention, start=starts)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_as_many_tokens_as_are_paid_for_and_not_one_more(cost: float, attention_tokens: float, start: int) -> None:
    budget = Budget(cost, attention_tokens)
    tokens = budget.tokens_at(start)
    slack = 1e-6 * max(1.0, cost)
    assert tokens >= 0
    assert cost < 1 or budget.cost_of(start, tokens) <= cost + slack
    assert cost < 1 or budget.cost_of(start, tokens + 1) > cost - slack


@given(start=starts, count=st.integers(0, 4096), attention_tokens=st.integers(1, 1 << 24))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_run_costs_what_its_tokens_attend_to_one_by_one(start: int, count: int, attention_tokens: int) -> None:
    """Each token attends to those before it and, on the mean of a run, to half of itself."""
    exact = count + Fraction(sum(2 * (start + at) + 1 for at in range(count)), 2 * attention_tokens)
    assert Budget(0, attention_tokens).cost_of(start, count) == pytest.approx(float(exact), rel=1e-9)


@given(remaining=st.integers(1, 20_000), cost=st.integers(50, 5000), attention_tokens=st.integers(500, 100_000))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_chunks_of_one_prompt_cost_the_same_but_for_the_last(remaining: int, cost: int, attention_tokens: int) -> None:
    start, budget = 0, Budget(float(cost), attention_tokens)
    each = []
    while remaining:
        (run,) = decodes_first((Candidate(1, Phase.PREFILL, remaining, start=start),), StepState(budget)).runs
        each.append(budget.cost_of(start, run.num_tokens))
        start, remaining = start + run.num_tokens, remaining - run.num_tokens
    one_more = 1 + start / attention_tokens + 1
    assert all(cost - one_more <= spent <= cost * (1 + 1e-9) for spent in each[:-1])


def test_a_prompt_of_1000_is_five_chunks_of_200() -> None:
    left, cut = 1000, []
    while left:
        (run,) = decodes_first((Candidate(1, Phase.PREFILL, left, start=1000 - left),), StepState(of_tokens(200))).runs
        cut.append(run.num_tokens)
        left -= run.num_tokens
    assert cut == [200] * 5


def test_a_chunk_of_600_that_has_500_pages_becomes_500_and_others_have_their_own() -> None:
    prompts = (Candidate(1, Phase.PREFILL, 600, most=500), Candidate(2, Phase.PREFILL, 3))
    runs = decodes_first((*prompts, Candidate(3, Phase.DECODE, 1)), StepState(of_tokens(1000))).runs
    assert runs == (StepRun(3, 1, True), StepRun(1, 500, False), StepRun(2, 3, True))


@pytest.mark.parametrize("most", [0, -1, -600])
def test_no_chunk_is_ever_negative(most: int) -> None:
    for policy in POLICIES.values():
        plan = policy.schedule((Candidate(1, Phase.PREFILL, 600, most=most),), StepState(of_tokens(100)))
        assert plan.runs == ()


def test_decodes_that_cost_more_than_there_is_all_run_and_leave_a_prompt_its_least_part() -> None:
    decodes = tuple(Candidate(i, Phase.DECODE, 1, start=50_000) for i in range(8))
    state = StepState(Budget(20.0, 1000.0, most_tokens=64), least_chunk=16)
    runs = decodes_first((*decodes, Candidate(99, Phase.PREFILL, 500)), state).runs
    assert [run.num_tokens for run in runs] == [1] * 8 + [16]


def test_the_least_part_is_no_more_than_decodes_leave_of_the_most_tokens() -> None:
    decodes = tuple(Candidate(i, Phase.DECODE, 1) for i in range(60))
    state = StepState(Budget(0.0, 1000.0, most_tokens=64), least_chunk=16)
    runs = decodes_first((*decodes, Candidate(99, Phase.PREFILL, 500)), state).runs
    assert [run.num_tokens for run in runs] == [1] * 60 + [4]


def test_the_least_part_is_one_for_all_prompts() -> None:
    state = StepState(Budget(0.0, 1000.0, most_tokens=64), least_chunk=16)
    runs = decodes_first(tuple(Candidate(at, Phase.PREFILL, 10) for at in range(3)), state).runs
    assert [run.num_tokens for run in runs] == [10, 6]


@given(
    cost=st.floats(0, 100),
    attention_tokens=st.floats(1e-3, 1e6),
    prompts=st.lists(st.tuples(st.integers(1, 4096), starts), min_size=1, max_size=5),
    least_chunk=st.integers(1, 16),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_prompts_get_their_least_part_however_much_they_attend_to(
    cost: float, attention_tokens: float, prompts: list[tuple[int, int]], least_chunk: int
) -> None:
    """Or one behind a long context would stand still for ever where steps cannot be as short as they should."""
    candidates = tuple(Candidate(at, Phase.PREFILL, left, start=start) for at, (left, start) in enumerate(prompts))
    state = StepState(Budget(cost, attention_tokens, most_tokens=64), least_chunk=least_chunk)
    for policy in POLICIES.values():
        tokens = policy.schedule(candidates, state).num_tokens
        assert min(least_chunk, sum(left for left, _ in prompts)) <= tokens <= 64


def test_a_whole_prompt_that_does_not_fit_beside_others_waits_and_one_alone_does_not() -> None:
    state = StepState(of_tokens(100), whole=True)
    prompts = tuple(Candidate(i, Phase.PREFILL, tokens) for i, tokens in enumerate((60, 50, 10)))
    assert decodes_first(prompts, state).runs == (StepRun(0, 60, True),)
    assert decodes_first(prompts[1:], state).runs == (StepRun(1, 50, True), StepRun(2, 10, True))
    assert decodes_first((Candidate(7, Phase.PREFILL, 300),), state).runs == (StepRun(7, 100, False),)
