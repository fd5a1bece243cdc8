"""Pages between a GPU's pool and page-locked memory of the host, many in one launch.

    table    [(page on the GPU, page on the host), ...]        on the host, read where it is
    task     one chunk of one move; programs take every so many-th

A few programs keep a bus busy: each has all loads of its chunk under way at once. More would take multiprocessors from the
model and bring nothing. What is read from the host is under way for longer, so it takes more of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from disagg.types.arithmetic import ceil_div

PROGRAMS_OUT = 8
PROGRAMS_IN = 32
CHUNK_BYTES = 16 << 10  # of a task
_NUM_WARPS = 4
_LANE_BYTES = 16  # of the widest load
_UNITS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}  # the widest that all pages are aligned to


@triton.jit(
    do_not_specialize=("moves", "page_lanes", "stride_lanes", "chunks"), do_not_specialize_on_alignment=("table",)
)
def _copy_pages(
    source,
    target,
    table,  # [moves, 2] int64
    moves,
    page_lanes,
    stride_lanes,  # from one page to the next, in both
    chunks,  # of a page
    SOURCE: tl.constexpr,  # which column of the table has the source's pages
    LANE_UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Lanes are LANE_UNITS elements: products with it tell the compiler how everything is aligned."""
    in_block = tl.arange(0, BLOCK)
    stride = stride_lanes.to(tl.int64) * LANE_UNITS
    tasks = moves.to(tl.int64) * chunks
    task = tl.program_id(0).to(tl.int64)
    while task < tasks:
        move = task // chunks
        column = task % chunks * BLOCK + in_block
        mask = column < page_lanes * LANE_UNITS
        source_page = tl.load(table + move * 2 + SOURCE)
        target_page = tl.load(table + move * 2 + (1 - SOURCE))
        units = tl.load(source + source_page * stride + column, mask=mask, other=0, cache_modifier=".cg")
        tl.store(target + target_page * stride + column, units, mask=mask)
        task += tl.num_programs(0)


def copy_pages(
    pool: torch.Tensor, host: torch.Tensor, table: torch.Tensor, page_bytes: int, stride: int, out: bool
) -> None:
    """On the current stream; returns before the device is done.

    pool, host: uint8 [bytes], whose page p begins at byte p * stride. table: [moves, 2] int64, pages of the pool and of the
    host. All but the pool is page-locked. out: from the pool to the host, else the other way.
    """
    assert table.dtype is torch.int64 and table.shape[1:] == (2,) and table.is_contiguous()
    if not len(table):
        return
    aligned = page_bytes | stride | pool.data_ptr() | host.data_ptr()  # to every power of two that divides all of them
    unit_bytes = next(each for each in _UNITS if aligned % each == 0)
    lane_bytes = _LANE_BYTES if aligned % _LANE_BYTES == 0 else unit_bytes
    chunks = ceil_div(page_bytes, CHUNK_BYTES)
    source, target = (pool, host) if out else (host, pool)
    arguments: dict[str, Any] = {
        "source": triton.reinterpret(source, _UNITS[unit_bytes]),
        "target": triton.reinterpret(target, _UNITS[unit_bytes]),
        "table": table,
        "moves": len(table),
        "page_lanes": page_bytes // lane_bytes,
        "stride_lanes": stride // lane_bytes,
        "chunks": chunks,
        "SOURCE": 0 if out else 1,
        "LANE_UNITS": lane_bytes // unit_bytes,
        "BLOCK": CHUNK_BYTES // unit_bytes,
    }
    _copy_pages[(min(len(table) * chunks, PROGRAMS_OUT if out else PROGRAMS_IN),)](**arguments, num_warps=_NUM_WARPS)
