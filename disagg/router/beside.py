"""Work on text that takes long, in threads beside the event loop. Knows nothing of what the work is.

Only work that lets go of the interpreter, or is plain Python, which does so every 5 ms, belongs here: a thread that
keeps it stops the loop as surely as a call on it. Long texts have threads of their own: a hundred prompts of a million
characters keep nobody waiting who asks a question. And tenants take turns, by the length of their texts: thousands of prompts
of one keep another waiting for one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

from disagg.scheduler.fairness import FairQueue
from disagg.telemetry.memory import GiveBack
from disagg.telemetry.threads import start_threads
from disagg.types.errors import Unavailable

THREADS = 2  # of each kind
LONG_BYTES = 64 << 10  # of text; beyond it takes more than 30 ms

P = ParamSpec("P")
T = TypeVar("T")


class Beside:
    """Owned by one router; callers bound what waits here by refusing requests, not texts."""

    def __init__(self) -> None:
        self._short, self._long = _Lane("text"), _Lane("long-text")
        self._closed = False
        self._give_back = GiveBack()

    async def run(self, tenant: str, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """tenant: who asks. size: of what is worked on, in characters or bytes. Work whose caller is cancelled before it begins
        is not done."""
        if self._closed:
            raise _closing()
        lane = self._long if size > LONG_BYTES else self._short
        try:
            done: T = await lane.run(tenant, size, partial(work, *args, **kwargs))
            return done
        finally:
            self._give_back.after(size)

    def close(self) -> None:
        """Begins nothing more; what is under way ends by itself."""
        self._closed = True
        for lane in (self._short, self._long):
            lane.close()


class _Job:
    """Work that waits for a thread, or has one."""

    __slots__ = ("done", "work")

    def __init__(self, work: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        self.work = work
        self.done = done


class _Lane:
    """Threads of one kind, which get no more at once than they do, and what waits for them."""

    def __init__(self, name: str) -> None:
        self._threads = start_threads(name, THREADS)
        self._waiting: FairQueue[_Job] = FairQueue()
        self._busy = 0

    async def run(self, tenant: str, size: int, work: Callable[[], Any]) -> Any:
        job = _Job(work, asyncio.get_running_loop().create_future())
        self._waiting.append(tenant, job, max(1, size))
        self._begin()
        try:
            return await job.done
        finally:
            self._waiting.discard(job)
            del job, work  # an error has this frame, and `done` the error: a circle that would keep the text

    def close(self) -> None:
        for job in tuple(self._waiting):
            self._waiting.remove(job)
            if not job.done.done():
                job.done.set_exception(_closing())
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        while self._waiting and self._busy < THREADS:
            job = next(iter(self._waiting))
            self._waiting.take(job)
            self._busy += 1
            doing = asyncio.get_running_loop().run_in_executor(self._threads, job.work)
            doing.add_done_callback(partial(self._ended, job))

    def _ended(self, job: _Job, doing: asyncio.Future[Any]) -> None:
        self._busy -= 1
        self._begin()
        error = _closing() if doing.cancelled() else doing.exception()
        if job.done.done():  # its caller has gone
            return
        if error is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(doing.result())


def _closing() -> Unavailable:
    return Unavailable("the router is shutting down")
