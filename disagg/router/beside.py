"""Work on text that takes long, in threads beside the event loop. Knows nothing of what the work is.

Only work that lets go of the interpreter, or is plain Python, which does so every 5 ms, belongs here: a thread that
keeps it stops the loop as surely as a call on it. Long texts have threads of their own: a hundred prompts of a million
characters keep nobody waiting who asks a question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

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
        self._short, self._long = start_threads("text", THREADS), start_threads("long-text", THREADS)
        self._closed = False
        self._give_back = GiveBack()

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """size: of what is worked on, in characters or bytes. Work whose caller is cancelled before it begins is not done."""
        if self._closed:
            raise Unavailable("the router is shutting down")
        threads = self._long if size > LONG_BYTES else self._short
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, partial(work, *args, **kwargs))
        finally:
            self._give_back.after(size)

    def close(self) -> None:
        """Begins nothing more; what is under way ends by itself."""
        self._closed = True
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)
