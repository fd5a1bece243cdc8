"""What is left of a row is what a row that is sorted leaves, and a choice among it is the same."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disagg.types.sampling import SamplingParams
from disagg.worker import sampler as sampling
from disagg.worker.nucleus import nucleus
from disagg.worker.sampler import Sampler
from disagg.worker.sampler_order import largest

VOCABULARY = 9000
SHARES = st.one_of(st.just(math.inf), st.floats(0.01, 1.0))


@dataclass(frozen=True)
class Row:
    values: np.ndarray
    weights: np.ndarray
    allowed: np.ndarray
    top_k: int
    top_p: float

    def sorted_out(self) -> np.ndarray:
        """As sampler._filtered_race says it, of a row that is sorted as a whole."""
        ids = largest(torch.from_numpy(self.values).unsqueeze(0), self.values.size)[1][0].numpy()
        keep = (np.arange(ids.size) < self.top_k) & self.allowed[ids]
        upto = np.where(keep, self.weights[ids], 0.0).cumsum()
        before = np.concatenate([[0.0], upto[:-1]])
        found = np.zeros(ids.size, dtype=bool)
        found[ids] = keep & (before < self.top_p * upto[-1])
        return found


@st.composite
def rows(draw: st.DrawFn) -> Row:
    size = draw(st.integers(1, 700))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = (rng.standard_normal(size) * draw(st.sampled_from((1e-3, 0.3, 5.0, 60.0)))).astype(np.float32)
    if draw(st.booleans()):
        values = values.round(draw(st.integers(0, 2)))  # ties, also of 0.0 and -0.0
    scaled = (values.astype(np.float64) - values.max()) / draw(st.sampled_from((0.1, 1.0, 30.0)))
    allowed = scaled >= draw(st.sampled_from((-math.inf, -0.5, -4.0)))
    weights = np.exp(scaled)
    return Row(values, weights, allowed, draw(st.integers(1, size + 1)), draw(SHARES))


@given(rows())
def test_what_is_left_is_what_sorting_leaves(row: Row) -> None:
    found = nucleus(row.values, row.weights, row.allowed, row.top_k, row.top_p)
    if found is not None:
        assert np.array_equal(found, row.sorted_out())


def test_it_is_found_but_where_the_limit_lies_between_two_tokens() -> None:
    weights = np.asarray([0.5, 0.25, 0.125, 0.125])
    everything = np.ones(4, dtype=bool)
    values = np.log(weights).astype(np.float32)
    for top_p, left in ((0.4, 1), (0.6, 2), (0.8, 3), (0.9, 4)):
        found = nucleus(values, weights, everything, 4, top_p)
        assert found is not None and found.tolist() == [True] * left + [False] * (4 - left)
    for top_p in (0.5, 0.75, 0.875, 1.0, 0.5 + 1e-13):
        assert nucleus(values, weights, everything, 4, top_p) is None


MIX = (
    SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, seed=1),
    SamplingParams(max_tokens=9, temperature=0.5, top_p=0.99, min_p=0.01, seed=2),
    SamplingParams(max_tokens=9, temperature=2.0, top_k=6000, seed=3),
    SamplingParams(max_tokens=9, temperature=1.5, top_k=8000, top_p=0.7, min_p=0.2, seed=4),
    SamplingParams(max_tokens=9, temperature=1.0, top_p=0.3, seed=5),
    SamplingParams(max_tokens=9, temperature=1.0, min_p=0.05, seed=6),
)


@pytest.mark.parametrize("spread", [0.01, 0.5, 3.0])
def test_a_choice_is_that_of_sorted_rows_whoever_is_beside_it(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(len(MIX), VOCABULARY, generator=torch.Generator().manual_seed(8)) * spread

    def chosen(slots: list[int]) -> list[int]:
        here = Sampler(VOCABULARY, len(MIX), "cpu")
        for slot in slots:
            here.add(slot, MIX[slot], 0, (), (), ())
        found = []
        for _ in range(4):
            found += here.sample(logits, torch.tensor(slots), slots).token_ids.tolist()
        return found

    calls = []

    def counted(*args: object) -> object:
        calls.append(args)
        return nucleus(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(sampling, "nucleus", counted)
    together = chosen(list(range(len(MIX))))
    alone = [chosen([slot]) for slot in range(len(MIX))]
    assert calls, "no row had more than a few candidates"
    monkeypatch.setattr(sampling, "nucleus", lambda *_: None)
    assert chosen(list(range(len(MIX)))) == together
    assert together == [row[step] for step in range(4) for row in alone]
