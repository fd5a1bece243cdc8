"""A process has all its threads from the beginning."""

from __future__ import annotations

import asyncio
import threading
import time

from disagg.telemetry.threads import LOOP_THREADS, start_loop_threads, start_threads


def running(name: str) -> int:
    """Threads of the pool of this name."""
    return sum(thread.name.startswith(f"{name}_") for thread in threading.enumerate())


def test_a_pool_has_all_its_threads_at_once_and_begins_no_more() -> None:
    threads = start_threads("few", 3)
    try:
        assert running("few") == 3
        for done in [threads.submit(time.sleep, 0.01) for _ in range(20)]:
            done.result()
        assert running("few") == 3
    finally:
        threads.shutdown()


async def test_a_loop_begins_no_thread_for_what_it_has_done_elsewhere() -> None:
    start_loop_threads()
    assert running("loop") == LOOP_THREADS

    def whose() -> str:
        time.sleep(0.01)
        return threading.current_thread().name.partition("_")[0]

    assert set(await asyncio.gather(*(asyncio.to_thread(whose) for _ in range(20)))) == {"loop"}
    assert running("loop") == LOOP_THREADS
