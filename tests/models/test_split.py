"""Which layers each pipeline stage has: as evenly as they go, and never cut between a cache and who shares it."""

from __future__ import annotations

from itertools import combinations, pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from disagg.models.split import Layers, most_stages, split_layers


@st.composite
def some_layers(draw: st.DrawFn) -> Layers:
    number = draw(st.integers(1, 8))
    costs = [float(cost) for cost in draw(st.lists(st.integers(1, 9), min_size=number, max_size=number))]
    keeps = draw(st.sets(st.integers(0, number - 1), min_size=1))
    shared = draw(st.sets(st.tuples(st.integers(0, number - 1), st.integers(0, number - 1)), max_size=2))
    shared = {(max(pair), min(pair)) for pair in shared if pair[0] != pair[1]}
    return Layers(costs, float(draw(st.integers(0, 12))), keeps, shared)


def possible(layers: Layers, stages: int) -> list[tuple[int, ...]]:
    """All splits, by trying every one."""
    end, found = len(layers.costs), []
    for inner in combinations(range(1, end), stages - 1):
        cuts = (0, *inner, end)
        spans = list(pairwise(cuts))
        kept = all(any(layer in layers.keeps for layer in range(*span)) for span in spans)
        together = all(
            any(first <= earlier < stop and first <= layer < stop for first, stop in spans)
            for layer, earlier in layers.shared
        )
        if kept and together:
            found.append(cuts)
    return found


def cost_of(layers: Layers, cuts: tuple[int, ...]) -> float:
    costs = [sum(layers.costs[first:stop]) for first, stop in pairwise(cuts)]
    return max(*costs[:-1], costs[-1] + layers.head) if len(costs) > 1 else costs[0] + layers.head


@settings(max_examples=400, derandomize=True, deadline=None)
@given(some_layers(), st.integers(1, 8))
def test_the_most_costly_stage_costs_least(layers: Layers, stages: int) -> None:
    every = possible(layers, stages)
    found = split_layers(layers, stages)
    assert (found is None) == (not every)
    if found is not None:
        assert found in every and cost_of(layers, found) == min(cost_of(layers, cuts) for cuts in every)


@settings(max_examples=400, derandomize=True, deadline=None)
@given(some_layers())
def test_the_most_stages_are_those_up_to_which_there_is_a_split(layers: Layers) -> None:
    most = most_stages(layers)
    for stages in range(1, len(layers.costs) + 2):
        assert (split_layers(layers, stages) is not None) == (stages <= most)


@pytest.mark.parametrize(("stages", "cuts"), [(1, (0, 30)), (2, (0, 17, 30)), (3, (0, 11, 22, 30))])
def test_the_head_makes_the_last_stage_shorter(stages: int, cuts: tuple[int, ...]) -> None:
    assert split_layers(Layers([1.0] * 30, 4.0, set(range(30))), stages) == cuts
