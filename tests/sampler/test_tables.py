"""Tables of the sampler hold what is in use, and give back what one burst of requests made them grow to."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from disagg.types.sampling import SamplingParams
from disagg.worker.sampler import Sampler
from disagg.worker.sampler_tables import Rows, SeenTokens, TokenLists
from tests.sampler import reference

VOCAB = 64
CPU = torch.device("cpu")


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 99), max_size=200))
def test_rows_are_different_low_and_no_more_than_twice_what_is_used(steps: list[int]) -> None:
    rows, used = Rows(), []
    for step in steps:
        if used and step % 3 == 0:
            rows.free(used.pop(step % len(used)))
        else:
            row = rows.take()
            assert row not in used
            assert row == min(set(range(len(used) + 1)) - set(used))
            used.append(row)
        assert all(row < rows.count for row in used)
        assert rows.count <= max(8, 2 * (max(used, default=0) + 8))
    for row in used:
        rows.free(row)
    assert rows.count <= 8


def test_seen_tokens_keep_what_they_counted_when_the_table_shrinks() -> None:
    table = SeenTokens(VOCAB, CPU)
    assert table.nbytes == 0
    kept = table.put([1, 2], [3])
    others = [table.put([9], []) for _ in range(100)]
    grown = table.nbytes
    for row in others:
        table.free(row)
    assert table.nbytes <= grown // 10
    x = torch.ones(1, VOCAB)
    table.penalize(x, torch.tensor([0]), torch.tensor([kept]), torch.tensor([[2.0, 0.0, 0.0]]))
    assert x[0].eq(0.5).nonzero().flatten().tolist() == [1, 2, 3]


def test_lists_keep_their_entries_when_the_longest_one_is_over() -> None:
    table = TokenLists(CPU)
    kept = table.put([(1, -1.0), (5, 2.0)])
    long = [table.put([(token, 1.0) for token in range(1024)]) for _ in range(40)]
    grown = table.nbytes
    for row in long:
        table.free(row)
    assert table.nbytes <= grown // 100
    x = torch.zeros(1, VOCAB)
    table.add_to(x, torch.tensor([0]), torch.tensor([kept]))
    assert {token: value for token, value in enumerate(x[0].tolist()) if value} == {1: -1.0, 5: 2.0}


def test_what_is_sampled_is_the_same_after_a_burst_made_the_tables_grow_and_shrink() -> None:
    sampler = Sampler(VOCAB, 64, "cpu")
    params = SamplingParams(
        max_tokens=50, seed=7, repetition_penalty=1.3, logit_bias=((3, 4.0),), min_tokens=20, stop_token_ids=(5,)
    )
    sampler.add(63, params, 0, [1, 2], [], [])
    outputs: list[int] = []
    for round_number in range(3):
        for slot in range(60):
            bias = tuple((token, 1.0) for token in range(slot + 1))
            sampler.add(slot, SamplingParams(max_tokens=5, frequency_penalty=1.0, logit_bias=bias), 0, [1], [], [2])
        for slot in range(60):
            sampler.remove(slot)
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(round_number)) * 3
        [chosen] = sampler.sample(logits, torch.tensor([0]), [63]).token_ids.tolist()
        assert chosen == reference.choose(logits[0].numpy(), params, 0, [1, 2], outputs, [])
        outputs.append(chosen)
