"""Attention over pages equals attention written out as a loop, for every kind of run, window and scoring."""

from __future__ import annotations

import math
import random

import pytest
import torch

from disagg.messages.layout import LayerGroup
from disagg.models import runs
from disagg.models.pool import KvPool
from disagg.models.runs import Scoring, WindowPlan
from tests.models.driver import Sequence, build_batch

HEADS, GROUP_SIZE, DIM, T = 2, 3, 8, 4
LAYER_SLOT = 1
# (tokens computed, tokens of this run, prompt length): four chunks, one of a single token, then seven decodes
DECODE_LENGTHS = (1, 30, 7, 28, 29, 13, 16)
WORK = ((0, 9, 20), (7, 6, 40), (20, 1, 40), (0, 4, 4), *((n, 1, n) for n in DECODE_LENGTHS))
SCORINGS = {
    "plain": Scoring(0.3),
    "softcap": Scoring(0.3, softcap=2.0),
    "sinks": Scoring(0.3, sinks=torch.linspace(-1, 2, HEADS * GROUP_SIZE)),
}


def attend_by_loop(pool: KvPool, work: list, queries: torch.Tensor, window: int | None, scoring: Scoring):
    """queries: [query_heads, N, D]. Returns [N, query_heads, D]."""
    out, row = [], 0
    for sequence, count in work:
        pages = torch.tensor(sequence.pages)
        for position in range(sequence.computed, sequence.computed + count):
            first = 0 if window is None else max(0, position + 1 - window)
            heads = []
            for head in range(HEADS * GROUP_SIZE):
                kv = pool.kv[pages, LAYER_SLOT, :, head // GROUP_SIZE].transpose(0, 1).reshape(2, -1, DIM)
                scores = kv[0, first : position + 1] @ queries[head, row] * scoring.scaling
                if scoring.softcap is not None:
                    scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
                weights = scores.exp()
                total = weights.sum() + (0 if scoring.sinks is None else scoring.sinks[head].exp())
                heads.append((weights / total) @ kv[1, first : position + 1])
            out.append(torch.stack(heads))
            row += 1
    return torch.stack(out)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("window", [None, 1, 5, 8, 100])
@pytest.mark.parametrize("bucket_bytes", [0, 2 * 1024 * 1024, None])
def test_every_run_attends_to_exactly_what_it_may(
    scoring: str, window: int | None, bucket_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bucket_bytes None: all decode rows in one padded bucket, as on a GPU."""
    if bucket_bytes is not None:
        monkeypatch.setattr(runs, "BUCKET_BYTES", bucket_bytes)
    generator = torch.Generator().manual_seed(0)
    pool = KvPool.create(LayerGroup("full", (0, 1), HEADS, DIM, "float32"), 200, T, "cpu")
    pool.kv.normal_(generator=generator)
    free = list(range(200))
    random.Random(0).shuffle(free)
    work = []
    for computed, count, prompt in WORK:
        sequence = Sequence([1] * (computed + count), prompt, count, computed=computed)
        sequence.pages = [free.pop() for _ in range(math.ceil((computed + count) / T))]
        work.append((sequence, count))
    batch = build_batch(work, T)
    num_rows = batch.num_rows
    query = torch.randn(1, HEADS * GROUP_SIZE, num_rows, DIM, generator=generator)
    key, value = torch.randn(2, 1, HEADS, num_rows, DIM, generator=generator)
    pool.write(LAYER_SLOT, pool.row_index(batch.slot_pages, batch.slot_offsets), key[0], value[0])
    plan = WindowPlan(batch, pool, window, one_bucket=bucket_bytes is None)
    for _ in range(2):  # a second layer reuses masks and scratch
        out = plan.attend(LAYER_SLOT, query, key, value, SCORINGS[scoring])
        expected = attend_by_loop(pool, work, query[0], window, SCORINGS[scoring])
        torch.testing.assert_close(out[0], expected, atol=1e-5, rtol=1e-4)


def test_unlike_lengths_do_not_share_a_bucket() -> None:
    pool = KvPool.create(LayerGroup("full", (0, 1), HEADS, DIM, "float32"), 64, T, "cpu")
    work = []
    for length in (80, 76, 8, 79):
        work.append((Sequence([1] * length, 1, 1, list(range(length // T + 1)), length - 1), 1))
    plan = WindowPlan(build_batch(work, T), pool, None, one_bucket=False)
    rows = [b.rows.tolist() if isinstance(b.rows, torch.Tensor) else b.rows for b in plan.buckets]
    assert rows == [[0, 1, 3], slice(2, 3)]
