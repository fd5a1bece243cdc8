"""Decode by Triton's split-KV kernel: reads pages where they are, and keeps all of the GPU busy whatever the lengths.

A *share* is what a program should take: all tokens that the batch sees, over the programs that fill the GPU. A sequence is
cut into as many parts as it has shares, so one long sequence beside many short ones is spread as it needs. The share is
computed on the device from the lengths that are there, so a captured graph cuts other lengths rightly, too; only the most
parts that any sequence may have (`_most_parts`) is fixed by the plan.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton

from disagg.models.attention import kernels
from disagg.models.attention.backend import DecodeWork, Scoring

NO_WINDOW = 1 << 30  # tokens; above every position
LOG2_E = math.log2(math.e)
LEAST_HEADS = 16  # rows of the smallest matrix product
MOST_HEADS = 64  # query heads that share a KV head and one program's registers
TILE_BYTES = 16 * 1024  # of K, and of V. Three stages of both leave room for two programs on a multiprocessor
LEAST_BLOCK = 16  # keys of the smallest matrix product
STAGES = 3
NUM_WARPS = 4
PROGRAMS_PER_PROCESSOR = 4  # two at a time, twice. Measured: two leave the end of a step half empty at batch 1
INTERPRETED_PROGRAMS = 16  # in Triton's interpreter, which has no processors to fill
MERGE_WARPS = 4


class TritonDecode:
    """Any head_dim up to 256, any window, softcap and sinks."""

    def plan(self, work: DecodeWork) -> TritonDecodePlan:
        return TritonDecodePlan(work)


class TritonDecodePlan:
    """One batch's decode rows in one layer group."""

    def __init__(self, work: DecodeWork) -> None:
        self._work = work
        view, run = work.view, work.run
        group = view.group
        self._dims = triton.next_power_of_2(group.head_dim)
        self._block = max(LEAST_BLOCK, TILE_BYTES // (self._dims * view.kv.element_size()))
        self._window = group.window or NO_WINDOW
        programs = num_programs(view.device)
        seen = run.lengths.clamp(max=self._window).sum()
        self._share = torch.clamp(seen * group.kv_heads // programs, min=self._block).view(1)
        self._parts = _most_parts(
            min(run.max_length, self._window),
            min(run.total_length, run.num_sequences * self._window),
            programs / group.kv_heads,
            self._block,
        )
        self._part_acc = self._part_top = torch.empty(0, dtype=torch.float32, device=view.device)

    def run(
        self,
        layer_slot: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        """See AttentionPlan."""
        view, run, table = self._work.view, self._work.run, self._work.table
        group, rows = view.group, run.num_sequences
        _, query_heads, head_dim = out.shape
        query = query[:, run.start : run.start + rows]
        out = out[run.start : run.start + rows]
        assert query.stride(2) == 1 and out.is_contiguous(), "dims of a head are contiguous"
        per_kv_head = query_heads // group.kv_heads
        heads = min(max(LEAST_HEADS, triton.next_power_of_2(per_kv_head)), MOST_HEADS)
        if self._parts > 1 and self._part_top.numel() < rows * query_heads * self._parts * 2:
            self._part_acc = out.new_empty((rows, query_heads, self._parts, head_dim), dtype=torch.float32)
            self._part_top = out.new_empty((rows, query_heads, self._parts, 2), dtype=torch.float32)
        bounds = (run.lengths, table.first_pages, self._share)
        sinks = out if scoring.sinks is None else scoring.sinks  # any pointer, where there are none
        kernels._split[(rows, group.kv_heads * -(-per_kv_head // heads), self._parts)](
            query,
            view.elements,
            table.pages,
            *bounds,
            sinks,
            out,
            self._part_acc,
            self._part_top,
            query.stride(1),
            query.stride(0),
            table.pages.stride(0),
            view.page_stride,
            view.slot_offset(layer_slot),
            self._window,
            *scales(scoring),
            QUERY_HEADS=query_heads,
            KV_HEADS=group.kv_heads,
            HEAD_DIM=head_dim,
            PAGE_TOKENS=view.page_tokens,
            HEADS=heads,
            DIMS=self._dims,
            BLOCK=self._block,
            PARTS=self._parts,
            SOFTCAP=scoring.softcap is not None,
            SINKS=scoring.sinks is not None,
            STAGES=STAGES,
            num_warps=NUM_WARPS,
        )
        if self._parts > 1:
            kernels._merge[(rows, query_heads)](
                self._part_acc,
                self._part_top,
                *bounds,
                sinks,
                out,
                self._window,
                QUERY_HEADS=query_heads,
                HEAD_DIM=head_dim,
                PAGE_TOKENS=view.page_tokens,
                DIMS=self._dims,
                BLOCK=self._block,
                PARTS=self._parts,
                PARTS_2=self._parts,
                SINKS=scoring.sinks is not None,
                num_warps=MERGE_WARPS,
            )


def scales(scoring: Scoring) -> tuple[float, float]:
    """(scale of q k, softcap) as the kernels take them: softmax is in base 2, a softcap in the model's own."""
    if scoring.softcap is None:
        return scoring.scaling * LOG2_E, 1.0
    return scoring.scaling, scoring.softcap


def _most_parts(max_seen: int, total_seen: int, shares: float, block: int) -> int:
    """Of any sequence: a power of 2, for each is compiled for. shares: of all sequences together."""
    share = max(total_seen / shares, block)
    return int(triton.next_power_of_2(max(1, round(max_seen / share))))


@cache
def num_programs(device: torch.device) -> int:
    """That fill the device."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
