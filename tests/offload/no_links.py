"""`python -m tests.offload.no_links URL ERRNO`: objects in a directory that the system makes no hard links in."""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import sys

from disagg.offload.store import open_store
from disagg.telemetry.process import leave

LINK_CALLS = {"x86_64": (86, 265), "aarch64": (37,)}  # numbers of link and linkat, by machine
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # of the kernel's filters
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def make_no_links(code: int) -> None:
    """From now on whoever links files in this process is told `code`."""
    calls = LINK_CALLS[os.uname().machine]
    left = reversed(range(len(calls)))
    jumps = [(_JUMP_IF_EQUAL, after + 1, 0, number) for after, number in zip(left, calls, strict=True)]
    steps = [(_LOAD, 0, 0, 0), *jumps, (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | code)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(filters)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0) == 0, os.strerror(ctypes.get_errno())


async def main(url: str) -> None:
    store = open_store(url, {})
    assert await store.create("a/b", [b"first"])
    assert not await store.create("a/b", [b"other"])
    assert await store.create("a/c", [b"second"])
    assert await store.get("a/b", 100) == b"first"
    assert not store.breaker.failed_calls


if __name__ == "__main__":
    make_no_links(int(sys.argv[2]))
    asyncio.run(main(sys.argv[1]))
    leave(0)  # else obstore's threads end one in ten such processes with SIGABRT on a busy machine
