"""Triton kernels that attend over pages where they lie: nothing is gathered.

    _split    decode. One program takes one KV head of one sequence, with all query heads that share it, and some of the
              sequence's tokens. Long sequences are split over several programs, as many as fill the GPU (split-KV).
    _merge    puts the parts of split sequences together.
    _chunk    prefill. One program takes a *tile*: up to BLOCK_M consecutive rows of one run, and one query head.

All read a layer's K and V through the pool's strides: unit (page, K or V, head), [PAGE_TOKENS, HEAD_DIM] and contiguous, is
at page * page_stride + (which * KV_HEADS + head) * PAGE_TOKENS * HEAD_DIM elements after the layer's first one. Pages may be
anywhere in the pool, so products with a page's id are 64 bits wide. A slot that a row does not see is never read: it may
hold anything.

Softmax is kept in base 2 and float32, and so are products of float32: token-exactness does not survive tf32.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-1e30)  # a score of no weight. Not -inf, of which the difference to itself is NaN
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _score(q, k, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores in base 2 of queries [M, D] and keys [N, D]. scale: of q k, in base 2 where there is no softcap."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP:
        # tanh by exp2: the interpreter has no tanh
        bounded = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * _LOG2_E / softcap)))
        scores = bounded * (softcap * _LOG2_E)
    return scores


@triton.jit
def _weigh(scores, v, acc, top, total):
    """One step of the softmax that runs along with the keys. acc: [M, D]; top, total: [M]."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, total * shrink + tl.sum(weights, 1)


