"""A rank's host pool: one block of memory, cut into pages of each layer group exactly as the GPU's pool is.

Small page p of group g begins at byte p * strides[g]. Beside a GPU the block is page-locked, so that the GPU's copy engines
and kernels reach it. On a CPU nothing of it is touched before a page is used: pages that never were take no memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from disagg.messages.layout import LayerGroup
from disagg.offload.units import Bytes
from disagg.types.errors import ConfigError

_HUGE_PAGE_BYTES = 2 << 20


class HostMemory:
    """bytes: uint8 [num_large * large_bytes], on the CPU. groups: as the rank keeps them."""

    def __init__(
        self, groups: Sequence[LayerGroup], storage: torch.Tensor, strides: Sequence[int], page_tokens: int
    ) -> None:
        """storage: uint8, contiguous. strides: bytes from one small page to the next, per group."""
        assert storage.device.type == "cpu" and storage.dtype == torch.uint8 and storage.is_contiguous()
        self.bytes = storage
        self.strides = tuple(strides)
        self.page_bytes = tuple(group.page_bytes(page_tokens) for group in groups)
        raw = storage.numpy()
        self._pages = [
            raw.reshape(-1, stride)[:, :nbytes] for stride, nbytes in zip(strides, self.page_bytes, strict=True)
        ]

    def num_pages(self, g: int) -> int:
        return len(self._pages[g])

    def page(self, g: int, page: int) -> Bytes:
        """[page_bytes], the page itself."""
        view: Bytes = self._pages[g][page]
        return view


def allocate_host(nbytes: int, pinned: bool) -> torch.Tensor:
    """[nbytes] uint8, of any content. pinned: page-locked, and where kernels can reach it. Raises ConfigError."""
    most, what = _most_bytes(pinned)
    refusal = f"offload.host_bytes: {nbytes} bytes of host memory for each rank cannot be had; {what}, {most} bytes"
    if nbytes > most:
        raise ConfigError(refusal)
    try:
        # Not torch's pinned allocator: it rounds up to a power of two, which of a large pool can be twice as much.
        storage = torch.from_numpy(_aligned(nbytes))
    except (MemoryError, ValueError) as error:
        raise ConfigError(refusal) from error
    if pinned:
        _register(storage, refusal)
    return storage


def _aligned(nbytes: int) -> Bytes:
    """Untouched memory that begins where a page of the machine does, and a large one."""
    block: Bytes = np.empty(nbytes + _HUGE_PAGE_BYTES, dtype=np.uint8)
    skipped = -block.ctypes.data % _HUGE_PAGE_BYTES
    return block[skipped : skipped + nbytes]


def _register(storage: torch.Tensor, refusal: str) -> None:
    """Lock its pages for every GPU, until nobody has the tensor any more."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(storage.data_ptr(), storage.numel(), 0)
    if int(status):
        raise ConfigError(f"{refusal}: to lock it failed with CUDA error {int(status)}")
    weakref.finalize(storage, runtime.cudaHostUnregister, storage.data_ptr()).atexit = False


def _most_bytes(pinned: bool) -> tuple[int, str]:
    """What there is room for, and what that number is. What is not page-locked may be swapped, and is used bit by bit."""
    names = ("MemAvailable",) if pinned else ("MemTotal", "SwapTotal")
    what = "what is available here is" if pinned else "this machine has"
    most = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        most.append(sum(int(rows[name].split()[0]) * 1024 for name in names))
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        most.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(most, default=1 << 62), what
