"""Columns and one table of pages of a step, from where they arrived to where graphs read them, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("rows", "width", "stride", "num_columns"))
def _spread(arrived, columns, pages, table, rows, width, stride, num_columns, BLOCK: tl.constexpr):
    """columns[:num_columns] = arrived[:num_columns]; table[:rows, :width] = pages, [rows, width]; stride: of the table's rows.

    Grid: rows, then programs of BLOCK elements of the columns.
    """
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if program < rows:
        for start in tl.range(0, width, BLOCK):
            at = start + lane
            values = tl.load(pages + program.to(tl.int64) * width + at, mask=at < width)
            tl.store(table + program.to(tl.int64) * stride + at, values, mask=at < width)
    else:
        at = (program - rows) * BLOCK + lane
        tl.store(columns + at, tl.load(arrived + at, mask=at < num_columns), mask=at < num_columns)
