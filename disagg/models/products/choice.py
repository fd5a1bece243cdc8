"""Which kernel multiplies few rows by a weight: by shape. Pure.

Measured on H200s, and for what one of several ranks has on H100s (bench.products, docs/benchmarks.md), with weights of 17 to
235 MB: at one row a kernel without tensor cores is the fastest for all; up to 64 rows one that leaves partial sums to the norm
behind it, or computes the gate, too, saves a pass. Above, the library's are, but for the gate's of 128 rows, which fill a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.types.arithmetic import ceil_div

MOST_ROWS = 128
MANY_ROWS = 64  # above: only with the gate, where rows fill a tile
LEAST_ROWS = 16  # of a matrix product of tensor cores
FEW = 32  # rows up to which a program keeps the more tiles of weights under way
PROGRAMS = 256  # two on each multiprocessor: one, with half as many parts, is faster alone and slower among others
MOST_PARTS = 4
LEAST_PROGRAMS = 64  # of tiles of few rows: columns of one of several ranks that make fewer are cut into narrower ones
SMALL = 3072 * 4096  # weights of a product that one of several ranks has
SHORT = 4096  # depth


@dataclass(frozen=True, slots=True)
class OneRow:
    """Of models/products/kernels._one_row."""

    block_n: int
    block_k: int
    warps: int
    unroll: int


@dataclass(frozen=True, slots=True)
class FewRows:
    """How models/products/kernels._few_rows is launched. rows: for how many a program has room; parts: of the depth."""

    rows: int
    block_n: int
    block_k: int
    parts: int
    warps: int
    stages: int


def one_row(columns: int, depth: int, *, gated: bool, summed: bool = False) -> OneRow:
    """A program's block is two tiles of a gated product, or a tall one of a short product that is not small.

    summed: ranks add up their products. Then programs take so few registers that all run at once: each waits for the same one
    of other ranks.
    """
    unroll = 4
    if summed:
        block_k, warps, unroll = (1024, 4, 1) if depth <= SHORT else (512, 2, 4)
    elif gated or depth > 8192 or columns * depth <= SMALL:
        block_k, warps = 1024, 4
    else:
        block_k, warps = 2048, 8
    block_k = min(block_k, 1 << (depth - 1).bit_length())
    return OneRow(4, block_k, warps, min(unroll, ceil_div(depth, block_k)))


def few_rows(rows: int, columns: int, depth: int, *, gated: bool, in_parts: bool) -> FewRows | None:
    """None where the library is as fast, or the shape has no whole tiles.

    columns: of the result. in_parts: whoever takes it adds up partial sums.
    """
    if not 1 < rows <= MOST_ROWS:
        return None
    few = rows <= FEW
    padded = max(LEAST_ROWS, 1 << (rows - 1).bit_length())
    many = rows > MANY_ROWS
    if not (few or gated or (in_parts and not many)) or (many and rows < padded):
        return None
    parts = 1
    block_n, warps = 64, 4
    block_k, stages = (128, 4) if few else (64, 5) if many else (64, 4) if gated else (128, 3)
    if few and not gated and not in_parts and columns // block_n < LEAST_PROGRAMS and depth % 256 == 0:
        block_n, block_k, warps = 16, 256, 2
    while in_parts and parts < MOST_PARTS and columns // block_n * parts < PROGRAMS:
        parts *= 2
    while parts > 1 and depth % (block_k * parts):  # as of one of eight ranks
        parts //= 2
    if columns % block_n or depth % (block_k * parts):
        return None
    return FewRows(padded, block_n, block_k, parts, warps, stages)
