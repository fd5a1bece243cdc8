"""Triton kernels of the first argmax of rows. See models/argmax/first."""

from __future__ import annotations

import triton
import triton.language as tl

from disagg.models.overlap import follow

ALIGNED = tl.constexpr(16)


@triton.jit(do_not_specialize=["part"])
def _of_parts(
    x, tops, places, x_row, width, part, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """tops, places: [rows, parts], of each part of `part` columns, so many ALIGNED; a top is infinite where one is NaN.
    Grid: rows, parts."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.multiple_of(tl.program_id(1) * part, ALIGNED)  # else elements are loaded one by one
    end = tl.minimum(begin + part, width)
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    place = begin + lane
    odd = tl.zeros([BLOCK], tl.int1)
    follow(OVERLAP)
    for start in tl.range(begin, end, BLOCK):
        at = start + lane
        value = tl.load(x + row * x_row + at, mask=at < end, other=-float("inf")).to(tl.float32)
        odd |= value != value
        better = value > top
        top = tl.where(better, value, top)
        place = tl.where(better, at, place)
    largest = tl.max(top, 0)
    first = tl.min(tl.where(top == largest, place, width), 0)
    index = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(tops + index, tl.where(tl.max(odd.to(tl.int32), 0) > 0, float("inf"), largest))
    tl.store(places + index, first)


@triton.jit(do_not_specialize=["parts"])
def _of_rows(tops, places, out, parts, PADDED: tl.constexpr, OVERLAP: tl.constexpr):
    """out: [rows] int64, -1 where the largest is not finite. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    real = part < parts
    follow(OVERLAP)
    top = tl.load(tops + row * parts + part, mask=real, other=-float("inf"))
    place = tl.load(places + row * parts + part, mask=real, other=0x7FFFFFFF)
    largest = tl.max(top, 0)
    first = tl.min(tl.where((top == largest) & real, place, 0x7FFFFFFF), 0)
    tl.store(out + row, tl.where(tl.abs(largest) == float("inf"), -1, first).to(tl.int64))
