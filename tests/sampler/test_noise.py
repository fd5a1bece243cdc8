from __future__ import annotations

import numpy as np
import torch

from disagg.worker.noise import approximate_exponentials, exponentials, row_keys, token_bits
from tests.sampler import reference

torch.set_num_threads(1)


def keys(seeds: list[int], choices: list[int], indices: list[int]) -> torch.Tensor:
    return torch.from_numpy(row_keys(np.array(seeds, np.uint64), np.array(choices), np.array(indices)))


def assert_uniform(observed: np.ndarray, what: str) -> None:
    """Chi-square of equally likely cells, at five standard deviations of its normal approximation."""
    expected = observed.sum() / observed.size
    chi2 = ((observed - expected) ** 2 / expected).sum()
    freedom = observed.size - 1
    assert abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5, (what, chi2, freedom)


def test_bits_equal_the_definition_in_plain_integers():
    seeds = [0, 1, 2**63, 2**64 - 1, 12345]
    choices = [0, 3, 63, 1, 0]
    indices = [0, 1, 4095, 7, 131071]
    token_ids = [0, 1, 2, 49151, 151935, 2**31 - 1]
    bits = token_bits(keys(seeds, choices, indices), torch.tensor(token_ids))
    for row, key in enumerate(zip(seeds, choices, indices, strict=True)):
        assert bits[row].tolist() == [reference.noise_bits(*key, t) for t in token_ids]


def test_a_shard_of_the_vocabulary_sees_the_same_noise():
    k = keys([5, 6, 7], [0, 0, 1], [0, 9, 2])
    whole = token_bits(k, torch.arange(4096))
    assert torch.equal(token_bits(k, torch.arange(1024, 2048)), whole[:, 1024:2048])
    some = torch.tensor([[7, 4095, 7], [0, 1, 2], [5, 4, 3]])
    assert torch.equal(token_bits(k, some), whole.gather(1, some))


def test_noise_is_finite_and_the_approximation_is_close_where_it_decides():
    k = keys(list(range(64)), [0] * 64, [0] * 64)
    exact, close = exponentials(k, torch.arange(20000)), approximate_exponentials(k, torch.arange(20000))
    assert exact.min() > 0 and exact.isfinite().all()
    assert close.min() > 0 and close.isfinite().all()
    small = exact < 8.0
    assert (((close - exact).abs() / exact)[small] < 1e-3).all()
    smaller = exact < 1.0
    assert (((close - exact).abs() / exact)[smaller] < 1e-6).all()


def test_bits_are_uniform_over_seeds_choices_indices_and_tokens():
    n = 40000
    rows = {
        "seed": keys(list(range(n)), [0] * n, [0] * n),
        "choice": keys([9] * n, list(range(n)), [0] * n),
        "index": keys([9] * n, [0] * n, list(range(n))),
    }
    for what, k in rows.items():
        bits = token_bits(k, torch.tensor([0, 1, 31999])).numpy()
        for column in range(3):
            assert_uniform(np.bincount(bits[:, column] >> 23, minlength=256), f"{what} high")
            assert_uniform(np.bincount(bits[:, column] & 255, minlength=256), f"{what} low")
    for seed in range(5):
        bits = token_bits(keys([seed], [0], [0]), torch.arange(n)).numpy()[0]
        assert_uniform(np.bincount(bits >> 23, minlength=256), f"tokens of seed {seed}")


def test_neighbours_are_independent_in_seed_choice_index_and_token():
    n = 40000
    k = {
        "seed": keys(list(range(n)), [0] * n, [0] * n),
        "choice": keys([9] * n, list(range(n)), [0] * n),
        "index": keys([9] * n, [0] * n, list(range(n))),
    }
    series = {what: token_bits(rows, torch.tensor([17])).numpy()[:, 0] for what, rows in k.items()}
    series["token"] = token_bits(keys([3], [0], [0]), torch.arange(n)).numpy()[0]
    for what, bits in series.items():
        for lag in (1, 2, 64):
            pairs = (bits[:-lag] >> 27) * 16 + (bits[lag:] >> 27)
            assert_uniform(np.bincount(pairs, minlength=256), f"{what} at lag {lag}")
    both = token_bits(k["index"], torch.arange(6)).numpy()
    for a in range(5):
        assert_uniform(np.bincount((both[:, a] >> 27) * 16 + (both[:, a + 1] >> 27), minlength=256), f"tokens {a}")


def test_seed_choice_and_index_are_not_interchangeable():
    tuples = [(s, c, i) for s in range(12) for c in range(12) for i in range(12)]
    k = keys(*[list(column) for column in zip(*tuples, strict=True)])
    assert len({tuple(row) for row in k.tolist()}) == len(tuples)
