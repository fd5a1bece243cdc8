"""Prefill by cuDNN, run by run, for long chunks: what comes before a chunk is gathered from its pages first.

cuDNN's causal mask begins at the first key, so a chunk after a prefix takes two calls, whose parts are merged by the
logarithms of their sums:

    keys      prefix, gathered    the chunk's own
    rows      all see all         causal

Runs and what is before them are multiples of STEP_TOKENS long (`Capabilities.share`), so that plans are few. Those of prompts'
first chunks can be made at start (`PREPARING`).
"""

from __future__ import annotations

from typing import Any

import torch

from disagg.models.attention import kernels
from disagg.models.attention.backend import PREPARING, PrefillWork, Scoring
from disagg.models.attention.torch_backend import PageSpan
from disagg.types.arithmetic import ceil_div

STEP_TOKENS = 512  # of lengths: cuDNN makes a plan for each, which takes longer than to attend


class CudnnPrefill:
    """Full attention in 16 bits."""

    def plan(self, work: PrefillWork) -> CudnnPrefillPlan:
        return CudnnPrefillPlan(work)


class CudnnPrefillPlan:
    """Some runs of one batch in one layer group."""

    def __init__(self, work: PrefillWork) -> None:
        view = work.view
        self._runs = work.runs
        self._prepares = PREPARING.get()
        self._prefixes: list[PageSpan | None] = []
        for run, row in zip(work.runs, work.rows, strict=True):
            num_pages = ceil_div(run.context_tokens, view.page_tokens)
            pages = work.table.pages[row, :num_pages]
            self._prefixes.append(PageSpan(view, pages, 1, 0, run.context_tokens) if num_pages else None)
        units = max((span.num_units for span in self._prefixes if span is not None), default=0)
        scratch = torch.empty((units, view.page_tokens * view.group.head_dim), dtype=view.kv.dtype, device=view.device)
        for span in self._prefixes:
            if span is not None:
                span.bind(scratch)

    def run(
        self,
        layer_in_group: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        """See AttentionPlan."""
        if self._prepares:
            self._prepares = False
            for num_rows in range(STEP_TOKENS, max(run.num_tokens for run in self._runs) + 1, STEP_TOKENS):
                queries, keys, values = (part[None, :, :num_rows] for part in (query, key, value))
                _attend(queries, keys, values, scoring, causal=True, sums=False)
        for run, prefix in zip(self._runs, self._prefixes, strict=True):
            rows = slice(run.start, run.start + run.num_tokens)
            query_rows, own = query[None, :, rows], (key[None, :, rows], value[None, :, rows])
            if prefix is None:
                attended, _ = _attend(query_rows, *own, scoring, causal=True, sums=False)
                out[rows] = attended[0].transpose(0, 1)
                continue
            before, before_sums = _attend(query_rows, *prefix.gather(layer_in_group), scoring, causal=False, sums=True)
            among, among_sums = _attend(query_rows, *own, scoring, causal=True, sums=True)
            merge(before[0], before_sums[0], among[0], among_sums[0], out[rows])


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, *, causal: bool, sums: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(attended [1, query_heads, tokens, D], logarithms of the sums [1, query_heads, tokens, 1] or nothing)."""
    cudnn: Any = torch.ops.aten._scaled_dot_product_cudnn_attention
    result = cudnn(query, keys, values, None, sums, 0.0, causal, False, scale=scoring.scaling)
    return result[0], result[1]


def merge(
    one: torch.Tensor, one_sums: torch.Tensor, other: torch.Tensor, other_sums: torch.Tensor, out: torch.Tensor
) -> None:
    """Two attentions of the same rows over different keys. one, other: [heads, rows, D]; sums: natural logarithms, float32
    [heads, rows, 1]; out: [rows, heads, D]."""
    num_heads, num_rows, head_dim = one.shape
    one_sums, other_sums = one_sums.view(num_heads, num_rows), other_sums.view(num_heads, num_rows)
    assert one.stride() == other.stride() and one.stride(2) == 1 and one_sums.stride() == other_sums.stride()
    kernels._merge_two[(num_rows, num_heads)](
        one,
        one_sums,
        other,
        other_sums,
        out,
        one.stride(1),
        one.stride(0),
        one_sums.stride(1),
        one_sums.stride(0),
        HEADS=num_heads,
        HEAD_DIM=head_dim,
        DIMS=1 << (head_dim - 1).bit_length(),
        num_warps=1,
    )
