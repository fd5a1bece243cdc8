"""Triton kernels that write to pages and attend over them where they lie: nothing is gathered.

    _cut      decode, once per step. Cuts sequences into parts of like length, as many as fill the GPU (split-KV).
    _split    decode. One program takes one part of a sequence, one KV head, and all query heads that share it.
    _merge    decode. Puts the parts of sequences of several parts together.
    _write    stores the new K and V of a row in its place.
    _chunk    prefill. One program takes a *tile*: up to BLOCK_M consecutive rows of one run, and one query head.

All read a layer's K and V through the pool's strides: unit (page, K or V, head), [PAGE_TOKENS, HEAD_DIM] and contiguous, is
at page * page_stride + (which * KV_HEADS + head) * PAGE_TOKENS * HEAD_DIM elements after the layer's first one. Pages may be
anywhere in the pool, so products with a page's id are 64 bits wide. A place that a row does not see is never read: it may
hold anything.

Softmax is kept in base 2 and float32, and so are products of float32: token-exactness does not survive tf32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from disagg.models.overlap import follow

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
def _cut(
    lengths, first_pages, items, splits, num_splits, window, shares, num_rows,
    ROWS: tl.constexpr, ITEMS: tl.constexpr, BLOCK: tl.constexpr, PAGE_TOKENS: tl.constexpr,
):  # fmt: skip
    """Cuts what sequences see into items of work, as equal as whole parts of a sequence are.

    A share is all tokens that are seen, over `shares`, and BLOCK at least; a sequence has as many parts as it has shares,
    rounded. items: [most, 4] int32, (row, first place, place behind the last, 1 if it is the whole sequence), row -1 where
    there is none; places are tokens from the row's first page on. splits: [most, 3] int32, (row, first item, number of
    items) of sequences of several; num_splits: [1].
    ROWS: num_rows, rounded up to a power of 2. Grid: blocks of ITEMS items, each of which looks at all lengths.
    """
    rows = tl.arange(0, ROWS)
    seen = tl.minimum(tl.load(lengths + rows, mask=rows < num_rows, other=0).to(tl.int32), window)
    share = tl.maximum(tl.cdiv(tl.sum(seen, 0), shares), BLOCK)
    parts = tl.where(rows < num_rows, tl.maximum((seen + share // 2) // share, 1), 0)
    ends = tl.cumsum(parts, 0)

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    over = ends[None, :] <= item[:, None]  # rows all of whose items are before this one
    row = tl.sum(over.to(tl.int32), 1)
    part = item - tl.sum(tl.where(over, parts[None, :], 0), 1)
    there = row < num_rows
    length = tl.load(lengths + row, mask=there, other=0).to(tl.int32)
    row_seen = tl.minimum(length, window)
    row_parts = tl.maximum((row_seen + share // 2) // share, 1)
    tokens = tl.cdiv(tl.cdiv(row_seen, row_parts), BLOCK) * BLOCK
    end = length - tl.load(first_pages + row, mask=there, other=0).to(tl.int32) * PAGE_TOKENS
    begin = tl.minimum(end - row_seen + part * tokens, end)
    tl.store(items + item * 4, tl.where(there, row, -1))
    tl.store(items + item * 4 + 1, begin)
    tl.store(items + item * 4 + 2, tl.minimum(begin + tokens, end))
    tl.store(items + item * 4 + 3, (row_parts == 1).to(tl.int32))

    if tl.program_id(0) == 0:
        split = parts > 1
        index = tl.cumsum(split.to(tl.int32), 0) - 1
        tl.store(splits + index * 3, rows, mask=split)
        tl.store(splits + index * 3 + 1, ends - parts, mask=split)
        tl.store(splits + index * 3 + 2, parts, mask=split)
        tl.store(num_splits, tl.sum(split.to(tl.int32), 0))


@triton.jit
def _place_of_keys(
    row_pages, start, end, page_stride,
    HEAD_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Where keys [start, start + BLOCK) of a row are, in elements. WHOLE: they lie in one page."""
    place = start + tl.arange(0, BLOCK)
    if WHOLE:
        page = tl.load(row_pages + start // PAGE_TOKENS).to(tl.int64)
        return page * page_stride + start % PAGE_TOKENS * HEAD_DIM + tl.arange(0, BLOCK) * HEAD_DIM
    page = tl.load(row_pages + place // PAGE_TOKENS, mask=place < end, other=0).to(tl.int64)
    return page * page_stride + place % PAGE_TOKENS * HEAD_DIM


@triton.jit(do_not_specialize=("pages_row",))
def _split(
    query, kv, pages, items, sinks, out, part_acc, part_top, first_row,
    query_row, query_head, pages_row, page_stride, layer_offset, scale, softcap,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    HEADS: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    STAGES: tl.constexpr, WHOLE: tl.constexpr, SHIFTED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One item of work. query: row r, head h at r * query_row + h * query_head.

    SHIFTED: rows of query and out are behind the row that first_row, [1], names, and sequences of length 0 have none.

    A whole sequence goes to out [rows, QUERY_HEADS, HEAD_DIM]; a part of one to part_acc [items, QUERY_HEADS, HEAD_DIM] and
    part_top [items, QUERY_HEADS, 2] (top, total), float32. HEADS: query heads of a program, at least 16, which a matrix
    product has; DIMS: HEAD_DIM, rounded up to a power of 2. WHOLE: parts begin at tiles of keys, which lie in one page.
    Grid: KV_HEADS * blocks of query heads, items.
    """
    item = tl.program_id(1)
    row = tl.load(items + item * 4).to(tl.int64)
    follow(OVERLAP)
    if row >= 0:
        begin = tl.load(items + item * 4 + 1)
        end = tl.load(items + item * 4 + 2)
        whole = tl.load(items + item * 4 + 3)
        GROUP: tl.constexpr = QUERY_HEADS // KV_HEADS
        HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
        kv_head = tl.program_id(0) // HEAD_BLOCKS
        in_group = tl.program_id(0) % HEAD_BLOCKS * HEADS + tl.arange(0, HEADS)
        heads = kv_head * GROUP + in_group
        dims = tl.arange(0, DIMS)
        real = (in_group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        query_at = row
        if SHIFTED:
            query_at += tl.load(first_row)
            real = real & (begin < end)
        q = tl.load(query + query_at * query_row + heads[:, None] * query_head + dims[None, :], mask=real, other=0.0)
        top = tl.full([HEADS], _LOWEST, tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, DIMS], tl.float32)
        unit: tl.constexpr = PAGE_TOKENS * HEAD_DIM
        head_kv = kv + layer_offset + kv_head * unit
        row_pages = pages + row * pages_row
        for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
            seen = start + tl.arange(0, BLOCK) < end
            at = _place_of_keys(row_pages, start, end, page_stride, HEAD_DIM, PAGE_TOKENS, BLOCK, WHOLE)
            at = head_kv + at[:, None] + dims[None, :]
            if DIMS == HEAD_DIM:
                there = seen[:, None]
            else:
                there = seen[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(at, mask=there, other=0.0)
            scores = tl.where(seen[None, :], _score(q, k, scale, softcap, SOFTCAP), _LOWEST)
            v = tl.load(at + KV_HEADS * unit, mask=there, other=0.0)
            acc, top, total = _weigh(scores, v, acc, top, total)
        if whole:
            total = tl.where(begin < end, total, 1.0)  # a row of no sequence gives zeros
            if SINKS:
                total += tl.exp2(
                    tl.load(sinks + heads, mask=in_group < GROUP, other=0.0).to(tl.float32) * _LOG2_E - top
                )
            place = query_at * QUERY_HEADS + heads
            tl.store(out + place[:, None] * HEAD_DIM + dims[None, :], acc / total[:, None], mask=real)
        else:
            place = item.to(tl.int64) * QUERY_HEADS + heads
            tl.store(part_acc + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=real)
            tl.store(part_top + place * 2, top, mask=in_group < GROUP)
            tl.store(part_top + place * 2 + 1, total, mask=in_group < GROUP)


@triton.jit
def _merge(
    part_acc, part_top, splits, num_splits, sinks, out, first_row,
    QUERY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr,
    SHIFTED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """What `_split` left of sequences of several parts, PARTS of them at a time. SHIFTED: as there. Grid: QUERY_HEADS, most
    splits."""
    head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.load(splits + split * 3).to(tl.int64)
    first = tl.load(splits + split * 3 + 1)
    count = tl.load(splits + split * 3 + 2)
    there_are = tl.load(num_splits)
    follow(OVERLAP)
    if split < there_are:
        dims = tl.arange(0, DIMS)
        top = tl.full([1], _LOWEST, tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([DIMS], tl.float32)
        for start in tl.range(0, count, PARTS):
            part = start + tl.arange(0, PARTS)
            there = part < count
            place = (first + part).to(tl.int64) * QUERY_HEADS + head
            tops = tl.load(part_top + place * 2, mask=there, other=_LOWEST)
            totals = tl.load(part_top + place * 2 + 1, mask=there, other=0.0)
            real = there[:, None] & (dims < HEAD_DIM)[None, :]
            accs = tl.load(part_acc + place[:, None] * HEAD_DIM + dims[None, :], mask=real, other=0.0)
            new_top = tl.maximum(top, tl.max(tops, 0))
            weights = tl.where(there, tl.exp2(tops - new_top), 0.0)
            shrink = tl.exp2(top - new_top)
            acc = acc * shrink + tl.sum(accs * weights[:, None], 0)
            total = total * shrink + tl.sum(totals * weights, 0)
            top = new_top
        if SINKS:
            total += tl.exp2(tl.load(sinks + head).to(tl.float32) * _LOG2_E - top)
        if SHIFTED:
            row += tl.load(first_row)
        tl.store(out + (row * QUERY_HEADS + head) * HEAD_DIM + dims, acc / total, mask=dims < HEAD_DIM)


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
        else:
            k = tl.load(at)
        scores = _score(q, k, scale, softcap, SOFTCAP)
        if MASKED:
            visible = (token[None, :] <= positions[:, None]) & (token[None, :] > positions[:, None] - window)
            scores = tl.where(visible & seen[None, :], scores, _LOWEST)
        if MASKED or DIMS != HEAD_DIM:
            v = tl.load(at + KV_HEADS * PAGE_TOKENS * HEAD_DIM, mask=there, other=0.0)
        else:
            v = tl.load(at + KV_HEADS * PAGE_TOKENS * HEAD_DIM)
        acc, top, total = _weigh(scores, v, acc, top, total)
    return acc, top, total


@triton.jit(do_not_specialize=("pages_row",))
def _chunk(
    query, kv, pages, first_pages, tiles, sinks, out,
    query_row, query_head, pages_row, page_stride, layer_offset, window, scale, softcap,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    DIMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """tiles: [tiles, 4] int64: first row in the batch, how many, the position of the first, the run's row in `pages`.

    A tile of no rows reads and writes nothing. query: as in `_split`; out: [rows, QUERY_HEADS, HEAD_DIM]. window: any number
    above every position where there is none.
    Grid: tiles, QUERY_HEADS. So what runs at one time is of few heads, whose K and V the level-2 cache holds.

        keys of a tile:  first │ window's edge: masked │ seen by all rows │ the diagonal: masked │ last row
    """
    head = tl.program_id(1)
    tile = tiles + tl.program_id(0) * 4
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


@triton.jit(do_not_specialize=("sums_row", "sums_head", "row_stride", "head_stride"))
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


@triton.jit
def _write(
    key, value, kv, write_pages, write_offsets, key_row, key_head, value_row, value_head, page_stride, layer_offset,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Stores a row's K and V in its place; a row whose page is negative has none. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(write_pages + row)
    if page >= 0:
        heads = tl.arange(0, HEADS)[:, None]
        dims = tl.arange(0, DIMS)[None, :]
        real = (heads < KV_HEADS) & (dims < HEAD_DIM)
        unit: tl.constexpr = PAGE_TOKENS * HEAD_DIM
        target = kv + page * page_stride + layer_offset + tl.load(write_offsets + row) * HEAD_DIM + heads * unit + dims
        tl.store(target, tl.load(key + row * key_row + heads * key_head + dims, mask=real, other=0.0), mask=real)
        target += KV_HEADS * unit
        tl.store(target, tl.load(value + row * value_row + heads * value_head + dims, mask=real, other=0.0), mask=real)
