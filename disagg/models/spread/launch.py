"""What arrived of a step on the device, to where graphs read it. Knows tensors of integers; nothing of what they say."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from disagg.types.arithmetic import ceil_div

BLOCK = 256


def spread(arrived: Tensor, columns: Tensor, pages: Sequence[Tensor], tables: Sequence[Tensor]) -> None:
    """columns becomes `arrived`; of each table the first rows and entries become its pages. All int64, rows contiguous.

    On a GPU by a launch for each table, the first with the columns: between two steps every launch counts.
    """
    if columns.device.type == "cpu" or not tables:
        columns.copy_(arrived)
        for table, part in zip(tables, pages, strict=True):
            table[: part.shape[0], : part.shape[1]].copy_(part)
        return
    launch(arrived, columns, pages, tables)


def launch(arrived: Tensor, columns: Tensor, pages: Sequence[Tensor], tables: Sequence[Tensor]) -> None:
    """By Triton, on any device that it has. At least one table."""
    from disagg.models.spread import kernels

    left = columns.numel()
    for part, table in zip(pages, tables, strict=True):
        rows, width = part.shape
        grid = (rows + ceil_div(left, BLOCK),)
        kernels._spread[grid](
            arrived, columns, part, table, rows, width, table.stride(0), left, BLOCK=BLOCK, num_warps=2
        )
        left = 0
