"""Prefill by an own Triton kernel: chunks of any length after any prefix, all of a step in one launch, read from their pages.

Runs are cut into tiles of rows; those that see most keys begin first, so that no long one is left at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from disagg.models.attention import kernels
from disagg.models.attention.backend import PrefillWork, Scoring
from disagg.models.attention.triton_decode import NO_WINDOW, scales
from disagg.models.batch import PrefillRun
from disagg.models.device import upload
from disagg.models.pool import AttentionPages

LEAST_BLOCK = 16


class TritonPrefill:
    """Any head_dim up to 256, any window, softcap and sinks."""

    def plan(self, work: PrefillWork) -> TritonPrefillPlan:
        return TritonPrefillPlan(work)


class TritonPrefillPlan:
    """Some runs of one batch in one layer group."""

    def __init__(self, work: PrefillWork) -> None:
        self._work = work
        view = work.view
        self._dims = triton.next_power_of_2(view.group.head_dim)
        self._block_m, self._block, self._warps, self._stages = _blocks(self._dims, view.kv.element_size())
        self._window = view.group.window or NO_WINDOW
        self._tiles = tiles_on_device(work)

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
        view, table = self._work.view, self._work.table
        _, query_heads, head_dim = out.shape
        assert query.stride(2) == 1 and out.is_contiguous(), "dims of a head are contiguous"
        kernels._chunk[(self._tiles.shape[0], query_heads)](
            query,
            view.elements,
            table.pages,
            table.first_pages,
            self._tiles,
            out if scoring.sinks is None else scoring.sinks,  # any pointer, where there are none
            out,
            query.stride(1),
            query.stride(0),
            table.pages.stride(0),
            view.page_stride,
            view.layer_offset(layer_in_group),
            self._window,
            *scales(scoring),
            QUERY_HEADS=query_heads,
            KV_HEADS=view.group.kv_heads,
            HEAD_DIM=head_dim,
            PAGE_TOKENS=view.page_tokens,
            DIMS=self._dims,
            BLOCK_M=self._block_m,
            BLOCK=self._block,
            WINDOW=self._window != NO_WINDOW,
            SOFTCAP=scoring.softcap is not None,
            SINKS=scoring.sinks is not None,
            WHOLE=view.page_tokens % self._block == 0,
            STAGES=self._stages,
            num_warps=self._warps,
        )


def tiles_of(view: AttentionPages, runs: Sequence[PrefillRun], table_rows: Sequence[int]) -> torch.Tensor:
    """[tiles, 4] int64 on the host, as `kernels._chunk` takes them, the longest first."""
    block_m, *_ = _blocks(triton.next_power_of_2(view.group.head_dim), view.kv.element_size())
    return torch.tensor(_tiles(runs, table_rows, block_m, view.group.window or NO_WINDOW), dtype=torch.int64)


def tiles_on_device(work: PrefillWork) -> torch.Tensor:
    """Those that a graph was captured with, or those of these runs: as `tiles_of`, where the kernel reads them."""
    if work.tiles is not None:
        return work.tiles
    return upload(tiles_of(work.view, work.runs, work.rows), work.view.device)


def most_tiles(view: AttentionPages, rows: int, runs: int) -> int:
    """Of any runs, so many at most, that have so many rows."""
    block_m, *_ = _blocks(triton.next_power_of_2(view.group.head_dim), view.kv.element_size())
    return rows // block_m + runs


def _blocks(dims: int, element_bytes: int) -> tuple[int, int, int, int]:
    """(rows, keys, warps, stages) of a tile, by the bytes of a head: what fits into shared memory and registers."""
    if element_bytes > 2:  # no tensor cores in float32: a small tile is as good
        return 64, max(LEAST_BLOCK, 4096 // dims), 4, 2
    return 128, 128 if dims <= 128 else 32, 8, 2


def _tiles(
    runs: Sequence[PrefillRun], table_rows: Sequence[int], block_m: int, window: int
) -> list[tuple[int, int, int, int]]:
    tiles = [
        (run.start + first, min(block_m, run.num_tokens - first), run.context_tokens + first, row)
        for run, row in zip(runs, table_rows, strict=True)
        for first in range(0, run.num_tokens, block_m)
    ]
    return sorted(tiles, key=lambda tile: -min(tile[2] + tile[1], window + tile[1]))
