"""Attention of chunks over pages for Hopper, in Gluon: keys come by bulk copies, and products run while softmax is computed.

One program takes a tile of rows of one run and one query head, as `_chunk` of the module above does. Four warps attend for each
half of the tile, at their own pace, so that one half computes softmax while the other has the tensor cores; and one warp fetches
blocks of keys and values for both. In round j of a half's loop

    tensor cores   │ scores of block j │ weights of block j - 1 by values of block j - 1 │
    other units                        │ weights of block j from its scores              │ sums, by what the top grew

Places in shared memory are handed to and fro by barriers in pairs: `bars` say that a block has come, `free` that both halves
have read it.

A block of keys has BLOCK_N tokens; pages are shorter or as long, so it comes in *boxes*: BOX tokens of one page and 64 dims,
which is what one row of the swizzled layout holds. Boxes of 64 dims lie one behind the other, in the order that makes them
together the layout of a whole block:

    block [BLOCK_N, HEAD_DIM] in shared memory:  dims 0 to 63 of page a │ of page b │ dims 64 to 127 of page a │ of page b

Blocks that reach behind the run's last page take that page again; places that no row sees must be finite.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_STAGES = gl.constexpr(3)  # blocks of keys, and of values, in shared memory
_meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # all warps of a program; Triton 3.6 has the latter
_LOWEST = gl.constexpr(-1e30)  # a score of no weight. Not -inf, of which the difference to itself is NaN


@gluon.jit
def _rows_of(
    block, row_pages, last_page, page_rows, PAGE_TOKENS: gl.constexpr, BOX: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Of each box of a block, where its first token is: rows of the pool behind those of token 0 of page 0."""
    found = ()
    for part in gl.static_range(BLOCK_N // BOX):
        token = block * BLOCK_N + part * BOX
        page = gl.load(row_pages + gl.minimum(token // PAGE_TOKENS, last_page)).to(gl.int32)
        found = found + (page * page_rows + token % PAGE_TOKENS,)  # noqa: RUF005  # Triton knows no stars
    return found


@gluon.jit
def _order(
    boxes, buffers, bars, stage, rows, first_row,
    BOX: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Bulk copies of one block to its stage. rows: from `_rows_of`; first_row: of the head."""
    PARTS: gl.constexpr = BLOCK_N // BOX
    PLANES: gl.constexpr = HEAD_DIM // 64
    bar = bars.index(stage)
    mbarrier.expect(bar, BLOCK_N * HEAD_DIM * 2)
    places = buffers._reinterpret(boxes.dtype, [_STAGES * PLANES * PARTS, BOX, 64], boxes.layout)
    for part in gl.static_range(PARTS):
        for plane in gl.static_range(PLANES):
            place = places.index((stage * PLANES + plane) * PARTS + part)
            tma.async_copy_global_to_shared(boxes, [rows[part] + first_row, plane * 64], bar, place)


@gluon.jit
def _fetch(
    boxes, keys, values, key_bars, value_bars, key_free, value_free, row_pages, blocks, last_page, page_rows, key_row, value_row,
    PAGE_TOKENS: gl.constexpr, BOX: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """One warp orders all blocks, in the order in which they are needed, as places become free."""
    for block in range(blocks + 1):
        if block < blocks:
            rows = _rows_of(block, row_pages, last_page, page_rows, PAGE_TOKENS, BOX, BLOCK_N)
            stage = block % _STAGES
            mbarrier.wait(key_free.index(stage), block // _STAGES % 2 ^ 1)
            _order(boxes, keys, key_bars, stage, rows, key_row, BOX, BLOCK_N, HEAD_DIM)
        if block > 0:
            rows = _rows_of(block - 1, row_pages, last_page, page_rows, PAGE_TOKENS, BOX, BLOCK_N)
            stage = (block - 1) % _STAGES
            mbarrier.wait(value_free.index(stage), (block - 1) // _STAGES % 2 ^ 1)
            _order(boxes, values, value_bars, stage, rows, value_row, BOX, BLOCK_N, HEAD_DIM)


@gluon.jit
def _attend(
    q, keys, values, key_bars, value_bars, key_free, value_free, out, first_row, num_rows, position, blocks, scale,
    OUT_ROW: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Four warps attend for ROWS rows. out: of the head."""
    dtype: gl.constexpr = q.dtype
    scores_at: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    sums_at: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weights_at: gl.constexpr = gl.DotOperandLayout(0, sums_at, 2)
    row_sums_at: gl.constexpr = gl.SliceLayout(1, sums_at)
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    unmasked = (position + 1) // BLOCK_N  # blocks that every row sees whole
    places = position + gl.arange(0, ROWS, gl.SliceLayout(1, scores_at))
    tokens = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_at))
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, scores_at)
    sums = gl.zeros([ROWS, HEAD_DIM], gl.float32, sums_at)

    mbarrier.wait(key_bars.index(0), 0)
    scores = warpgroup_mma(q, keys.index(0).permute((1, 0)), nothing, use_acc=False)
    if unmasked == 0:
        scores = gl.where(tokens[None, :] <= places[:, None], scores, _LOWEST)
    top = gl.max(scores, 1) * scale
    weights = gl.exp2(scores * scale - top[:, None])
    total = gl.sum(weights, 1)
    p = gl.convert_layout(weights.to(dtype), weights_at)

    for block in range(1, blocks):
        stage = block % _STAGES
        before = (block - 1) % _STAGES
        mbarrier.wait(key_bars.index(stage), block // _STAGES % 2)
        coming = warpgroup_mma(q, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(value_bars.index(before), (block - 1) // _STAGES % 2)
        summing = warpgroup_mma(p, values.index(before), sums, is_async=True)
        _meet()  # all four have read the keys of block - 1 and the values of block - 2
        mbarrier.arrive(key_free.index(before), count=1)
        if block > 1:
            mbarrier.arrive(value_free.index((block - 2) % _STAGES), count=1)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=[coming])
        if block >= unmasked:
            scores = gl.where((block * BLOCK_N + tokens)[None, :] <= places[:, None], scores, _LOWEST)
        new_top = gl.maximum(top, gl.max(scores, 1) * scale)
        weights = gl.exp2(scores * scale - new_top[:, None])
        shrink = gl.exp2(top - new_top)
        total = total * shrink + gl.sum(weights, 1)
        top = new_top
        sums = warpgroup_mma_wait(num_outstanding=0, deps=[summing])
        sums = sums * gl.convert_layout(shrink, row_sums_at)[:, None]
        p = gl.convert_layout(weights.to(dtype), weights_at)

    last = (blocks - 1) % _STAGES
    mbarrier.wait(value_bars.index(last), (blocks - 1) // _STAGES % 2)
    sums = warpgroup_mma(p, values.index(last), sums)
    sums = sums / gl.convert_layout(total, row_sums_at)[:, None]
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, plain))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, plain))
    out_at = out + (first_row + rows)[:, None] * OUT_ROW + dims[None, :]
    q.store(sums.to(dtype))  # on its way to rows that are written whole
    _meet()
    gl.store(out_at, q.load(plain), mask=(rows < num_rows)[:, None])


