"""Host values on a device. Knows tensors; nothing of what is in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from disagg.types.arithmetic import round_up


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without waiting: a copy from pageable memory would drain the stream first."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def upload_together(values: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Host tensors of one dtype on the device, by one copy. Each begins at a multiple of 16 bytes there."""
    if device.type == "cpu" or not values:
        return list(values)
    step = 16 // values[0].element_size()
    starts, end = [], 0
    for value in values:
        starts.append(end)
        end += round_up(value.numel(), step)
    packed = torch.empty(end, dtype=values[0].dtype, pin_memory=True)
    for start, value in zip(starts, values, strict=True):
        packed[start : start + value.numel()] = value.reshape(-1)
    there = packed.to(device, non_blocking=True)
    return [there[s : s + v.numel()].view(v.shape) for s, v in zip(starts, values, strict=True)]
