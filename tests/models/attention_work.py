"""Runs over pages for tests of attention, and what attention over them is, written out in float64."""

from __future__ import annotations

import math

import torch

from disagg.messages.sequence_diff import RunView, page_table
from disagg.models.attention.backend import DecodeWork, PrefillWork, Scoring
from disagg.models.batch import AttentionTables, ForwardBatch
from disagg.models.pool import AttentionPages
from disagg.worker.batch import build_batch
from tests.models.driver import STALE, run_of, sequence_of


def run_with_pages(computed: int, count: int, page_tokens: int, free: list[int], window: int | None = None) -> RunView:
    """A run whose sequence has those pages that the window still reaches; entries before are stale."""
    sequence = sequence_of([1] * (computed + count), 1, computed)
    num_pages = math.ceil((computed + count) / page_tokens)
    first_page = max(0, computed + 1 - (window or STALE)) // page_tokens
    sequence.tables[0] = page_table([STALE] * first_page + [free.pop() for _ in range(num_pages - first_page)])
    return run_of(sequence, count)


def batch_of(work: list[RunView], view: AttentionPages) -> tuple[ForwardBatch, AttentionTables, list[RunView]]:
    """The batch on the view's device, and the runs in row order."""
    batch, ordered = build_batch(work, [view.group], view.page_tokens)
    batch = batch.on(view.device)
    batch.check()
    (tables,) = batch.tables
    assert isinstance(tables, AttentionTables)
    return batch, tables, ordered


def prefill_work(batch: ForwardBatch, tables: AttentionTables, view: AttentionPages) -> PrefillWork:
    assert tables.prefills is not None
    return PrefillWork(view, batch.prefills, tables.prefills, tuple(range(len(batch.prefills))))


def decode_work(batch: ForwardBatch, tables: AttentionTables, view: AttentionPages) -> DecodeWork:
    assert tables.decodes is not None and batch.decodes is not None
    return DecodeWork(view, batch.decodes, tables.decodes)


def expected(
    view: AttentionPages,
    layer_in_group: int,
    runs: list[RunView],
    queries: torch.Tensor,
    window: int | None,
    scoring: Scoring,
) -> torch.Tensor:
    """queries: [query_heads, N, D], the rows of `runs`. Returns [N, query_heads, D], float64, on the CPU."""
    parts = []
    rows = iter(queries.double().cpu().split([run.num_tokens for run in runs], dim=1))
    for run, query in zip(runs, rows, strict=True):
        parts.append(_attend(view, layer_in_group, run, query, window, scoring))
    return torch.cat(parts)


def _attend(
    view: AttentionPages, layer_in_group: int, run: RunView, query: torch.Tensor, window: int | None, scoring: Scoring
) -> torch.Tensor:
    """query: [query_heads, n, D]. Of the pages, only what is seen is looked at."""
    stop = run.start + run.num_tokens
    first = 0 if window is None else max(0, run.start + 1 - window)
    tokens = torch.arange(first, stop)
    table = run.sequence.tables[0]
    pages = torch.tensor([table[token // view.page_tokens] for token in tokens.tolist()], device=view.device)
    offsets = (tokens % view.page_tokens).to(view.device)
    # [2, kv_heads, tokens, D]
    kv = view.kv[:, layer_in_group].permute(0, 3, 1, 2, 4)[pages, offsets].permute(1, 2, 0, 3).double().cpu()
    keys, values = kv.repeat_interleave(query.shape[0] // kv.shape[1], dim=1)
    scores = query @ keys.transpose(1, 2) * scoring.scaling
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    positions = torch.arange(run.start, stop).unsqueeze(1)
    visible = tokens <= positions
    if window is not None:
        visible &= tokens > positions - window
    scores = scores.masked_fill(~visible, -math.inf)
    if scoring.sinks is not None:
        sinks = scoring.sinks.double().cpu().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : tokens.shape[0]]
    return (weights @ values).transpose(0, 1)


def shuffled(count: int, seed: int = 0) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
