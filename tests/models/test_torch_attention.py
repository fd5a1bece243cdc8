"""Attention over pages equals attention written out as a loop, for every kind of run, window and scoring."""

from __future__ import annotations

import math
import random

import pytest
import torch

from disagg.memory.layout import PageSizing
from disagg.messages.layout import GroupKind, LayerGroup
from disagg.models.attention import torch_backend
from disagg.models.attention.backend import Scoring
from disagg.models.attention.torch_backend import Chunk, TorchDecode, TorchPrefill
from disagg.models.pool import AttentionPages
from tests.models.attention_work import batch_of, decode_work, expected, prefill_work, run_with_pages
from tests.models.pools import fill, make_pool

HEADS, GROUP_SIZE, DIM, T = 2, 3, 8, 4
LAYER_IN_GROUP = 1
# (tokens computed, tokens of this run): chunks, one of a single token, and decodes
DECODE_LENGTHS = (1, 30, 7, 28, 29, 13, 16)
WORK = ((0, 9), (7, 6), (20, 1), (0, 4), (0, 1), (25, 9), *((n, 1) for n in DECODE_LENGTHS))
SCORINGS = {
    "plain": Scoring(0.3),
    "softcap": Scoring(0.3, softcap=2.0),
    "sinks": Scoring(0.3, sinks=torch.linspace(-1, 2, HEADS * GROUP_SIZE)),
}


def make_view(window: int | None, num_pages: int) -> AttentionPages:
    """Pages that are further apart than they are long."""
    kind = GroupKind.FULL if window is None else GroupKind.WINDOW
    group = LayerGroup("seen", (0, 1), HEADS, DIM, "float32", kind, window or 0)
    other = LayerGroup("other", (2, 3, 4), HEADS, DIM, "float32")
    pool = make_pool((group, other), num_pages, T, PageSizing.MAX)
    fill(pool, std=1.0)
    return pool.attention(0)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("window", [None, 1, 5, 8, 100])
