"""Gives back to the system what large requests took: malloc keeps freed memory in each thread's arena, for ever if need be.

Measured on a router that was asked four requests of 16 MiB at once: 186 MiB more than before without this, 16 MiB with it.
"""

from __future__ import annotations

import asyncio
import ctypes

LARGE_BYTES = 1 << 20  # of a request; smaller ones find their memory again
GIVE_BACK_AFTER_S = 1.0  # so that requests that come together cost one call


class GiveBack:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._due = False

    def after(self, nbytes: int) -> None:
        """A request of so many bytes is being read: soon after, what is free by then goes back."""
        if nbytes > LARGE_BYTES and not self._due:
            self._due = True
            asyncio.get_running_loop().call_later(GIVE_BACK_AFTER_S, self._give_back)

    def _give_back(self) -> None:
        self._due = False
        asyncio.get_running_loop().run_in_executor(None, give_back_memory)


def give_back_memory() -> None:
    """Takes some milliseconds, without the interpreter. Nothing where the C library has no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
