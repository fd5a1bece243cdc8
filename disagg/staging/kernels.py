"""Gather and scatter on the GPU: one launch per piece, for all its layers, planes, heads and tokens, checksum included.

The same bytes, trailer and checksum as `staging/copy`, from and to the same tensors (staging/rows). Two kernels, both of
which copy either way; which one is used depends on how the rows are aligned:

    _move_stretches  rows of whole 8-byte words. A page's rows of one (layer, plane, head), a *strip*, are one stretch of bytes
                     in the page, and a strip's stretches are adjacent in staging:

                       page 7: [..│stretch of strip s│..]   page 2: [..│stretch of strip s│..]   page 5: ...
                                         └───────────┐                        │
                       staging: [ strip s - 1 │ stretch │ stretch │ stretch │ strip s + 1 ...

                     A program takes tiles of [pages, words of a stretch], 16 bytes per load where everything is so aligned.
    _move_words      anything else: words of staging, put together from integers as wide as the rows allow. Slower.

Every word is summed on its way (checksum: NH, which has no order). A program adds up its tiles in registers and then adds
to two numbers that the launch shares; whoever completes them writes the sum as the trailer (gather), or compares it with
the trailer and leaves the verdict (scatter), and sets them back to zero for the next launch. The alternative, an array of
partial sums and a second stage that adds them up, would also have to find out which program is the last, and then read
them. A scatter has written its rows when it knows its verdict: see staging/mover.

Where the device can (`_overlaps`), a launch begins while the one before it on the stream ends: its programs take the places
that are left empty as soon as all programs of that one have begun (programmatic dependent launch).

    launch n      [program][program]...[program][sums meet]
    launch n + 1                   [program][program]...   until n is complete   [sums meet]

Until n is complete, n + 1 reads its page table and the trailer that it is to find, and moves rows; each of its programs waits
for that before it touches the sums, and so before the launch writes a trailer or a verdict. Hence launches take turns at the
sums, none is complete before those launched before it are, and an event behind one stands behind all of them. What n + 1
moves must not depend on what launches before it move: that is the mover's rule (staging/mover). Anything else that was asked
of the stream just before a launch must be over when it begins, so such a launch is *ordered*: its programs first wait for all
that is before it, and let the next launch begin only then.

Rows and trailers are loaded past the first-level cache (".cg"), which would keep nothing that is read again, and so never
finds in it what lay in the same place of staging before. Page ids are read again by every strip, and do go through it; no
two tables share a line of it (staging/triton_mover).

What was tried and what it brought is in docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec
import torch
import triton
import triton.language as tl
from msgspec import Struct
from triton.compiler import CompiledKernel

from disagg.staging.nh import GOLDEN, MIX_1, MIX_2, key_seed
from disagg.staging.pieces import WORD_BYTES
from disagg.staging.rows import PagedRows
from disagg.types.arithmetic import ceil_div

SUMS = 2  # int64 numbers that launches on one stream share (`_settle`): zero before the first, and after every one
VERDICT_OK = 1
VERDICT_WRONG = 2

_LANE_BYTES = (16, 8)  # of one load of `_move_stretches`, widest first
_UNITS = {4: tl.int32, 2: tl.int16, 1: tl.uint8}  # of one load of `_move_words`, by their bytes, widest first
_TILE_WORDS = 2048
_MOST_STRETCH_BLOCK = 512  # words: of several pages a tile is moved faster than of one
_SUM_BLOCK = 256  # terms that a program adds up side by side: two of each thread
_PROGRAM_TILES = 2  # one after another: more make the last wave of programs longer, fewer cost more atomic additions
_WORD_BLOCK = 256  # words of staging that a program of `_move_words` takes at a time
_WORD_PROGRAMS = 1024
_NUM_WARPS = 4
_LEAST_STRETCH_BLOCK = 64  # words: shorter loads are not worth having no idle lanes
_MOST_PROGRAMS = (1 << 20) - 1  # that `_settle` can count
_MOST_GRID_ROWS = (1 << 16) - 1  # CUDA's limit of a grid's second dimension
_MOST_STRIP_BYTES = 1 << 32  # places in a strip are 32-bit numbers of words
_MOST_PAGE_BYTES = (1 << 31) - 1  # like all numbers that kernels are given
_TENSORS = ("pool", "staging", "page_ids", "sums", "verdict")  # first arguments of either kernel
_TRITON_ALIGN = 16  # bytes: Triton compiles for pointers that are multiples of this, or for any

_GOLDEN = tl.constexpr(GOLDEN)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_OK = tl.constexpr(VERDICT_OK)
_WRONG = tl.constexpr(VERDICT_WRONG)
_LOW_BITS = tl.constexpr(24)  # how the two sums are laid out: see `_settle`
_LOW = tl.constexpr((1 << 24) - 1)
_LOW_BYTES = tl.constexpr(3)
_CARRY = tl.constexpr((1 << 44) - (1 << 24))
_LOW_COUNT_BIT = tl.constexpr(44)
_LOW_ONE = tl.constexpr(1 << 44)
_HIGH_COUNT = tl.constexpr((1 << 20) - 1)
_SETTLED = tl.constexpr(1 << 20)
_WRONG_LOW = tl.constexpr(1 << 21)


@triton.jit
def _nh(words, keys, mask):
    """Terms of the sum, zero where not `mask`. words: uint64; keys: uint64, the state of splitmix64 at each word."""
    keys = (keys ^ (keys >> 30)) * _MIX_1
    keys = (keys ^ (keys >> 27)) * _MIX_2
    keys = keys ^ (keys >> 31)
    low = words.to(tl.uint32) + keys.to(tl.uint32)
    high = (words >> 32).to(tl.uint32) + (keys >> 32).to(tl.uint32)
    return tl.where(mask, low, 0).to(tl.uint64) * high.to(tl.uint64)


@triton.jit
def _key_start(key_low, key_high):
    """uint64 of two halves, which are passed as int32 so that no value changes the type of an argument."""
    low = key_low.to(tl.uint32, bitcast=True).to(tl.uint64)
    return (key_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low


@triton.jit
def _settle(total, sums, trailer, expected, verdict, programs, GATHER: tl.constexpr):
    """Add a program's sum (uint64) to the launch's, and see to its end if that was the last.

    trailer: int64, behind the last word. expected: what is there when a scatter begins.

        bit       63        44                24                       0
        sums[0]   │ programs │ carry            sum of their lowest 24 bits │
        sums[1]   │ sum of their other 40 bits │   │wrong│settled│ programs │
                                               23  21    20      19       0

    Whoever completes sums[0] knows the lowest bits of the trailer, and settles them: writes or compares them, and adds the
    carry to sums[1]. Whoever finds sums[1] complete and settled does the rest. Usually that is the same program, so there is
    one round trip to memory at the end, and never a fence: all that a program needs to know of others comes with the count
    that tells it so.
    """
    which = tl.arange(0, 2)
    low, high = total & _LOW, total - (total & _LOW)
    part = tl.where(which == 0, low + _LOW_ONE, high + 1)
    # Both in one instruction, so that a program waits for memory once.
    now = _add(sums + which, part) + part
    lows, highs = tl.sum(tl.where(which == 0, now, 0), 0), tl.sum(tl.where(which == 1, now, 0), 0)
    wanted = expected.to(tl.uint64, bitcast=True)
    if (lows >> _LOW_COUNT_BIT) == programs:
        tl.store(sums, 0)
        more = (lows & _CARRY) + _SETTLED
        if GATHER:
            _store_bytes(trailer, lows, 0, _LOW_BYTES)
        elif (lows & _LOW) != (wanted & _LOW):
            more += _WRONG_LOW
        if (highs & _HIGH_COUNT) == programs:
            highs += more  # nobody else adds to it any more
        else:
            highs = _add(sums + 1, more) + more
    if (highs & (_HIGH_COUNT | _SETTLED)) == (programs | _SETTLED):
        tl.store(sums + 1, 0)
        if GATHER:
            _store_bytes(trailer, highs, _LOW_BYTES, 8)
        else:
            right = ((highs & _WRONG_LOW) == 0) & ((highs >> _LOW_BITS) == (wanted >> _LOW_BITS))
            tl.store(verdict, tl.where(right, _OK, _WRONG))


@triton.jit
def _add(sums, parts):
    """What was there, as uint64. sums: int64; parts: uint64."""
    return tl.atomic_add(sums, parts.to(tl.int64, bitcast=True), sem="relaxed").to(tl.uint64, bitcast=True)


@triton.jit
def _store_bytes(where, value, START: tl.constexpr, STOP: tl.constexpr):
    """Bytes [START, STOP) of a uint64. where: int64."""
    place = tl.arange(0, 8)
    byte = (value >> (place * 8).to(tl.uint64)).to(tl.uint8)
    tl.store(where.to(tl.pointer_type(tl.uint8), bitcast=True) + place, byte, mask=(place >= START) & (place < STOP))


@triton.jit
def _begin(ordered, OVERLAP: tl.constexpr):
    """To be called before anything is read or written."""
    if OVERLAP:
        if ordered != 0:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _end(
    total,
    sums,
    trailer,
    expected,
    verdict,
    programs,
    GATHER: tl.constexpr,
    CHECKSUM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """To be called by every program when it has moved its rows. total: uint64, sums of its terms, side by side."""
    whole = tl.sum(total, 0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if CHECKSUM:
        _settle(whole, sums, trailer, expected, verdict, programs.to(tl.uint64), GATHER)


# No value of an argument may make Triton compile again while pieces are waiting: neither a number, nor where a page table
# or a verdict happens to begin.
_ANYWHERE = ("page_ids", "sums", "verdict")
_RUN_NUMBERS = (
    "ordered",
    "heads",
    "kv_heads",
    "first_strip",
    "strip_lanes",
    "stretch_lanes",
    "page_lanes",
    "skipped_lanes",
    "first_entry",
    "pages",
    "strip_tiles",
    "program_tiles",
    "key_low",
    "key_high",
)


@triton.jit(do_not_specialize=_RUN_NUMBERS, do_not_specialize_on_alignment=_ANYWHERE)
def _move_stretches(
    pool,
    staging,
    page_ids,
    sums,
    verdict,
    ordered,  # whether to wait first for all that is before it on the stream
    heads,  # of the piece
    kv_heads,  # of a page
    first_strip,  # of the piece, counted in a page
    strip_lanes,
    stretch_lanes,
    page_lanes,  # from one page to the next
    skipped_lanes,  # of the first page's stretch: before the piece's first token
    first_entry,  # of page_ids
    pages,
    strip_tiles,
    program_tiles,
    key_low,
    key_high,
    GATHER: tl.constexpr,
    CHECKSUM: tl.constexpr,
    OVERLAP: tl.constexpr,
    LANE_WORDS: tl.constexpr,
    PAGE_BLOCK: tl.constexpr,
    STRETCH_BLOCK: tl.constexpr,
    STRETCH_TILES: tl.constexpr,
    SUM_BLOCK: tl.constexpr,
):
    """Grid: [parts of a strip, strips] of a gather, [strips, parts] of a scatter. pool, staging: int64.

    Lanes are LANE_WORDS words: products with it tell the compiler how everything is aligned. Programs are in the order of
    what they write: a gather's take strip after strip, a scatter's all strips of some pages before those of the next.
    """
    _begin(ordered, OVERLAP)
    programs = tl.num_programs(0) * tl.num_programs(1)
    strips = tl.num_programs(1 if GATHER else 0)
    strip = tl.program_id(1 if GATHER else 0)
    part = tl.program_id(0 if GATHER else 1)
    plane, head = strip // heads, strip % heads  # planes of all layers in turn
    strip = strip.to(tl.int64)
    strip_words = strip_lanes * LANE_WORDS
    stretch_words = stretch_lanes * LANE_WORDS
    paged_strip = (first_strip + plane * kv_heads + head).to(tl.int64)
    pool += paged_strip * stretch_words
    staging_strip = staging + strip * strip_words
    page_ids += first_entry
    in_block = tl.arange(0, STRETCH_BLOCK)
    # The key of word i begins as start + (i + 1) * GOLDEN: one multiplication per strip, row of a tile and column.
    first_key = _key_start(key_low, key_high) + ((strip * strip_words).to(tl.uint64) + 1) * _GOLDEN
    golden = in_block.to(tl.uint64) * _GOLDEN
    trailer = staging + strips.to(tl.int64) * strip_words
    expected = tl.zeros([], dtype=tl.int64)
    if CHECKSUM and not GATHER:
        expected = tl.load(trailer, cache_modifier=".cg")
    total = tl.zeros([SUM_BLOCK], dtype=tl.uint64)
    tile = part * program_tiles
    end = tl.minimum(tile + program_tiles, strip_tiles)
    while tile < end:
        page = tile // STRETCH_TILES * PAGE_BLOCK + tl.arange(0, PAGE_BLOCK)
        column = tile % STRETCH_TILES * STRETCH_BLOCK + in_block
        ids = tl.load(page_ids + page, mask=page < pages, other=0)
        in_pool = (pool + ids * (page_lanes.to(tl.int64) * LANE_WORDS))[:, None] + column[None, :]
        # Of the piece's first page, what is before its first token has a negative place; of its last, what is after
        # its last token has one past the strip.
        stretch = page * stretch_words - skipped_lanes * LANE_WORDS
        place = stretch[:, None] + column[None, :]
        in_staging = staging_strip + place
        mask = (column < stretch_words)[None, :] & (place >= 0) & (place < strip_words)
        if GATHER:
            words = tl.load(in_pool, mask=mask, other=0, cache_modifier=".cg")
            tl.store(in_staging, words, mask=mask)
        else:
            words = tl.load(in_staging, mask=mask, other=0, cache_modifier=".cg")
            tl.store(in_pool, words, mask=mask)
        if CHECKSUM:
            row_key = first_key + (stretch + tile % STRETCH_TILES * STRETCH_BLOCK).to(tl.int64).to(tl.uint64) * _GOLDEN
            terms = _nh(words.to(tl.uint64, bitcast=True), row_key[:, None] + golden[None, :], mask)
            # Adding up a tile at once leaves registers for other programs on the multiprocessor.
            total += tl.sum(tl.reshape(terms, (PAGE_BLOCK * STRETCH_BLOCK // SUM_BLOCK, SUM_BLOCK)), 0)
        tile += 1
    _end(total, sums, trailer, expected, verdict, programs, GATHER, CHECKSUM, OVERLAP)


_WORD_NUMBERS = (
    "ordered",
    "strips",
    "heads",
    "kv_heads",
    "first_strip",
    "tokens",
    "page_tokens",
    "row_units",
    "page_units",
    "first_token",
    "first_entry",
    "key_low",
    "key_high",
)


@triton.jit(do_not_specialize=_WORD_NUMBERS, do_not_specialize_on_alignment=_ANYWHERE)
def _move_words(
    pool,
    staging,
    page_ids,
    sums,
    verdict,
    ordered,  # whether to wait first for all that is before it on the stream
    strips,  # of the piece
    heads,  # of the piece
    kv_heads,  # of a page
    first_strip,  # of the piece, counted in a page
    tokens,  # of the piece
    page_tokens,
    row_units,
    page_units,  # from one page to the next
    first_token,  # of the piece, counted in its first page
    first_entry,  # of page_ids
    key_low,
    key_high,
    GATHER: tl.constexpr,
    CHECKSUM: tl.constexpr,
    OVERLAP: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """pool, staging: integers of UNIT_BYTES."""
    _begin(ordered, OVERLAP)
    PER_WORD: tl.constexpr = 8 // UNIT_BYTES
    strip_units = tokens.to(tl.int64) * row_units
    units = strips * strip_units
    words = tl.cdiv(units, PER_WORD)
    start = _key_start(key_low, key_high) + _GOLDEN
    in_word = tl.arange(0, PER_WORD)
    trailer = (staging + words * PER_WORD).to(tl.pointer_type(tl.int64), bitcast=True)
    expected = tl.zeros([], dtype=tl.int64)
    if CHECKSUM and not GATHER:
        expected = tl.load(trailer, cache_modifier=".cg")
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    block = tl.program_id(0)
    while block * BLOCK < words:
        word = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        unit = word[:, None] * PER_WORD + in_word[None, :]
        valid = unit < units  # the rest of the last word is padding: zero
        strip = unit // strip_units
        row = unit % strip_units // row_units + first_token
        paged_strip = first_strip + strip // heads * kv_heads + strip % heads
        ids = tl.load(page_ids + first_entry + row // page_tokens, mask=valid, other=0)
        in_page = (paged_strip * page_tokens + row % page_tokens) * row_units + unit % row_units
        in_pool = pool + ids * page_units + in_page
        staged = (word < words)[:, None]
        if GATHER:
            read = tl.load(in_pool, mask=valid, other=0, cache_modifier=".cg")
            tl.store(staging + unit, read, mask=staged)
        else:
            read = tl.load(staging + unit, mask=staged, other=0, cache_modifier=".cg")
            tl.store(in_pool, read, mask=valid)
        if CHECKSUM:
            bits = read.to(tl.uint64) & ((1 << (8 * UNIT_BYTES)) - 1)  # without the sign
            whole = tl.sum(bits << (in_word * (8 * UNIT_BYTES)).to(tl.uint64)[None, :], 1)
            keys = start + word.to(tl.uint64) * _GOLDEN
            total += _nh(whole, keys, word < words)
        block += tl.num_programs(0)
    _end(total, sums, trailer, expected, verdict, tl.num_programs(0), GATHER, CHECKSUM, OVERLAP)


class Launch(Struct, frozen=True, eq=False):
    """A kernel with all that it is launched with, by its names. Every tensor is on one device.

    unit: the integers that the kernel takes pool and staging for; constants: what it is compiled for.
    """

    kernel: Any
    grid: tuple[int, int, int]
    unit: tl.dtype
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, int]
    constants: dict[str, int]

    def __call__(self) -> None:
        """On the current stream, ordered; returns before the device is done."""
        self.kernel[self.grid](**self._arguments(), **self._options())

    def compile(self) -> Any:
        """The kernel for arguments like these, compiled if need be; nothing in Triton's interpreter. Launches nothing."""
        return self.kernel.warmup(**self._arguments(), grid=self.grid, **self._options())

    def _options(self) -> dict[str, int | bool]:
        return {"num_warps": _NUM_WARPS} | ({"launch_pdl": True} if self.constants["OVERLAP"] else {})

    def _arguments(self) -> dict[str, Any]:
        as_units = {name: triton.reinterpret(self.tensors[name], self.unit) for name in ("pool", "staging")}
        return self.tensors | as_units | self.numbers | self.constants


