"""Kernels that begin while the one before them ends (programmatic dependent launch; Hopper and later).

    kernel 1 │ begin │ wait ....... │ read, compute, write │
    kernel 2                  │ begin │ wait ............. │ read, compute, write │

Each waits until the one before it is over, and then lets the next one begin. So what comes before the wait runs beside the
kernel before, and must read nothing that it or the one before it may write: weights, tables of the step. What is launched
without this, as torch's own kernels are, begins when all before it is over, as ever.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

LEAST_CAPABILITY = (9, 0)


@triton.jit  # type: ignore[untyped-decorator]
def follow(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803  # as Triton writes constants
    """Before anything is read or written that belongs to the step."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Arguments of the launch of a kernel that has `follow` in it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}
