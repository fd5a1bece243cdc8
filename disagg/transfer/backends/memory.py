"""Memory that a backend can register and, on a GPU, export to other processes.

On CUDA it comes from the driver's own allocator (cuMemAlloc), not from torch's: with
PYTORCH_CUDA_ALLOC_CONF=expandable_segments torch maps memory of a kind that cuda_ipc cannot export, and UCX then falls
back to TCP without a word. There is a whole number of GPU pages of it: copies between GPUs out of and into memory of other
sizes took 207 to 264 us for 64 MiB over NVLink, and 172 with this (docs/benchmarks.md). Knows bytes and devices only.
"""

from __future__ import annotations

import ctypes

import torch

from disagg.transfer.backends.base import BackendError
from disagg.types.arithmetic import round_up

_GPU_PAGE_BYTES = 2 << 20  # the largest that the driver maps


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """[nbytes] uint8, contiguous: zeros on CPU, where touching the pages is part of making them; any bytes on CUDA.

    Raises BackendError if there is not enough memory.
    """
    if device.type != "cuda":
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    with torch.cuda.device(device):
        whole = round_up(nbytes, _GPU_PAGE_BYTES)
        tensor = torch.as_tensor(_DriverMemory(whole), device=device)[:nbytes]
    assert tensor.device == torch.device("cuda", device.index or 0), f"memory of {device} came out on {tensor.device}"
    return tensor


class _DriverMemory:
    """Bytes of the current CUDA device, freed with the last tensor that views them."""

    def __init__(self, nbytes: int) -> None:
        self._address = ctypes.c_uint64(0)
        self._driver = ctypes.CDLL("libcuda.so.1")
        torch.cuda.current_stream().query()  # makes the device's primary context current in this thread
        status = self._driver.cuMemAlloc_v2(ctypes.byref(self._address), ctypes.c_size_t(nbytes))
        if status:
            name = ctypes.c_char_p(b"an unknown error")
            self._driver.cuGetErrorName(status, ctypes.byref(name))
            raise BackendError(f"{nbytes} bytes of GPU memory cannot be had: {(name.value or b'').decode()}")
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self._address.value, False),
            "version": 3,
        }

    def __del__(self) -> None:
        if self._address.value:
            self._driver.cuMemFree_v2(self._address)
