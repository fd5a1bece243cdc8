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


def on_host(values: Tensor) -> Tensor:
    """A device's tensor on the host, once the device has come so far: does not wait for it. Of the host itself as it is."""
    if values.device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def upload_together(values: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Host tensors of one dtype on the device, by one copy. Each begins at a multiple of 16 bytes there."""
    if device.type == "cpu" or not values:
        return list(values)
    packed, starts = _packed(values)
    there = packed.to(device, non_blocking=True)
    return _apart(there, starts, values)


class Uploads:
    """The same beside what the device computes: what comes next on its current stream waits for it, and nothing before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type != "cpu":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def together(self, values: Sequence[Tensor]) -> list[Tensor]:
        if self._stream is None or not values:
            return list(values)
        packed, starts = _packed(values)
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            there = packed.to(self._device, non_blocking=True)
        computing.wait_stream(self._stream)
        there.record_stream(computing)
        return _apart(there, starts, values)


def _packed(values: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """One page-locked tensor with all of them, and where each begins."""
    step = 16 // values[0].element_size()
    starts, end = [], 0
    for value in values:
        starts.append(end)
        end += round_up(value.numel(), step)
    packed = torch.empty(end, dtype=values[0].dtype, pin_memory=True)
    for start, value in zip(starts, values, strict=True):
        packed[start : start + value.numel()] = value.reshape(-1)
    return packed, starts


def _apart(there: Tensor, starts: Sequence[int], values: Sequence[Tensor]) -> list[Tensor]:
    return [there[s : s + v.numel()].view(v.shape) for s, v in zip(starts, values, strict=True)]
