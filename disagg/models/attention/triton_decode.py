"""Decode by Triton's split-KV kernels: pages are read where they are, and all of the GPU is busy whatever the lengths.

What sequences see is cut into *items* of like length on the device, once per step (`kernels._cut`): one long sequence
beside many short ones is spread as it needs. So a captured graph cuts other lengths rightly, too. The host only knows how
many items there can be at most.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton

from disagg.models.attention import kernels
from disagg.models.attention.backend import DecodeWork, Scoring
from disagg.models.overlap import overlap
from disagg.types.arithmetic import ceil_div

NO_WINDOW = 1 << 30  # tokens; above every position
LOG2_E = math.log2(math.e)
LEAST_HEADS = 16  # rows of the smallest matrix product
MOST_HEADS = 64  # query heads that share a KV head and one program's registers
TILE_BYTES = 16 * 1024  # of K, and of V. Three stages of both leave room for two programs on a multiprocessor
LEAST_BLOCK = 16  # keys of the smallest matrix product
STAGES = 3
NUM_WARPS = 4
FEW_ELEMENTS = 16 * 128  # of a program's scores and sums in 16 bits, which the registers of half as many warps hold
FEW_PARTS = 8  # that one warp puts together: several launches' worth of programs are there at once
PROGRAMS_PER_PROCESSOR = 4  # two at a time, twice
INTERPRETED_PROGRAMS = 16  # in Triton's interpreter, which has no processors to fill
MERGED_PARTS = 4, 64  # at a time: least, of many sequences, and most: one sequence on one GPU has few more
CUT_ELEMENTS = 8192  # rows by items of a program of `_cut`: what its registers hold


class TritonDecode:
    """Any head_dim up to 256, any window, softcap and sinks."""

    def plan(self, work: DecodeWork) -> TritonDecodePlan:
        return TritonDecodePlan(work)


class TritonDecodePlan:
    """One batch's decode rows in one layer group."""

    def __init__(self, work: DecodeWork) -> None:
        self._work = work
        view, batch = work.view, work.batch
        rows, kv_heads = batch.num_sequences, view.group.kv_heads
        self._dims = triton.next_power_of_2(view.group.head_dim)
        self._block = max(LEAST_BLOCK, TILE_BYTES // (self._dims * view.kv.element_size()))
        window = view.group.window or NO_WINDOW
        shares = ceil_div(num_programs(view.device), kv_heads)
        self._most_items = rows + shares
        # A sequence of several parts has one and a half shares at least.
        self._most_splits = min(rows, 2 * shares // 3)
        self._splits_any = _may_split(work, window, shares, self._block)

        padded_rows = triton.next_power_of_2(rows)
        # One long sequence beside many short ones is merged in several steps.
        alike = triton.next_power_of_2(ceil_div(self._most_items, rows))
        self._merged_parts = min(max(alike, MERGED_PARTS[0]), MERGED_PARTS[1])
        self._whole = view.group.window == 0 and view.page_tokens % self._block == 0
        block = max(1, min(CUT_ELEMENTS // padded_rows, triton.next_power_of_2(self._most_items)))
        blocks = ceil_div(self._most_items, block)
        ints = torch.empty(blocks * block * 4 + rows * 3 + 1, dtype=torch.int32, device=view.device)
        self._num_splits, self._splits, self._items = ints[:1], ints[1 : 1 + rows * 3], ints[1 + rows * 3 :]
        kernels._cut[(blocks,)](
            batch.lengths,
            work.table.first_pages,
            self._items,
            self._splits,
            self._num_splits,
            window,
            shares,
            rows,
            ROWS=padded_rows,
            ITEMS=block,
            BLOCK=self._block,
            PAGE_TOKENS=view.page_tokens,
            num_warps=NUM_WARPS,
        )
        self._shifted = batch.first_row is not None
        self._first_row = (
            batch.lengths if batch.first_row is None else batch.first_row
        )  # any pointer, where there is none
        self._part_acc = self._part_top = torch.empty(0, dtype=torch.float32, device=view.device)

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
        batch = self._work.batch
        if batch.first_row is None:
            rows = slice(batch.start, batch.start + batch.num_sequences)
            query, out = query[:, rows], out[rows]
        assert query.stride(2) == 1 and out.is_contiguous(), "dims of a head are contiguous"
        if self._splits_any:
            self._make_parts(out)
        self._split(layer_in_group, query, scoring, out)
        if self._splits_any:
            self._merge(scoring, out)

    def _make_parts(self, out: torch.Tensor) -> None:
        """Room for what items of sequences of several parts come to, for so many heads; kept for the other layers."""
        _, query_heads, head_dim = out.shape
        if self._part_top.numel() < self._most_items * query_heads * 2:
            parts = (self._most_items, query_heads)
            self._part_acc = out.new_empty((*parts, head_dim), dtype=torch.float32)
            self._part_top = out.new_empty((*parts, 2), dtype=torch.float32)

    def _split(self, layer_in_group: int, query: torch.Tensor, scoring: Scoring, out: torch.Tensor) -> None:
        """Every item by itself. Of a sequence of one part, that is what comes out."""
        view, table = self._work.view, self._work.table
        group = view.group
        rows, (_, query_heads, head_dim) = self._work.batch.num_sequences, out.shape
        per_kv_head = query_heads // group.kv_heads
        heads = min(max(LEAST_HEADS, triton.next_power_of_2(per_kv_head)), MOST_HEADS)
        head_blocks = group.kv_heads * ceil_div(per_kv_head, heads)
        few = query.element_size() == 2 and heads * max(self._dims, self._block) <= FEW_ELEMENTS
        sinks = out if scoring.sinks is None else scoring.sinks  # any pointer, where there are none
        kernels._split[(head_blocks, self._most_items if self._splits_any else rows)](
            query,
            view.elements,
            table.pages,
            self._items,
            sinks,
            out,
            self._part_acc,
            self._part_top,
            self._first_row,
            query.stride(1),
            query.stride(0),
            table.pages.stride(0),
            view.page_stride,
            view.layer_offset(layer_in_group),
            *scales(scoring),
            QUERY_HEADS=query_heads,
            KV_HEADS=group.kv_heads,
            HEAD_DIM=head_dim,
            PAGE_TOKENS=view.page_tokens,
            HEADS=heads,
            DIMS=self._dims,
            BLOCK=self._block,
            SOFTCAP=scoring.softcap is not None,
            SINKS=scoring.sinks is not None,
            STAGES=STAGES,
            WHOLE=self._whole,
            SHIFTED=self._shifted,
            num_warps=NUM_WARPS // 2 if few else NUM_WARPS,
            **overlap(view.device),
        )

    def _merge(self, scoring: Scoring, out: torch.Tensor) -> None:
        """The parts of each sequence that has several, put together."""
        _, query_heads, head_dim = out.shape
        kernels._merge[(query_heads, self._most_splits)](
            self._part_acc,
            self._part_top,
            self._splits,
            self._num_splits,
            out if scoring.sinks is None else scoring.sinks,
            out,
            self._first_row,
            QUERY_HEADS=query_heads,
            HEAD_DIM=head_dim,
            DIMS=self._dims,
            PARTS=self._merged_parts,
            SINKS=scoring.sinks is not None,
            SHIFTED=self._shifted,
            num_warps=1 if self._merged_parts <= FEW_PARTS else NUM_WARPS,
            **overlap(self._work.view.device),
        )


def scales(scoring: Scoring) -> tuple[float, float]:
    """(scale of q k, softcap) as the kernels take them: softmax is in base 2, a softcap in the model's own."""
    if scoring.softcap is None:
        return scoring.scaling * LOG2_E, 1.0
    return scoring.scaling, scoring.softcap


def _may_split(work: DecodeWork, window: int, shares: int, block: int) -> bool:
    """Whether any sequence may have several parts, as far as the host knows."""
    batch = work.batch
    most_seen = min(batch.max_length, window)
    least_total = batch.total_length * most_seen // batch.max_length
    least_share = max(ceil_div(least_total, shares), block)
    return (most_seen + least_share // 2) // least_share > 1


@cache
def num_programs(device: torch.device) -> int:
    """That fill the device."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
