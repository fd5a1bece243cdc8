"""Where the largest logit of each row is: read once, at the rate of memory. torch's own takes several times as long.

Of equal logits the first counts. A row with one that is no number (NaN, or infinitely large), or of which all are minus
infinity, has no token: it gives -1, which costs no launch of its own. Triton; a CPU has torch's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from disagg.messages.plan import NO_TOKEN
from disagg.types.arithmetic import ceil_div

BLOCK = 4096  # columns that a program asks for at once
NUM_WARPS = 4
PROGRAMS = 2048  # that fill the GPU
MOST_PARTS = 64  # of a row


def parts_of(rows: int, width: int) -> int:
    """How many programs share a row."""
    return max(1, min(MOST_PARTS, PROGRAMS // rows, ceil_div(width, BLOCK)))


def first_argmax_into(x: Tensor, out: Tensor) -> None:
    """x: [R, V] of any floating dtype, rows contiguous; out: [R] int64, -1 for a row that has no token."""
    if x.device.type == "cpu":
        out.copy_(checked(x.argmax(-1), x))
    else:
        launch(x, out)


def checked(first: Tensor, x: Tensor) -> Tensor:
    """torch's argmax, -1 for a row that has no token: torch takes NaN for the largest. first: [R] int64; x: [R, V]."""
    return first.where(x.gather(1, first.unsqueeze(1)).squeeze(1).isfinite(), NO_TOKEN)


def launch(x: Tensor, out: Tensor) -> None:
    """By Triton, on any device that it has."""
    from disagg.models.argmax import kernels
    from disagg.models.overlap import overlap

    rows, width = x.shape
    parts = parts_of(rows, width)
    aligned = kernels.ALIGNED.value
    part = ceil_div(ceil_div(width, parts), aligned) * aligned
    tops = torch.empty((rows, parts), dtype=torch.float32, device=x.device)
    places = torch.empty((rows, parts), dtype=torch.int32, device=x.device)
    later = overlap(x.device)
    kernels._of_parts[(rows, parts)](
        x, tops, places, x.stride(0), width, part, BLOCK=BLOCK, num_warps=NUM_WARPS, **later
    )
    padded = 1 << (parts - 1).bit_length()
    kernels._of_rows[(rows,)](tops, places, out, parts, PADDED=padded, num_warps=1, **later)