class Launcher:
    """Launches on one stream of one device, with less work for the host than a call of a kernel is.

    Which compiled kernel belongs to which arguments is found out once for all that are alike; what remains of a launch is
    one call of Triton's launcher, which takes addresses as they are, while it looks up every tensor's.
    """

    def __init__(self, stream: int) -> None:
        """stream: as the driver knows it."""
        self._stream = stream
        self._compiled: dict[tuple[object, ...], Any] = {}

    def compiled(self, launch: Launch) -> Any:
        """What `Launch.compile` returns."""
        # Nothing else of the arguments changes what Triton compiles.
        aligned = [launch.tensors[name].data_ptr() % _TRITON_ALIGN == 0 for name in ("pool", "staging")]
        alike = (launch.kernel, launch.unit, *launch.constants.values(), *aligned)
        if alike not in self._compiled:
            self._compiled[alike] = launch.compile()
        return self._compiled[alike]

    def bind(self, launch: Launch) -> Callable[[torch.Tensor, torch.Tensor, bool], None]:
        """Prepares the launch. The result takes what each launch has of its own: staging, verdict, and whether it is ordered.

        These tensors are aligned as the launch's own, and staging is as long.
        """
        compiled = self.compiled(launch)
        if not isinstance(compiled, CompiledKernel):  # Triton's interpreter

            def interpret(staging: torch.Tensor, verdict: torch.Tensor, ordered: bool) -> None:
                msgspec.structs.replace(launch, tensors=launch.tensors | {"staging": staging, "verdict": verdict})()

            return interpret
        names = launch.kernel.arg_names
        assert names[: len(_TENSORS) + 1] == [*_TENSORS, "ordered"]
        pool, page_ids, sums = (launch.tensors[name] for name in ("pool", "page_ids", "sums"))
        values = launch.numbers | launch.constants
        rest = [values[name] for name in names[len(_TENSORS) + 1 :]]
        # The last three are Triton's hooks around a launch, and what they are told of it.
        run = partial(
            compiled.run, *launch.grid, self._stream, compiled.function, compiled.packed_metadata, *[None] * 3
        )

        def begin(staging: torch.Tensor, verdict: torch.Tensor, ordered: bool) -> None:
            tensors = (pool, staging, page_ids, sums, verdict)
            run(*[tensor.data_ptr() for tensor in tensors], int(ordered), *rest)

        return begin


