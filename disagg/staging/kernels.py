"""Gather and scatter on the GPU: one launch per piece, for all its layers, planes, heads and tokens, checksum included.

The same bytes, trailer and checksum as `staging/copy`, from and to the same tensors (staging/rows). Two kernels, both of
which copy either way; which one is used depends on how the rows are aligned:

    _move_runs    rows of whole 8-byte words. A page's rows of one (layer, plane, head), a *strip*, are one run of bytes
                  in the page, and a strip's runs are adjacent in staging:

                       page 7: [..│run of strip s│..]   page 2: [..│run of strip s│..]   page 5: ...
                                       └───────────┐                    │
                       staging: [ strip s - 1 │ run │ run │ run │ strip s + 1 ...

                  A program takes tiles of [pages, words of a run], 16 bytes per load where everything is so aligned.
    _move_words   anything else: words of staging, put together from integers as wide as the rows allow. Slower.

Every word is summed on its way (checksum: NH, which has no order). A program adds up its tiles in registers and then adds
to two numbers that the launch shares; whoever completes them writes the sum as the trailer (gather), or compares it with
the trailer and leaves the verdict (scatter), and sets them back to zero for the next launch. The alternative, an array of
partial sums and a second stage that adds them up, would also have to find out which program is the last, and then read
them. A scatter has written its rows when it knows its verdict: see staging/mover.

What was tried and what it brought is in docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch
import triton
import triton.language as tl
from msgspec import Struct
from triton.compiler import CompiledKernel

from disagg.staging.checksum import GOLDEN, MIX_1, MIX_2, key_seed
from disagg.staging.pieces import WORD_BYTES
from disagg.staging.rows import PagedRows

SUMS = 2  # int64 numbers that launches on one stream share (`_settle`): zero before the first, and after every one
VERDICT_OK = 1
VERDICT_WRONG = 2

_LANE_BYTES = (16, 8)  # of one load of `_move_runs`, widest first
_UNITS = {4: tl.int32, 2: tl.int16, 1: tl.uint8}  # of one load of `_move_words`, by their bytes, widest first
_TILE_WORDS = 2048
_PROGRAM_TILES = 2  # one after another: more make the last wave of programs longer, fewer cost more atomic additions
_WORD_BLOCK = 256  # words of staging that a program of `_move_words` takes at a time
_WORD_PROGRAMS = 1024
_NUM_WARPS = 4
_LEAST_RUN_BLOCK = 64  # words: shorter loads are not worth having no idle lanes
_MOST_PROGRAMS = (1 << 15) - 1  # that `_settle` can count
_MOST_STRIP_BYTES = 1 << 32  # places in a strip are 32-bit numbers of words
_MOST_PAGE_BYTES = (1 << 31) - 1  # like all numbers that kernels are given
_TENSORS = ("pool", "staging", "page_ids", "sums", "verdict")  # first arguments of either kernel
_TRITON_ALIGN = 16  # bytes: Triton compiles for pointers that are multiples of this, or for any

_GOLDEN = tl.constexpr(GOLDEN)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_OK = tl.constexpr(VERDICT_OK)
_WRONG = tl.constexpr(VERDICT_WRONG)
_COUNT_BIT = tl.constexpr(47)
_ONE = tl.constexpr(1 << 47)
_SETTLED = tl.constexpr(1 << 62)
_MISMATCH = tl.constexpr(-(1 << 63))


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

        bit        63        62       47                        0
        sums[0]           │ programs │ sum of their low halves  │
        sums[1]    wrong│settled│ programs │ sum of their high halves, and the carry │

    Whoever completes the low halves knows the lower half of the trailer, and settles it: writes or compares it, and adds
    the carry to sums[1]. Whoever finds sums[1] complete and settled does the rest. Usually that is the same program, so
    there is one round trip to memory at the end, and never a fence: all that a program needs to know of others comes with
    the count that tells it so.
    """
    low = (total & 0xFFFFFFFF).to(tl.int64) + _ONE
    high = (total >> 32).to(tl.int64) + _ONE
    lows = tl.atomic_add(sums, low, sem="relaxed") + low
    highs = tl.atomic_add(sums + 1, high, sem="relaxed") + high
    halves = trailer.to(tl.pointer_type(tl.int32), bitcast=True)
    if (lows >> _COUNT_BIT) == programs:
        tl.store(sums, 0)
        more = ((lows & (_ONE - 1)) >> 32) + _SETTLED
        if GATHER:
            tl.store(halves, lows.to(tl.int32))
        else:
            more += tl.where(lows.to(tl.int32) == expected.to(tl.int32), 0, _MISMATCH)
        if ((highs >> _COUNT_BIT) & 0x7FFF) == programs:
            highs += more  # nobody else adds to it any more
        else:
            highs = tl.atomic_add(sums + 1, more, sem="relaxed") + more
    if ((highs >> _COUNT_BIT) & 0xFFFF) == programs + 0x8000:
        tl.store(sums + 1, 0)
        if GATHER:
            tl.store(halves + 1, highs.to(tl.int32))
        else:
            right = (highs >= 0) & (highs.to(tl.int32) == (expected >> 32).to(tl.int32))
            tl.store(verdict, tl.where(right, _OK, _WRONG))


