"""Pipeline stages: how those that decode are shared among plans, and what bubbles come to."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from disagg.scheduler.budget import Budget
from disagg.scheduler.pipeline import Bubbles, decode_share, plans_in_flight
from disagg.scheduler.step_times import StepTimes

QUICK = settings(max_examples=200, derandomize=True, deadline=None)


def test_as_many_plans_are_in_flight_as_there_are_stages_and_two_at_least() -> None:
    assert [plans_in_flight(stages) for stages in (1, 2, 3, 8)] == [2, 2, 3, 8]


@QUICK
@given(st.integers(0, 500), st.integers(2, 16))
def test_all_that_decode_are_in_the_plans_in_flight_and_none_has_more_than_it_must(decoding: int, stages: int) -> None:
    share, plans = decode_share(decoding, stages), plans_in_flight(stages)
    assert share * plans >= decoding > (share - 1) * plans or decoding == share == 0


@QUICK
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.floats(0, 1), st.lists(st.floats(0.001, 1), min_size=4, max_size=4)), max_size=20),
)
def test_bubbles_are_the_time_with_a_plan_in_flight_less_the_time_of_computing(
    stages: int, work: list[tuple[float, list[float]]]
) -> None:
    """work: of each plan, how long after the one before it is sent, and how long each stage takes for it. A stage computes a
    plan when it, and the stage before, have computed what comes before."""
    events: list[tuple[float, int, str, int, float]] = []
    sent_s, free_s, over = 0.0, [0.0] * stages, []
    for number, (later_s, took) in enumerate(work):
        sent_s += later_s
        events.append((sent_s, number, "sent", 0, 0.0))
        at_s = sent_s
        for stage in range(stages):
            at_s = free_s[stage] = max(at_s, free_s[stage]) + took[stage]
            events.append((at_s, number, "computed", stage, took[stage]))
        over.append((sent_s, at_s))
        events.append((at_s, number, "reported", stages, 0.0))
    bubbles = Bubbles(stages)
    before = [0.0] * stages
    for now_s, _, what, stage, took_s in sorted(events, key=lambda each: (each[0], each[1], each[3])):
        if what == "sent":
            bubbles.sent(now_s)
        elif what == "computed":
            bubbles.computed(stage, took_s, now_s)
        else:
            bubbles.reported(now_s)
        assert all(new >= old for new, old in zip(bubbles.bubble_s, before, strict=True)), "a counter never falls"
        before = list(bubbles.bubble_s)
    spanned = covered(over)
    for stage in range(stages):
        busy = sum(took[stage] for _, took in work)
        assert bubbles.busy_s[stage] == pytest.approx(busy)
        assert bubbles.bubble_s[stage] == pytest.approx(spanned - busy, abs=1e-9)


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of their union."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def test_a_full_pipeline_has_bubbles_where_it_fills_and_drains_only() -> None:
    bubbles = Bubbles(2)
    for _ in range(2):
        bubbles.sent(0.0)
    for number in range(10):
        bubbles.computed(0, 1.0, number + 1.0)
        if number:
            bubbles.computed(1, 1.0, number + 1.0)
            bubbles.reported(number + 1.0)
            if number < 9:
                bubbles.sent(number + 1.0)
    bubbles.computed(1, 1.0, 11.0)
    bubbles.reported(11.0)
    assert bubbles.bubble_s == [1.0, 1.0] and bubbles.busy_s == [10.0, 10.0]


@QUICK
@given(st.floats(0, 0.01), st.floats(1e-6, 1e-3), st.floats(50, 5000))
def test_a_step_behind_many_tokens_gets_as_many_as_cost_what_a_first_chunk_costs(
    fixed: float, each: float, attention_tokens: float
) -> None:
    times = StepTimes()
    assert times.even(256) == Budget(256, most_tokens=256)
    for number in range(16):
        start, count = 200 * number, 64 + 8 * (number % 5)
        attended = count * (start + count / 2)
        times.observe([(start, count)], fixed + each * count + each / attention_tokens * attended)
    budget = times.even(256)
    assert budget.most_tokens == budget.cost == 256
    assert budget.attention_tokens == pytest.approx(attention_tokens, rel=0.05)
    assert budget.tokens_at(10_000) < budget.tokens_at(1000) < 256