@gluon.jit
def _load_rows(query, query_row, first_row, num_rows, dtype: gl.constexpr, ROWS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """[ROWS, HEAD_DIM] in shared memory; zeros behind the last row."""
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    whole: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, plain))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, plain))
    at = query + (first_row + rows)[:, None] * query_row + dims[None, :]
    loaded = gl.load(at, mask=(rows < num_rows)[:, None], other=0.0)
    return gl.allocate_shared_memory(dtype, [ROWS, HEAD_DIM], whole, loaded)


@gluon.jit(do_not_specialize=("pages_row",), do_not_specialize_on_alignment=("pages", "tiles"))
def _chunk(
    query, boxes, pages, tiles, out,
    query_row, query_head, pages_row, page_rows, layer_rows, scale,
    QUERY_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """boxes: descriptor of the pool as [rows, HEAD_DIM], in boxes of [BOX, 64]. page_rows, layer_rows: rows from one page to the
    next, and to K of the layer's first head. tiles, query, out: see `kernels._chunk`. scale: of q k, in base 2.
    Grid: tiles, QUERY_HEADS."""
    dtype: gl.constexpr = boxes.dtype
    whole: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    HALF: gl.constexpr = BLOCK_M // 2
    head = gl.program_id(1)
    tile = tiles + gl.program_id(0) * 4
    first_row = gl.load(tile)
    num_rows = gl.load(tile + 1).to(gl.int32)
    if num_rows == 0:
        return
    position = gl.load(tile + 2).to(gl.int32)
    row_pages = pages + gl.load(tile + 3) * pages_row
    stop = position + num_rows
    blocks = (stop + BLOCK_N - 1) // BLOCK_N
    last_page = (stop + PAGE_TOKENS - 1) // PAGE_TOKENS - 1
    key_row = layer_rows + head // (QUERY_HEADS // KV_HEADS) * PAGE_TOKENS
    value_row = key_row + KV_HEADS * PAGE_TOKENS

    keys = gl.allocate_shared_memory(dtype, [_STAGES, BLOCK_N, HEAD_DIM], whole)
    values = gl.allocate_shared_memory(dtype, [_STAGES, BLOCK_N, HEAD_DIM], whole)
    key_bars = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    value_bars = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(_STAGES):
        mbarrier.init(key_bars.index(each), count=1)
        mbarrier.init(value_bars.index(each), count=1)
        mbarrier.init(key_free.index(each), count=2)
        mbarrier.init(value_free.index(each), count=2)
    head_query = query + head * query_head
    q = _load_rows(head_query, query_row, first_row, num_rows, dtype, HALF, HEAD_DIM)
    other_q = _load_rows(head_query, query_row, first_row + HALF, num_rows - HALF, dtype, HALF, HEAD_DIM)
    fence_async_shared()
    _meet()
    head_out = out + head * HEAD_DIM
    OUT_ROW: gl.constexpr = QUERY_HEADS * HEAD_DIM
    gl.warp_specialize(
        [
            (_attend, (
                q, keys, values, key_bars, value_bars, key_free, value_free, head_out, first_row, num_rows, position, blocks,
                scale, OUT_ROW, HEAD_DIM, HALF, BLOCK_N,
            )),
            (_attend, (
                other_q, keys, values, key_bars, value_bars, key_free, value_free, head_out, first_row + HALF, num_rows - HALF,
                position + HALF, blocks, scale, OUT_ROW, HEAD_DIM, HALF, BLOCK_N,
            )),
            (_fetch, (
                boxes, keys, values, key_bars, value_bars, key_free, value_free, row_pages, blocks, last_page, page_rows,
                key_row, value_row, PAGE_TOKENS, BOX, BLOCK_N, HEAD_DIM,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