@pytest.mark.parametrize(
    ("bucket_bytes", "for_gpu", "grouped"),
    [
        (0, False, False),
        (2 * 1024 * 1024, False, False),
        (0, True, False),
        (7000, True, True),
        (1 << 30, True, False),
    ],
)
def test_every_run_attends_to_exactly_what_it_may(
    scoring: str,
    window: int | None,
    bucket_bytes: int,
    for_gpu: bool,
    grouped: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """grouped: with the kernel for fewer KV heads than query heads, as in 16 bits.

    Pages out of the window are NaN, and entries that name them are no pages at all.
    """
    monkeypatch.setattr(torch_backend, "FLASH_DTYPES", (torch.float32,) if grouped else ())
    monkeypatch.setattr(torch_backend, "BUCKET_BYTES", bucket_bytes)
    monkeypatch.setattr(torch_backend, "PADDED_BUCKET_BYTES", bucket_bytes)
    monkeypatch.setattr(torch_backend, "SCORES_BYTES", 1024 + bucket_bytes)
    generator = torch.Generator().manual_seed(0)
    view = make_view(window, 200)
    free = list(range(200))
    random.Random(0).shuffle(free)
    work = []
    for computed, count in WORK:
        work.append(run_with_pages(computed, count, T, free, window))
    view.kv[torch.tensor(free)] = torch.nan
    batch, tables, ordered = batch_of(work, view)
    num_rows = batch.num_rows
    query = torch.randn(num_rows, HEADS * GROUP_SIZE, DIM, generator=generator).transpose(0, 1)
    key, value = torch.randn(2, HEADS, num_rows, DIM, generator=generator)
    view.write(LAYER_IN_GROUP, view.row_index(tables.write_pages, batch.write_offsets), key, value)
    plans = (
        TorchPrefill(for_gpu).plan(prefill_work(batch, tables, view)),
        TorchDecode(for_gpu).plan(decode_work(batch, tables, view)),
    )
    right = expected(view, LAYER_IN_GROUP, ordered, query, window, SCORINGS[scoring])
    for _ in range(2):  # a second layer reuses masks and scratch
        out = torch.full((num_rows, HEADS * GROUP_SIZE, DIM), torch.nan)
        for plan in plans:
            plan.run(LAYER_IN_GROUP, query, key, value, SCORINGS[scoring], out)
        torch.testing.assert_close(out.double(), right, atol=1e-5, rtol=1e-4)


def test_unlike_lengths_do_not_share_a_bucket() -> None:
    view = make_view(None, 64)
    work = [run_with_pages(length - 1, 1, T, list(range(64))) for length in (80, 76, 8, 79)]
    batch, tables, _ = batch_of(work, view)
    plan = TorchDecode().plan(decode_work(batch, tables, view))
    rows = [b.rows.tolist() if isinstance(b.rows, torch.Tensor) else b.rows for b in plan.buckets]
    assert rows == [[0, 1, 3], slice(2, 3)]


def test_a_padded_bucket_holds_as_many_rows_as_its_bytes_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    view = make_view(None, 64)
    work = [run_with_pages(length - 1, 1, T, list(range(64))) for length in (80, 76, 8, 79, 80)]
    batch, tables, _ = batch_of(work, view)
    row_bytes = 80 // T * view.page_bytes // 2
    for bucket_bytes, rows in ((2 * row_bytes, [2, 2, 1]), (5 * row_bytes, [5]), (1, [1] * 5)):
        monkeypatch.setattr(torch_backend, "PADDED_BUCKET_BYTES", bucket_bytes)
        plan = TorchDecode(as_on_gpu=True).plan(decode_work(batch, tables, view))
        assert [bucket.span._num_sequences for bucket in plan.buckets] == rows


def test_a_batch_holds_no_page_that_its_window_does_not_reach() -> None:
    view = make_view(6, 64)
    work = [run_with_pages(30, 5, T, list(range(10, 20)), 6), run_with_pages(21, 1, T, list(range(20, 30)), 6)]
    _, tables, _ = batch_of(work, view)
    assert tables.prefills is not None and tables.decodes is not None
    assert (tables.prefills.firsts, tables.prefills.pages.tolist()) == ((6,), [[19, 18, 17]])
    assert (tables.decodes.firsts, tables.decodes.pages.tolist()) == ((4,), [[29, 28]])
    assert tables.decodes.first_pages.tolist() == [4]


def test_a_kernel_may_lay_out_its_output_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a GPU put heads inside queries."""
    view = make_view(None, 64)
    batch, tables, _ = batch_of([run_with_pages(length - 1, 1, T, list(range(64))) for length in (30, 9)], view)
    query = torch.randn(HEADS * GROUP_SIZE, 2, DIM)
    key, value = torch.randn(2, HEADS, 2, DIM)
    plan = TorchDecode(as_on_gpu=True).plan(decode_work(batch, tables, view))
    out, other = torch.empty(2, 2, HEADS * GROUP_SIZE, DIM)
    plan.run(LAYER_IN_GROUP, query, key, value, SCORINGS["plain"], out)
    kernel = torch_backend.scaled_dot_product_attention

    def heads_inside_queries(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
        return kernel(*tensors, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(torch_backend, "scaled_dot_product_attention", heads_inside_queries)
    plan.run(LAYER_IN_GROUP, query, key, value, SCORINGS["plain"], other)
    assert torch.equal(other, out)
    assert torch.equal(plan.run_one_bucket(LAYER_IN_GROUP, query, SCORINGS["plain"]), out)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("lengths", [(30,), (30, 29, 30, 28)])
def test_one_bucket_of_all_rows_gives_the_output_itself(lengths: tuple[int, ...], scoring: str) -> None:
    view = make_view(None, 64)
    free = list(range(64))
    batch, tables, runs = batch_of([run_with_pages(length - 1, 1, T, free) for length in lengths], view)
    plan = TorchDecode().plan(decode_work(batch, tables, view))
    assert plan.is_one_bucket(len(lengths))
    query = torch.randn(HEADS * GROUP_SIZE, len(lengths), DIM)
    given = plan.run_one_bucket(LAYER_IN_GROUP, query, SCORINGS[scoring])
    assert given.is_contiguous()
    want = expected(view, LAYER_IN_GROUP, runs, query, None, SCORINGS[scoring])
    torch.testing.assert_close(given.double(), want, rtol=1e-5, atol=1e-5)


def test_what_is_not_one_bucket_of_all_rows_needs_an_output() -> None:
    view = make_view(None, 64)
    free = list(range(64))
    work = [run_with_pages(length - 1, 1, T, free) for length in (80, 8)]
    work.append(run_with_pages(0, 5, T, free))
    batch, tables, _ = batch_of(work, view)
    plan = TorchDecode().plan(decode_work(batch, tables, view))
    assert len(plan.buckets) == 2 and not plan.is_one_bucket(2)
    assert not TorchPrefill().plan(prefill_work(batch, tables, view)).is_one_bucket(5)
    alone, alone_tables, _ = batch_of([run_with_pages(7, 1, T, free)], view)
    one = TorchDecode().plan(decode_work(alone, alone_tables, view))
    assert one.is_one_bucket(1) and not one.is_one_bucket(2), "rows that only pad a batch are not in it"


class GivenKeys:
    """A span whose keys and values are these, [1, kv_heads, tokens, D] each."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._gathered = keys, values

    def gather(self, layer_in_group: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._gathered


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("context", [0, 99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_attends_alike_by_every_kernel_of_a_gpu(
    dtype: torch.dtype, context: int, window: int | None, kv_heads: int, device: str
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    heads, num_tokens, dim = 8, 61, 64
    generator = torch.Generator().manual_seed(context + kv_heads)
    query = torch.randn(heads, num_tokens, dim, generator=generator).to(dtype)
    keys, values = torch.randn(2, kv_heads, context + num_tokens, dim, generator=generator).to(dtype)
    positions = torch.arange(context + num_tokens)
    visible = positions <= positions[context:, None]
    if window is not None:
        visible &= positions > positions[context:, None] - window
    scores = query.double() @ keys.double().repeat_interleave(heads // kv_heads, 0).transpose(1, 2) * 0.2
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    right = (weights @ values.double().repeat_interleave(heads // kv_heads, 0)).transpose(0, 1)

    query, keys, values = (tensor.to(device) for tensor in (query, keys, values))
    span = GivenKeys(keys[None], values[None]) if context else None
    chunk = Chunk(slice(0, num_tokens), span, context, 0, window, query.device, dtype, for_gpu=True)
    new = slice(context, None)
    out = chunk.attend(0, query, keys[:, new], values[:, new], Scoring(0.2))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double().cpu(), right, atol=tolerance, rtol=tolerance)
