"""Launches the kernels of models/products. Knows tensors and which kernel fits; nothing of modules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.models.overlap import overlap
from disagg.models.products import kernels
from disagg.models.products.choice import FewRows, OneRow, few_rows, one_row
from disagg.models.sums.shared import Slot, no_sum
from disagg.types.arithmetic import ceil_div

SILU, GELU_TANH = 1, 2
HALF_DTYPES = (torch.bfloat16, torch.float16)
SUM_BYTES = 4  # of a number that ranks add up for one row: float32, which costs nothing there


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm. offset: its weight is one less."""

    weight: Tensor
    eps: float
    offset: bool


@dataclass(frozen=True, slots=True)
class Scaled:
    """A row whose norm is half done. row, scaled: [1, K], the second times the norm's weight; squares: [parts] float32, whose
    sum is that of the row's squares; eps: the norm's.

    In float16 `scaled` is float32: not yet divided by the root, it may be larger or smaller than float16 holds.
    """

    row: Tensor
    scaled: Tensor
    squares: Tensor
    eps: float


def multiply_one(row: Tensor | Scaled, weight: Tensor, bias: Tensor | None = None, *, gate: int = 0) -> Tensor:
    """[1, N] of a row, [1, K], or of its norm. gate: SILU or GELU_TANH: the weight is [2 N, K], gate before up."""
    columns = weight.shape[0] // (2 if gate else 1)
    how = one_row(columns, weight.shape[1], gated=bool(gate))
    made = launch_one(how, row, weight, bias, gate=gate)
    assert isinstance(made, Tensor)
    return made


def add_one(
    row: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Norm | None, slot: Slot | None = None
) -> Tensor | Scaled:
    """residual: [1, N], plus the product of row: [1, K]; for that norm behind it, if it is known. slot: where ranks, of which
    each has a part of K, add up their products."""
    how = one_row(weight.shape[0], weight.shape[1], gated=False, summed=slot is not None)
    return launch_one(how, row, weight, bias, residual=residual, norm=norm, slot=slot)


def launch_one(
    how: OneRow,
    row: Tensor | Scaled,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gate: int = 0,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    slot: Slot | None = None,
) -> Tensor | Scaled:
    """As multiply_one and add_one, by that kernel."""
    depth = weight.shape[1]
    columns = weight.shape[0] // (2 if gate else 1)
    x = row.scaled if isinstance(row, Scaled) else row
    dtype = row.row.dtype if isinstance(row, Scaled) else x.dtype
    out = torch.empty((1, columns), dtype=dtype, device=x.device)
    programs = ceil_div(columns, how.block_n)
    made: Tensor | Scaled = out
    if norm is not None:
        squares = torch.empty(programs, dtype=torch.float32, device=x.device)
        scaled = torch.empty_like(out, dtype=torch.float32 if dtype is torch.float16 else dtype)
        made = Scaled(out, scaled, squares, norm.eps)
    kernels._one_row[(programs,)](
        x,
        row.squares if isinstance(row, Scaled) else x,  # any pointers, where there are none
        weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        weight if norm is None else norm.weight,
        out,
        made.scaled if isinstance(made, Scaled) else out,
        made.squares if isinstance(made, Scaled) else out,
        row.eps if isinstance(row, Scaled) else 0.0,
        N=columns,
        K=depth,
        BLOCK_N=how.block_n,
        BLOCK_K=how.block_k,
        UNROLL=how.unroll,
        WHOLE=columns % how.block_n == 0 and depth % how.block_k == 0,
        SQUARES=row.squares.shape[0] if isinstance(row, Scaled) else 0,
        GATE=gate,
        BIAS=bias is not None,
        ADD=residual is not None,
        SCALE=norm is not None,
        OFFSET=norm is not None and norm.offset,
        num_warps=how.warps,
        **(no_sum(x) if slot is None else slot.arguments(SUM_BYTES)),
        **overlap(x.device),
    )
    return made


def multiply_few(
    rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, gate: int = 0, in_parts: bool = False
) -> Tensor | None:
    """[parts, R, N] of rows: [R, K], float32 if there are several parts; None where the library's product is to be taken."""
    num_rows, depth = rows.shape
    columns = weight.shape[0] // (2 if gate else 1)
    how = few_rows(num_rows, columns, depth, gated=bool(gate), in_parts=in_parts and bias is None)
    if how is None or rows.dtype not in HALF_DTYPES:
        return None
    return launch_few(how, rows, weight, bias, gate)


def launch_few(how: FewRows, rows: Tensor, weight: Tensor, bias: Tensor | None, gate: int) -> Tensor:
    """As multiply_few, in any dtype."""
    num_rows, depth = rows.shape
    columns = weight.shape[0] // (2 if gate else 1)
    dtype = torch.float32 if how.parts > 1 else rows.dtype
    out = torch.empty((how.parts, num_rows, columns), dtype=dtype, device=rows.device)
    kernels._few_rows[(columns // how.block_n, how.parts)](
        rows,
        weight,
        weight if bias is None else bias,
        out,
        num_rows,
        N=columns,
        K=depth,
        X_ROW=rows.stride(0),
        ROWS=how.rows,
        BLOCK_N=how.block_n,
        BLOCK_K=how.block_k,
        PARTS=how.parts,
        STAGES=how.stages,
        FULL=num_rows == how.rows,
        GATE=gate,
        BIAS=bias is not None,
        num_warps=how.warps,
        **overlap(rows.device),
    )
    return out
