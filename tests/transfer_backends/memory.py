"""Host memory that a backend can register, without torch: importing it would cost every child process seconds."""

from __future__ import annotations

import ctypes


class HostMemory:
    """`nbytes` zero bytes."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = (ctypes.c_ubyte * nbytes)()
        self.view = memoryview(self._buffer).cast("B")

    def data_ptr(self) -> int:
        return ctypes.addressof(self._buffer)

    def get_device(self) -> int:
        return -1

    def is_contiguous(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return len(self.view)
