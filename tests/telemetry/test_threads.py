"""A process has all its threads from the beginning."""

from __future__ import annotations

import asyncio
import threading
import time

from disagg.telemetry.threads import LOOP_THREADS, start_loop_threads, start_threads


def test_a_pool_has_all_its_threads_at_once_and_begins_no_more() -> None:
    before = threading.active_count()
    threads = start_threads("few", 3)
    try:
        assert threading.active_count() == before + 3
        for done in [threads.submit(time.sleep, 0.01) for _ in range(20)]:
            done.result()
        assert threading.active_count() == before + 3
    finally:
        threads.shutdown()


async def test_a_loop_begins_no_thread_for_what_it_has_done_elsewhere() -> None:
    before = threading.active_count()
    start_loop_threads()
    assert threading.active_count() == before + LOOP_THREADS
    await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.01) for _ in range(20)))
    assert threading.active_count() == before + LOOP_THREADS