def launch_of(rows: PagedRows, staging: torch.Tensor, sums: torch.Tensor, verdict: torch.Tensor | None) -> Launch:
    """What a gather (verdict is None) or a scatter is launched with. Every tensor is on one CUDA device.

    staging: [>= rows.staged_bytes] uint8, contiguous, aligned to words; sums: [SUMS] int64, zero, which launches on one
    stream and on no other use; verdict: [1] int64 that the device can write, so also pinned memory, which becomes
    VERDICT_OK or VERDICT_WRONG. A scatter writes the rows whether or not their checksum is right.
    """
    rows.check_staging(staging)
    shape, piece, heads, payload = rows.shape, rows.piece, rows.head_slice.heads, rows.payload_bytes
    first_head = rows.head_start(gather=verdict is None)
    planes, page_bytes = piece.layers * shape.planes, rows.pool.stride(0)
    strips = planes * heads
    assert sums.dtype is torch.int64
    assert strips <= _MOST_GRID_ROWS, f"{piece} has too many strips of {shape}"
    assert piece.tokens * shape.row_bytes <= _MOST_STRIP_BYTES, f"{piece} is too long for {shape}"
    assert page_bytes <= _MOST_PAGE_BYTES, f"pages are {page_bytes} bytes apart"

    key = key_seed(rows.seed, payload)
    tensors = {
        "pool": rows.pool,
        "staging": staging,
        "page_ids": rows.page_ids,
        "sums": sums,
        "verdict": sums if verdict is None else verdict,
    }
    numbers = {
        "ordered": 1,
        "kv_heads": shape.kv_heads,
        "first_strip": piece.layer_start * shape.planes * shape.kv_heads + first_head,
        "first_entry": rows.first - rows.first_page,
        "key_low": _as_int32(key),
        "key_high": _as_int32(key >> 32),
    }
    constants = {"GATHER": verdict is None, "CHECKSUM": True, "OVERLAP": _overlaps(rows.pool.device)}
    aligned = shape.row_bytes | page_bytes | rows.pool.data_ptr()  # to every power of two that divides all of them
    lane_bytes = next((n for n in _LANE_BYTES if (aligned | staging.data_ptr()) % n == 0), 0)
    if lane_bytes:
        row_lanes = shape.row_bytes // lane_bytes
        stretch_words = shape.page_tokens * shape.row_bytes // WORD_BYTES
        stretch_block = stretch_block_words(stretch_words)
        page_block = _TILE_WORDS // stretch_block
        stretch_tiles = ceil_div(stretch_words, stretch_block)
        pages = rows.stop - rows.first
        strip_tiles = ceil_div(pages, page_block) * stretch_tiles
        program_tiles = max(_PROGRAM_TILES, ceil_div(strip_tiles, min(_MOST_PROGRAMS // strips, _MOST_GRID_ROWS)))
        parts = ceil_div(strip_tiles, program_tiles)
        numbers |= {
            "heads": heads,
            "strip_lanes": piece.tokens * row_lanes,
            "stretch_lanes": shape.page_tokens * row_lanes,
            "page_lanes": page_bytes // lane_bytes,
            "skipped_lanes": piece.token_start % shape.page_tokens * row_lanes,
            "pages": pages,
            "strip_tiles": strip_tiles,
            "program_tiles": program_tiles,
        }
        constants |= {
            "LANE_WORDS": lane_bytes // WORD_BYTES,
            "PAGE_BLOCK": page_block,
            "STRETCH_BLOCK": stretch_block,
            "STRETCH_TILES": stretch_tiles,
            "SUM_BLOCK": min(_SUM_BLOCK, page_block * stretch_block),
        }
        grid = (parts, strips, 1) if verdict is None else (strips, parts, 1)
        return Launch(_move_stretches, grid, tl.int64, tensors, numbers, constants)
    unit_bytes = next(n for n in _UNITS if aligned % n == 0)
    numbers |= {
        "heads": heads,
        "strips": strips,
        "tokens": piece.tokens,
        "page_tokens": shape.page_tokens,
        "row_units": shape.row_bytes // unit_bytes,
        "page_units": page_bytes // unit_bytes,
        "first_token": piece.token_start % shape.page_tokens,
    }
    constants |= {"UNIT_BYTES": unit_bytes, "BLOCK": _WORD_BLOCK}
    programs = min(ceil_div(payload, WORD_BYTES * _WORD_BLOCK), _WORD_PROGRAMS)
    return Launch(_move_words, (programs, 1, 1), _UNITS[unit_bytes], tensors, numbers, constants)


@cache
def _overlaps(device: torch.device) -> bool:
    """Whether launches may overlap there: on NVIDIA GPUs from Hopper on."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def stretch_block_words(stretch_words: int) -> int:
    """How many words of a stretch a tile has: a power of two. All of it, or a part that divides it where that is long enough."""
    divisor = stretch_words & -stretch_words
    block = divisor if divisor >= _LEAST_STRETCH_BLOCK else triton.next_power_of_2(stretch_words)
    return min(block, _MOST_STRETCH_BLOCK, _TILE_WORDS)


def _as_int32(bits: int) -> int:
    """The lowest 32 bits as a signed number."""
    return ((bits & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