# No value of an argument may make Triton compile again while pieces are waiting: neither a number, nor where a page table
# or a verdict happens to begin.
_ANYWHERE = ("page_ids", "sums", "verdict")
_RUN_NUMBERS = (
    "kv_heads",
    "first_strip",
    "strip_lanes",
    "run_lanes",
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
def _move_runs(
    pool,
    staging,
    page_ids,
    sums,
    verdict,
    kv_heads,  # of a page
    first_strip,  # of the piece, counted in a page
    strip_lanes,
    run_lanes,
    page_lanes,  # from one page to the next
    skipped_lanes,  # of the first page's run: before the piece's first token
    first_entry,  # of page_ids
    pages,
    strip_tiles,
    program_tiles,
    key_low,
    key_high,
    GATHER: tl.constexpr,
    CHECKSUM: tl.constexpr,
    LANE_WORDS: tl.constexpr,
    PAGE_BLOCK: tl.constexpr,
    RUN_BLOCK: tl.constexpr,
    RUN_TILES: tl.constexpr,
):
    """Grid: [programs of a strip, heads, layers * planes] of the piece. pool, staging: int64.

    Lanes are LANE_WORDS words: products with it tell the compiler how everything is aligned.
    """
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    strip_words = strip_lanes * LANE_WORDS
    run_words = run_lanes * LANE_WORDS
    part = tl.program_id(0)  # of the strip
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    plane = tl.program_id(2)  # planes of all layers in turn
    strips = heads * tl.num_programs(2)
    strip = (plane * heads + head).to(tl.int64)
    paged_strip = (first_strip + plane * kv_heads + head).to(tl.int64)
    pool += paged_strip * run_words
    staging_strip = staging + strip * strip_words
    page_ids += first_entry
    in_block = tl.arange(0, RUN_BLOCK)
    # The key of word i begins as start + (i + 1) * GOLDEN: one multiplication per strip, row of a tile and column.
    first_key = _key_start(key_low, key_high) + ((strip * strip_words).to(tl.uint64) + 1) * _GOLDEN
    golden = in_block.to(tl.uint64) * _GOLDEN
    trailer = staging + strips.to(tl.int64) * strip_words
    expected = tl.zeros([], dtype=tl.int64)
    if CHECKSUM and not GATHER:
        expected = tl.load(trailer)
    total = tl.zeros([RUN_BLOCK], dtype=tl.uint64)
    tile = part * program_tiles
    end = tl.minimum(tile + program_tiles, strip_tiles)
    while tile < end:
        page = tile // RUN_TILES * PAGE_BLOCK + tl.arange(0, PAGE_BLOCK)
        column = tile % RUN_TILES * RUN_BLOCK + in_block
        ids = tl.load(page_ids + page, mask=page < pages, other=0)
        in_pool = (pool + ids * (page_lanes.to(tl.int64) * LANE_WORDS))[:, None] + column[None, :]
        # Of the piece's first page, what is before its first token has a negative place; of its last, what is after
        # its last token has one past the strip.
        run = page * run_words - skipped_lanes * LANE_WORDS
        place = run[:, None] + column[None, :]
        in_staging = staging_strip + place
        mask = (column < run_words)[None, :] & (place >= 0) & (place < strip_words)
        if GATHER:
            words = tl.load(in_pool, mask=mask, other=0)
            tl.store(in_staging, words, mask=mask)
        else:
            words = tl.load(in_staging, mask=mask, other=0)
            tl.store(in_pool, words, mask=mask)
        if CHECKSUM:
            row_key = first_key + (run + tile % RUN_TILES * RUN_BLOCK).to(tl.int64).to(tl.uint64) * _GOLDEN
            # Adding up a tile's rows at once leaves registers for another program on the multiprocessor.
            total += tl.sum(_nh(words.to(tl.uint64, bitcast=True), row_key[:, None] + golden[None, :], mask), 0)
        tile += 1
    if CHECKSUM:
        _settle(tl.sum(total, 0), sums, trailer, expected, verdict, programs, GATHER)


_WORD_NUMBERS = (
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
    UNIT_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """pool, staging: integers of UNIT_BYTES."""
    PER_WORD: tl.constexpr = 8 // UNIT_BYTES
    strip_units = tokens.to(tl.int64) * row_units
    units = strips * strip_units
    words = tl.cdiv(units, PER_WORD)
    start = _key_start(key_low, key_high) + _GOLDEN
    in_word = tl.arange(0, PER_WORD)
    trailer = (staging + words * PER_WORD).to(tl.pointer_type(tl.int64), bitcast=True)
    expected = tl.zeros([], dtype=tl.int64)
    if CHECKSUM and not GATHER:
        expected = tl.load(trailer)
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
            read = tl.load(in_pool, mask=valid, other=0)
            tl.store(staging + unit, read, mask=staged)
        else:
            read = tl.load(staging + unit, mask=staged, other=0)
            tl.store(in_pool, read, mask=valid)
        if CHECKSUM:
            bits = read.to(tl.uint64) & ((1 << (8 * UNIT_BYTES)) - 1)  # without the sign
            whole = tl.sum(bits << (in_word * (8 * UNIT_BYTES)).to(tl.uint64)[None, :], 1)
            keys = start + word.to(tl.uint64) * _GOLDEN
            total += _nh(whole, keys, word < words)
        block += tl.num_programs(0)
    if CHECKSUM:
        _settle(tl.sum(total, 0), sums, trailer, expected, verdict, tl.num_programs(0), GATHER)


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
        """On the current stream; returns before the device is done."""
        self.kernel[self.grid](**self._arguments(), num_warps=_NUM_WARPS)

    def compile(self) -> Any:
        """The kernel for arguments like these, compiled if need be; nothing in Triton's interpreter. Launches nothing."""
        return self.kernel.warmup(**self._arguments(), grid=self.grid, num_warps=_NUM_WARPS)

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

    def bind(self, launch: Launch) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """The same launch, but for its staging and its verdict, with which to call what is returned.

        Both are aligned as the launch's own, and staging is as long.
        """
        compiled = self.compiled(launch)
        if not isinstance(compiled, CompiledKernel):  # Triton's interpreter

            def interpret(staging: torch.Tensor, verdict: torch.Tensor) -> None:
                msgspec.structs.replace(launch, tensors=launch.tensors | {"staging": staging, "verdict": verdict})()

            return interpret
        names = launch.kernel.arg_names
        assert names[: len(_TENSORS)] == list(_TENSORS)
        pool, page_ids, sums = (launch.tensors[name] for name in ("pool", "page_ids", "sums"))
        values = launch.numbers | launch.constants
        rest = [values[name] for name in names[len(_TENSORS) :]]
        # The last three are Triton's hooks around a launch, and what they are told of it.
        run = partial(
            compiled.run, *launch.grid, self._stream, compiled.function, compiled.packed_metadata, *[None] * 3
        )

        def begin(staging: torch.Tensor, verdict: torch.Tensor) -> None:
            tensors = (pool, staging, page_ids, sums, verdict)
            run(*[tensor.data_ptr() for tensor in tensors], *rest)

        return begin


def plan_launch(rows: PagedRows, staging: torch.Tensor, sums: torch.Tensor, verdict: torch.Tensor | None) -> Launch:
    """What a gather (verdict is None) or a scatter is launched with. Every tensor is on one CUDA device.

    staging: [>= rows.staged_bytes] uint8, contiguous, aligned to words; sums: [SUMS] int64, zero, which launches on one
    stream and on no other use; verdict: [1] int64 that the device can write, so also pinned memory, which becomes
    VERDICT_OK or VERDICT_WRONG. A scatter writes the rows whether or not their checksum is right.
    """
    rows.check_staging(staging)
    shape, piece, heads, payload = rows.shape, rows.piece, rows.heads, rows.payload_bytes
    planes, page_bytes = piece.layers * shape.planes, rows.pool.stride(0)
    strips = planes * heads
    assert sums.dtype is torch.int64
    assert strips <= _MOST_PROGRAMS, f"{piece} has too many strips of {shape}"
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
        "kv_heads": shape.kv_heads,
        "first_strip": piece.layer_start * shape.planes * shape.kv_heads + rows.head_start,
        "first_entry": rows.first - rows.first_page,
        "key_low": _as_int32(key),
        "key_high": _as_int32(key >> 32),
    }
    constants = {"GATHER": verdict is None, "CHECKSUM": True}
    aligned = shape.row_bytes | page_bytes | rows.pool.data_ptr()  # to every power of two that divides all of them
    lane_bytes = next((n for n in _LANE_BYTES if (aligned | staging.data_ptr()) % n == 0), 0)
    if lane_bytes:
        row_lanes = shape.row_bytes // lane_bytes
        run_words = shape.page_tokens * shape.row_bytes // WORD_BYTES
        run_block = run_block_words(run_words)
        page_block = _TILE_WORDS // run_block
        run_tiles = -(-run_words // run_block)
        pages = rows.stop - rows.first
        strip_tiles = -(-pages // page_block) * run_tiles
        program_tiles = max(_PROGRAM_TILES, -(-strip_tiles // (_MOST_PROGRAMS // strips)))
        numbers |= {
            "strip_lanes": piece.tokens * row_lanes,
            "run_lanes": shape.page_tokens * row_lanes,
            "page_lanes": page_bytes // lane_bytes,
            "skipped_lanes": piece.token_start % shape.page_tokens * row_lanes,
            "pages": pages,
            "strip_tiles": strip_tiles,
            "program_tiles": program_tiles,
        }
        constants |= {
            "LANE_WORDS": lane_bytes // WORD_BYTES,
            "PAGE_BLOCK": page_block,
            "RUN_BLOCK": run_block,
            "RUN_TILES": run_tiles,
        }
        grid = (-(-strip_tiles // program_tiles), heads, planes)
        return Launch(_move_runs, grid, tl.int64, tensors, numbers, constants)
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
    programs = min(-(-payload // (WORD_BYTES * _WORD_BLOCK)), _WORD_PROGRAMS)
    return Launch(_move_words, (programs, 1, 1), _UNITS[unit_bytes], tensors, numbers, constants)


def run_block_words(run_words: int) -> int:
    """How many words of a run a tile has: a power of two. All of it, or a part that divides it where that is long enough."""
    divisor = run_words & -run_words
    block = divisor if divisor >= _LEAST_RUN_BLOCK else triton.next_power_of_2(run_words)
    return min(block, _TILE_WORDS)


def _as_int32(bits: int) -> int:
    """The lowest 32 bits as a signed number."""
    return ((bits & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
