"""Triton kernels of the fusion pass. Each rounds where transformers' modules round, but for RoPE, which they round twice.

Rows are programs, and lie wherever their stride says; columns are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

from disagg.models.overlap import follow
from disagg.models.sums.kernels import sum_of_ranks


@triton.jit
def _rms_norm(
    x, residual, weight, out, total, x_row, x_part, residual_row, eps, slots, area, most_polls,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, ADD: tl.constexpr, OFFSET: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, ON_GPU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = norm(x) * weight, rows contiguous. ADD: total = residual + x, and that is normed.

    PARTS: x is the sum of so many, x_part apart. RANKS: and then of as many ranks' (models/sums). OFFSET: Gemma's: (1 + weight),
    multiplied in float32. Grid: rows.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    real = columns < SIZE
    w = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    follow(OVERLAP)
    value = tl.load(x + row * x_row + columns, mask=real, other=0.0)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            value += tl.load(x + part * x_part + row * x_row + columns, mask=real, other=0.0)
        value = value.to(out.dtype.element_ty)
    if RANKS > 1:
        summed = sum_of_ranks(value, slots, row * SIZE + columns, real, area, most_polls, RANK, RANKS, ON_GPU)
        value = summed.to(out.dtype.element_ty)
    if ADD:
        value = (
            value.to(tl.float32) + tl.load(residual + row * residual_row + columns, mask=real, other=0.0).to(tl.float32)
        ).to(value.dtype)
        tl.store(total + row * SIZE + columns, value, mask=real)
    wide = value.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    if OFFSET:
        normed = normed * (1.0 + w)
    else:
        normed = normed.to(value.dtype).to(tl.float32) * w
    tl.store(out + row * SIZE + columns, normed, mask=real)


@triton.jit
def _gate(
    both, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, TANH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = act(gate) * up. both: [rows, 2 * SIZE], gate before up. TANH: GELU by tanh, else SiLU. Grid: rows, blocks."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < SIZE
    follow(OVERLAP)
    gate = tl.load(both + row * 2 * SIZE + columns, mask=real, other=0.0)
    up = tl.load(both + row * 2 * SIZE + SIZE + columns, mask=real, other=0.0)
    wide = gate.to(tl.float32)
    if TANH:
        inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
        active = wide * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))  # x (1 + tanh) / 2
    else:
        active = wide / (1.0 + tl.exp(-wide))
    tl.store(out + row * SIZE + columns, active.to(gate.dtype).to(tl.float32) * up.to(tl.float32), mask=real)


@triton.jit
def _rotated(
    at, head_weight, cos_low, cos_high, sin_low, sin_high, eps, heads, low, real,
    HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Both halves of some heads' dims, rotated. at: their heads' first dims; NORM: normed before, with that weight."""
    x1 = tl.load(at + low, mask=real, other=0.0)
    x2 = tl.load(at + HALF + low, mask=real, other=0.0)
    wide1, wide2 = x1.to(tl.float32), x2.to(tl.float32)
    if NORM:
        w1 = tl.load(head_weight + low, mask=low < HALF, other=0.0).to(tl.float32)
        w2 = tl.load(head_weight + HALF + low, mask=low < HALF, other=0.0).to(tl.float32)
        scale = tl.rsqrt((tl.sum(wide1 * wide1, 1) + tl.sum(wide2 * wide2, 1)) / (2 * HALF) + eps)[:, None]
        wide1 = ((wide1 * scale).to(x1.dtype).to(tl.float32) * w1).to(x1.dtype).to(tl.float32)
        wide2 = ((wide2 * scale).to(x1.dtype).to(tl.float32) * w2).to(x1.dtype).to(tl.float32)
    return wide1 * cos_low - wide2 * sin_low, wide2 * cos_high + wide1 * sin_high


@triton.jit
def _rotate_and_write(
    qkv, cos, sin, query_weight, key_weight, kv, write_pages, write_offsets,
    qkv_row, page_stride, layer_offset, eps,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    QUERY_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """RoPE of a row's queries and keys, in place, and its K and V to their place; a row whose page is negative has none.

    qkv: a row's query heads, key heads, value heads. cos, sin: [rows, HEAD_DIM], whose halves need not be alike.
    *_BLOCK: rounded up to powers of 2. NORM: heads are normed before they are rotated. Grid: rows.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    low = tl.arange(0, HALF_BLOCK)[None, :]
    there = low < HALF
    cos_low = tl.load(cos + row * HEAD_DIM + low, mask=there, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + row * HEAD_DIM + HALF + low, mask=there, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + row * HEAD_DIM + low, mask=there, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + row * HEAD_DIM + HALF + low, mask=there, other=0.0).to(tl.float32)
    page = tl.load(write_pages + row)
    follow(OVERLAP)

    heads = tl.arange(0, QUERY_BLOCK)[:, None]
    real = (heads < QUERY_HEADS) & there
    at = qkv + row * qkv_row + heads * HEAD_DIM
    first, second = _rotated(at, query_weight, cos_low, cos_high, sin_low, sin_high, eps, heads, low, real, HALF, NORM)
    tl.store(at + low, first, mask=real)
    tl.store(at + HALF + low, second, mask=real)

    heads = tl.arange(0, KV_BLOCK)[:, None]
    real = (heads < KV_HEADS) & there
    at = qkv + row * qkv_row + (QUERY_HEADS + heads) * HEAD_DIM
    first, second = _rotated(at, key_weight, cos_low, cos_high, sin_low, sin_high, eps, heads, low, real, HALF, NORM)
    tl.store(at + low, first, mask=real)
    tl.store(at + HALF + low, second, mask=real)
    if page >= 0:
        unit: tl.constexpr = PAGE_TOKENS * HEAD_DIM
        target = kv + page * page_stride + layer_offset + tl.load(write_offsets + row) * HEAD_DIM + heads * unit
        tl.store(target + low, first, mask=real)
        tl.store(target + HALF + low, second, mask=real)
        at += KV_HEADS * HEAD_DIM
        target += KV_HEADS * unit
        tl.store(target + low, tl.load(at + low, mask=real, other=0.0), mask=real)
        tl.store(target + HALF + low, tl.load(at + HALF + low, mask=real, other=0.0), mask=real)


@triton.jit
def _look_up_rotation(
    table, positions, cos, sin, position_stride,
    HALF: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Each row's cosines and sines, for both halves of a head. table: [positions, 2, HALF]; cos, sin: [rows, 2 * HALF].
    Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    real = columns < HALF
    follow(OVERLAP)
    at = table + tl.load(positions + row * position_stride).to(tl.int64) * 2 * HALF + columns
    cosines, sines = tl.load(at, mask=real), tl.load(at + HALF, mask=real)
    to = row * 2 * HALF + columns
    tl.store(cos + to, cosines, mask=real)
    tl.store(cos + to + HALF, cosines, mask=real)
    tl.store(sin + to, sines, mask=real)
    tl.store(sin + to + HALF, sines, mask=real)


@triton.jit
def _token_ids(input_ids, carried, before, out, num_rows, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """out = input_ids where carried is negative, else before[carried], at least 0. Grid: blocks of rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < num_rows
    follow(OVERLAP)
    which = tl.load(carried + row, mask=real, other=-1)
    known = tl.load(input_ids + row, mask=real, other=0)
    sampled = tl.load(before + tl.maximum(which, 0), mask=real & (which >= 0), other=0)
    tl.store(out + row, tl.where(which < 0, known, tl.maximum(sampled, 0)), mask=real)
