"""Products of few rows by all of a weight, which is read once and as fast as memory gives it.

    _one_row    of one row; no tensor cores. With the gate, or the sum of ranks, the residual and half a norm, behind it
    _few_rows   of up to 128; with the gate behind it, or as partial sums (split-K), which the norm behind it adds up

A weight is [N, K] and contiguous. GATE: its first N rows make the gate and the next N what is gated; 1 is SiLU, 2 is GELU by
tanh. Rounded is where transformers' modules round, but for the norm of one row: it is divided behind the product. A weight's
first tile is asked for before the kernel before this one is over.
"""

from __future__ import annotations

import triton
import triton.language as tl

from disagg.models.overlap import follow
from disagg.models.sums.kernels import sum_of_ranks


@triton.jit
def _active(gate, GATE: tl.constexpr):
    if GATE == 2:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))  # x (1 + tanh) / 2
    return gate / (1.0 + tl.exp(-gate))


@triton.jit
def _gated(gate, up, out_type: tl.constexpr, GATE: tl.constexpr):
    """act(gate) * up of float32 sums, rounded as modules of their own round."""
    active = _active(gate.to(out_type).to(tl.float32), GATE).to(out_type).to(tl.float32)
    return active * up.to(out_type).to(tl.float32)


@triton.jit
def _tile(at, real, depth, K: tl.constexpr, WHOLE: tl.constexpr):
    """Of a weight, which nothing reads again."""
    if WHOLE:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=real[:, None] & (depth < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _row(x, depth, K: tl.constexpr, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(x + depth).to(tl.float32)
    return tl.load(x + depth, mask=depth < K, other=0.0).to(tl.float32)


@triton.jit
def _one_row(
    x, squares, weight, bias, residual, norm_weight, out, scaled_out, squares_out, eps, slots, area, most_polls,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr,
    WHOLE: tl.constexpr, SQUARES: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    SCALE: tl.constexpr, OFFSET: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, ON_GPU: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[n] = x . weight[n]. x: [K]; out, residual: [N]; bias: of all rows of the weight. RANKS: that is the sum of as many
    ranks' (models/sums). ADD: residual is added.

    A norm is in two parts. SCALE, where its input is made: scaled_out = out times norm_weight, and squares_out[p] = the sum of
    squares of the p-th program's part of out. SQUARES, where its output is multiplied: x is such a product, not yet divided by
    the root of the mean of so many `squares`. OFFSET: the norm's weight is one less. WHOLE: blocks divide N and K.
    Grid: blocks of BLOCK_N columns.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    real = columns < N
    rows = weight + columns[:, None].to(tl.int64) * K + depth[None, :]
    w = _tile(rows, real, depth, K, WHOLE)
    if GATE:
        u = _tile(rows + N * K, real, depth, K, WHOLE)
    follow(OVERLAP)
    values = _row(x, depth, K, WHOLE)
    if SQUARES:
        PADDED: tl.constexpr = triton.next_power_of_2(SQUARES)
        part = tl.arange(0, PADDED)
        parts = tl.load(squares + part, mask=part < SQUARES, other=0.0)
    acc = w.to(tl.float32) * values[None, :]
    if GATE:
        acc_up = u.to(tl.float32) * values[None, :]
    for start in tl.range(BLOCK_K, K, BLOCK_K, loop_unroll_factor=UNROLL):
        w = _tile(rows + start, real, start + depth, K, WHOLE)
        values = _row(x, start + depth, K, WHOLE)
        acc += w.to(tl.float32) * values[None, :]
        if GATE:
            u = _tile(rows + N * K + start, real, start + depth, K, WHOLE)
            acc_up += u.to(tl.float32) * values[None, :]
    y = tl.sum(acc, 1)
    if GATE:
        up = tl.sum(acc_up, 1)
    if SQUARES:
        factor = tl.rsqrt(tl.sum(parts, 0) / K + eps)
        y *= factor
        if GATE:
            up *= factor
    if BIAS:
        y += tl.load(bias + columns, mask=real, other=0.0).to(tl.float32)
        if GATE:
            up += tl.load(bias + N + columns, mask=real, other=0.0).to(tl.float32)
    if GATE:
        y = _gated(y, up, out.dtype.element_ty, GATE)
    if RANKS > 1:
        y = sum_of_ranks(y, slots, columns, real, area, most_polls, RANK, RANKS, ON_GPU)
    if ADD:
        y = y.to(out.dtype.element_ty).to(tl.float32) + tl.load(residual + columns, mask=real, other=0.0).to(tl.float32)
    tl.store(out + columns, y, mask=real)
    if SCALE:
        y = tl.where(real, y.to(out.dtype.element_ty).to(tl.float32), 0.0)
        scale = tl.load(norm_weight + columns, mask=real, other=0.0).to(tl.float32)
        if OFFSET:
            scale += 1.0
        tl.store(scaled_out + columns, y * scale, mask=real)
        tl.store(squares_out + tl.program_id(0), tl.sum(y * y, 0))


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x, weight, bias, out, num_rows,
    N: tl.constexpr, K: tl.constexpr, X_ROW: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr, FULL: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[p, m, n] = x[m] . weight[n], of the p-th of PARTS parts of the depth. x: [num_rows, K], at most ROWS; FULL: as many.

    BLOCK_N divides N, and BLOCK_K * PARTS divides K. out: [PARTS, num_rows, N], float32 where there are several parts.
    Grid: N / BLOCK_N, PARTS.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    DEPTH: tl.constexpr = K // PARTS
    depth = part * DEPTH + tl.arange(0, BLOCK_K)
    rows = tl.arange(0, ROWS)
    real = rows < num_rows
    w_at = weight + columns[:, None].to(tl.int64) * K + depth[None, :]
    x_at = x + rows[:, None] * X_ROW + depth[None, :]
    follow(OVERLAP)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    acc_up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in tl.range(0, DEPTH, BLOCK_K, num_stages=STAGES):
        w = tl.load(w_at + start, eviction_policy="evict_first")
        if FULL:
            values = tl.load(x_at + start)
        else:
            values = tl.load(x_at + start, mask=real[:, None], other=0.0)
        acc = tl.dot(w, tl.trans(values), acc, input_precision="ieee")
        if GATE:
            u = tl.load(w_at + N * K + start, eviction_policy="evict_first")
            acc_up = tl.dot(u, tl.trans(values), acc_up, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + columns).to(tl.float32)[:, None]
        if GATE:
            acc_up += tl.load(bias + N + columns).to(tl.float32)[:, None]
    if GATE:
        acc = _gated(acc, acc_up, out.dtype.element_ty, GATE)
    at = out + part.to(tl.int64) * num_rows * N + rows[None, :] * N + columns[:, None]
    if FULL:
        tl.store(at, acc)
    else:
        tl.store(at, acc, mask=real[None, :])
