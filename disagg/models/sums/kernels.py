"""Sums of several ranks' rows, inside the kernel that makes them or takes them: what NCCL would do in a launch of its own.

    rank 0   part ──> its area of rank 1's slot          each waits until the others' parts are in its own slot,
    rank 1   part ──> its area of rank 0's slot          adds them up in the order of ranks, and empties it

An element is the bits of a part's number, or EMPTY, which is a NaN that no arithmetic gives. So data need neither flags nor
barriers, and elements may arrive in any order. Sums take two slots in turns: whoever writes into one again has all of the sum
between, which others began only when they had emptied that slot (each kernel begins when the one before it is over).
"""

from __future__ import annotations

import triton
import triton.language as tl

EMPTY = tl.constexpr(-1)


@triton.jit
def _is_missing(at, real):
    """Whether an element is empty still, 1 or 0."""
    return tl.max((tl.load(at, mask=real, other=0, volatile=True) == EMPTY).to(tl.int32), 0)


@triton.jit
def _arrived(at, real, most_polls, ON_GPU: tl.constexpr):
    """The bits that another rank writes there, once all are. Ends the process's kernels if that takes too long."""
    polls = 0
    missing = _is_missing(at, real)
    while missing != 0:
        missing = _is_missing(at, real)
        polls += 1
        if ON_GPU:  # noqa: SIM102  # a constant, so that the interpreter does not come here
            if polls > most_polls:
                tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    # Not what the loop has seen: threads that hold the same element may have looked at different times.
    return tl.load(at, mask=real, other=0, volatile=True)


@triton.jit
def sum_of_ranks(
    part, slots, at, real, area, most_polls,
    RANK: tl.constexpr, RANKS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """The sum of all ranks' parts in float32, the same bits on all of them. part: [n], of 16 or 32 bits; at: [n], where each
    element has its place in any rank's area.

    slots: each rank's slot, as integers of as many bits; area: elements of one rank's area. No two programs have the same
    places.
    """
    BITS: tl.constexpr = slots[0].dtype.element_ty
    NAN: tl.constexpr = 0x7FFF if BITS.primitive_bitwidth == 16 else 0x7FFFFFFF
    bits = part.to(BITS, bitcast=True)
    bits = tl.where(bits == EMPTY, NAN, bits).to(BITS)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.store(slots[rank] + RANK * area + at, bits, mask=real)
    mine = slots[RANK]
    total = tl.zeros_like(part).to(tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += bits.to(part.dtype, bitcast=True).to(tl.float32)
        else:
            others = _arrived(mine + rank * area + at, real, most_polls, ON_GPU)
            total += others.to(part.dtype, bitcast=True).to(tl.float32)
    tl.debug_barrier()  # all threads have seen what is emptied now
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.store(mine + rank * area + at, tl.full(at.shape, -1, BITS), mask=real)
    return total