@triton.jit
def _part_of(
    row, part, lengths, first_pages, share, window, PAGE_TOKENS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Tokens [begin, end) of a sequence that one of its parts sees, how many parts it has, and its first page's first token.

    As many parts as it has shares, rounded. share: [1], the tokens that a program should take.
    """
    length = tl.load(lengths + row).to(tl.int32)
    skipped = tl.load(first_pages + row).to(tl.int32) * PAGE_TOKENS
    first = tl.maximum(length - window, 0)
    seen = length - first
    wanted = tl.load(share).to(tl.int32)
    parts = tl.minimum(tl.maximum((seen + wanted // 2) // wanted, 1), PARTS)
    per_part = tl.cdiv(tl.cdiv(seen, parts), BLOCK) * BLOCK
    begin = first + part * per_part
    return begin, tl.minimum(begin + per_part, length), tl.cdiv(seen, per_part), skipped


@triton.jit
def _split(
    query, kv, pages, lengths, first_pages, share, sinks, out, part_acc, part_top,
    query_row, query_head, pages_row, page_stride, layer_offset, window, scale, softcap,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    HEADS: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """query: row r, head h at r * query_row + h * query_head. out: [rows, QUERY_HEADS, HEAD_DIM].

    PARTS > 1: part_acc [rows, QUERY_HEADS, PARTS, HEAD_DIM], part_top [rows, QUERY_HEADS, PARTS, 2] (top, total), float32.
    HEADS: query heads of a program, at least 16, which a matrix product has; DIMS: HEAD_DIM, rounded up to a power of 2.
    Grid: rows, KV_HEADS * blocks of query heads, PARTS.
    """
    row = tl.program_id(0)
    GROUP: tl.constexpr = QUERY_HEADS // KV_HEADS
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    in_group = tl.program_id(1) % HEAD_BLOCKS * HEADS + tl.arange(0, HEADS)
    part = tl.program_id(2)
    begin, end, _, skipped = _part_of(row, part, lengths, first_pages, share, window, PAGE_TOKENS, PARTS, BLOCK)
    if begin < end:
        heads = kv_head * GROUP + in_group
        dims = tl.arange(0, DIMS)
        real = (in_group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        q = tl.load(
            query + row.to(tl.int64) * query_row + heads[:, None] * query_head + dims[None, :], mask=real, other=0.0
        )
        top = tl.full([HEADS], _LOWEST, tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, DIMS], tl.float32)
        unit: tl.constexpr = PAGE_TOKENS * HEAD_DIM
        head_kv = kv + layer_offset + kv_head * unit
        row_pages = pages + row.to(tl.int64) * pages_row
        for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
            token = start + tl.arange(0, BLOCK)
            seen = token < end
            place = token - skipped
            page = tl.load(row_pages + place // PAGE_TOKENS, mask=seen, other=0).to(tl.int64)
            at = head_kv + (page * page_stride + (place % PAGE_TOKENS) * HEAD_DIM)[:, None] + dims[None, :]
            if DIMS == HEAD_DIM:
                there = seen[:, None]
            else:
                there = seen[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(at, mask=there, other=0.0)
            scores = tl.where(seen[None, :], _score(q, k, scale, softcap, SOFTCAP), _LOWEST)
            v = tl.load(at + KV_HEADS * unit, mask=there, other=0.0)
            acc, top, total = _weigh(scores, v, acc, top, total)
        place = row.to(tl.int64) * QUERY_HEADS + heads
        if PARTS == 1:
            if SINKS:
                total += tl.exp2(
                    tl.load(sinks + heads, mask=in_group < GROUP, other=0.0).to(tl.float32) * _LOG2_E - top
                )
            tl.store(out + place[:, None] * HEAD_DIM + dims[None, :], acc / total[:, None], mask=real)
        else:
            place = place * PARTS + part
            tl.store(part_acc + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=real)
            tl.store(part_top + place * 2, top, mask=in_group < GROUP)
            tl.store(part_top + place * 2 + 1, total, mask=in_group < GROUP)


@triton.jit
def _merge(
    part_acc, part_top, lengths, first_pages, share, sinks, out, window,
    QUERY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr, DIMS: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PARTS_2: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """What `_split` left. PARTS_2: PARTS, rounded up to a power of 2. Grid: rows, QUERY_HEADS."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    _, _, count, _ = _part_of(row, 0, lengths, first_pages, share, window, PAGE_TOKENS, PARTS, BLOCK)
    parts = tl.arange(0, PARTS_2)
    dims = tl.arange(0, DIMS)
    there = parts < count
    place = row.to(tl.int64) * QUERY_HEADS + head
    tops = tl.load(part_top + (place * PARTS + parts) * 2, mask=there, other=_LOWEST)
    totals = tl.load(part_top + (place * PARTS + parts) * 2 + 1, mask=there, other=0.0)
    top = tl.max(tops, 0)
    weights = tl.where(there, tl.exp2(tops - top), 0.0)
    total = tl.sum(totals * weights, 0)
    if SINKS:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * _LOG2_E - top)
    real = there[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.load(part_acc + (place * PARTS + parts)[:, None] * HEAD_DIM + dims[None, :], mask=real, other=0.0)
    merged = tl.sum(acc * weights[:, None], 0) / total
    tl.store(out + place * HEAD_DIM + dims, merged, mask=dims < HEAD_DIM)


@triton.jit
def _load_rows(
    head_kv, row_pages, place, seen, dims, page_stride,
    HEAD_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Where K of BLOCK tokens is, from place `place` of a run's pages on, and which of it may be read."""
    places = place + tl.arange(0, BLOCK)
    if WHOLE:  # a tile of keys lies in one page
        page = tl.load(row_pages + place // PAGE_TOKENS).to(tl.int64)
        at = head_kv + page * page_stride + ((places % PAGE_TOKENS) * HEAD_DIM)[:, None] + dims[None, :]
    else:
        if MASKED:
            page = tl.load(row_pages + places // PAGE_TOKENS, mask=seen, other=0).to(tl.int64)
        else:
            page = tl.load(row_pages + places // PAGE_TOKENS).to(tl.int64)
        at = head_kv + (page * page_stride + (places % PAGE_TOKENS) * HEAD_DIM)[:, None] + dims[None, :]
    return at


@triton.jit
def _attend(
    q, acc, top, total, begin, end, first, stop, positions, skipped, head_kv, row_pages, page_stride, window, scale, softcap,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Keys [begin, end). MASKED: of which some row may not see some; only tokens [first, stop) are read."""
    dims = tl.arange(0, DIMS)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK)
        seen = (token >= first) & (token < stop)
        at = _load_rows(
            head_kv, row_pages, start - skipped, seen, dims, page_stride, HEAD_DIM, PAGE_TOKENS, BLOCK, MASKED, WHOLE
        )
        there = (dims < HEAD_DIM)[None, :]
        if MASKED:
            there = there & seen[:, None]
        if MASKED or DIMS != HEAD_DIM:
            k = tl.load(at, mask=there, other=0.0)
            v = tl.load(at + KV_HEADS * PAGE_TOKENS * HEAD_DIM, mask=there, other=0.0)
        else:
            k = tl.load(at)
            v = tl.load(at + KV_HEADS * PAGE_TOKENS * HEAD_DIM)
        scores = _score(q, k, scale, softcap, SOFTCAP)
        if MASKED:
            visible = (token[None, :] <= positions[:, None]) & (token[None, :] > positions[:, None] - window)
            scores = tl.where(visible & seen[None, :], scores, _LOWEST)
        acc, top, total = _weigh(scores, v, acc, top, total)
    return acc, top, total


@triton.jit
def _chunk(
    query, kv, pages, first_pages, tiles, sinks, out,
    query_row, query_head, pages_row, page_stride, layer_offset, window, scale, softcap,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    DIMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """tiles: [tiles, 4] int64: first row in the batch, how many, the position of the first, the run's row in `pages`.

    query: as in `_split`; out: [rows, QUERY_HEADS, HEAD_DIM]. window: any number above every position where there is none.
    Grid: QUERY_HEADS, tiles. Heads that share K and V run side by side.

        keys of a tile:  first │ window's edge: masked │ seen by all rows │ the diagonal: masked │ last row
    """
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 4
    first_row = tl.load(tile)
    num_rows = tl.load(tile + 1).to(tl.int32)
    position = tl.load(tile + 2).to(tl.int32)
    run = tl.load(tile + 3)
    skipped = tl.load(first_pages + run).to(tl.int32) * PAGE_TOKENS
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIMS)
    real = (rows < num_rows)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(
        query + (first_row + rows)[:, None] * query_row + head * query_head + dims[None, :], mask=real, other=0.0
    )
    top = tl.full([BLOCK_M], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIMS], tl.float32)
    head_kv = kv + layer_offset + head // (QUERY_HEADS // KV_HEADS) * (PAGE_TOKENS * HEAD_DIM)
    row_pages = pages + run * pages_row
    positions = position + rows
    stop = position + num_rows  # behind the last key
    first = tl.maximum(position - window + 1, 0)
    begin = first // BLOCK * BLOCK
    diagonal = (position + 1) // BLOCK * BLOCK  # keys before it are behind no row
    whole = begin
    if WINDOW:
        whole = tl.minimum(tl.maximum(tl.cdiv(position + num_rows - window, BLOCK) * BLOCK, begin), diagonal)
        acc, top, total = _attend(
            q, acc, top, total, begin, whole, first, stop, positions, skipped, head_kv, row_pages, page_stride, window,
            scale, softcap, KV_HEADS, HEAD_DIM, PAGE_TOKENS, DIMS, BLOCK, True, SOFTCAP, False, 1,
        )  # fmt: skip
    acc, top, total = _attend(
        q, acc, top, total, whole, diagonal, first, stop, positions, skipped, head_kv, row_pages, page_stride, window,
        scale, softcap, KV_HEADS, HEAD_DIM, PAGE_TOKENS, DIMS, BLOCK, False, SOFTCAP, WHOLE, STAGES,
    )  # fmt: skip
    acc, top, total = _attend(
        q, acc, top, total, diagonal, stop, first, stop, positions, skipped, head_kv, row_pages, page_stride, window,
        scale, softcap, KV_HEADS, HEAD_DIM, PAGE_TOKENS, DIMS, BLOCK, True, SOFTCAP, False, 1,
    )  # fmt: skip
    if SINKS:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * _LOG2_E - top)
    place = ((first_row + rows) * QUERY_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + place, acc / total[:, None], mask=real)


@triton.jit
def _merge_two(
    one, one_sums, other, other_sums, out, row_stride, head_stride, sums_row, sums_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Two attentions over different keys. sums: natural logarithms. out: [rows, HEADS, HEAD_DIM]. Grid: rows, HEADS."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, DIMS)
    real = dims < HEAD_DIM
    one_sum = tl.load(one_sums + row * sums_row + head * sums_head)
    other_sum = tl.load(other_sums + row * sums_row + head * sums_head)
    top = tl.maximum(one_sum, other_sum)
    one_weight = tl.exp2((one_sum - top) * _LOG2_E)
    other_weight = tl.exp2((other_sum - top) * _LOG2_E)
    at = row * row_stride + head * head_stride + dims
    one_part = tl.load(one + at, mask=real, other=0.0).to(tl.float32) * one_weight
    other_part = tl.load(other + at, mask=real, other=0.0).to(tl.float32) * other_weight
    merged = (one_part + other_part) / (one_weight + other_weight)
    tl.store(out + (row * HEADS + head) * HEAD_DIM + dims, merged, mask=real)
