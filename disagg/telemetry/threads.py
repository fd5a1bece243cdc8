"""Pools whose threads are all there from the beginning: a process has no more of them after a day than after a minute.

Python's own pools, and the one that a loop runs `to_thread` and the names of hosts in, begin a thread whenever work comes while
none is idle. A router's metric of threads then rises for an hour, and nobody can tell that from a leak.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

LOOP_THREADS = 6  # what a loop has done elsewhere is rare; one of them waits for the end of a renderer
START_S = 10.0


def start_threads(name: str, count: int) -> ThreadPoolExecutor:
    """A pool of `count` threads that have begun, or begin within START_S, named after `name`."""
    threads = ThreadPoolExecutor(count, name)
    together = threading.Barrier(count, timeout=START_S)
    for _ in range(count):
        threads.submit(together.wait)
    return threads


def start_loop_threads() -> None:
    """For the loop that runs now: what it does in threads that it was not told of (`run_in_executor(None, ...)`)."""
    asyncio.get_running_loop().set_default_executor(start_threads("loop", LOOP_THREADS))
