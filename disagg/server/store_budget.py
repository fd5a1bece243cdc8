"""Keeps storage to `storage.budget_bytes` while servers run, by what `disagg cache gc` does, in a process beside the server.

    every EVERY_S, or when this server has written a twentieth of the budget ──> whose turn is it? ──> offload/collector

Servers that share a store share the work: whoever begins leaves a note there, and the others leave the store alone until it is
old. Notes tell the store's time, so no clocks need agree; two that begin at once do the same work, which harms nothing. A store
that fails is left for the next time. Between two turns there may be more than the budget, by what was written meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from random import Random

import msgspec

from disagg.config.sizes import show_bytes
from disagg.config.tree import StorageConfig
from disagg.offload.causes import Cause
from disagg.offload.collector import Job
from disagg.offload.store import ObjectStore, StoreError
from disagg.offload.survey import COLLECTED_PATH, Collected, store_clock

logger = logging.getLogger(__name__)

EVERY_S = 600.0
SOONEST_S = 10.0  # however much is written
WRITTEN_SHARE = 20  # one part in so many of the budget is a reason to look sooner
DEADLINE_S = 3600.0  # of one turn; a store of millions of objects takes long
COMMAND = (sys.executable, "-m", "disagg.offload.collector")


class StoreBudget:
    """`tick` often, `close` at the end. written_bytes: what this server has written there so far. clock: seconds, rising."""

    def __init__(
        self,
        store: ObjectStore,
        storage: StorageConfig,
        written_bytes: Callable[[], int],
        *,
        command: Sequence[str] = COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.removed_bytes = 0  # by this server
        self._store = store
        self._job = Job(storage.url, storage.options, storage.budget_bytes)
        self._written_bytes = written_bytes
        self._command = command
        self._clock = clock
        self._written_then = 0
        self._rng = Random()
        self._looked_s = clock() - EVERY_S * self._rng.random()  # servers that start together do not look together
        self._task: asyncio.Task[None] | None = None

    def tick(self) -> None:
        if self._task is not None and not self._task.done():
            return
        waited_s = self._clock() - self._looked_s
        much = (self._written_bytes() - self._written_then) * WRITTEN_SHARE > self._job.budget_bytes
        if waited_s >= (SOONEST_S if much else EVERY_S):
            self._looked_s = self._clock()
            self._written_then = self._written_bytes()
            self._task = asyncio.create_task(self._look(SOONEST_S if much else EVERY_S / 2), name="store budget")

    async def close(self) -> None:
        """What is under way ends here; what it has removed, it has."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look(self, least_s: float) -> None:
        """Unless another has done so for less than least_s."""
        try:
            if not await self._is_turn(least_s):
                return
            done = await self._collect()
        except StoreError as error:
            logger.warning("storage cannot be kept to its budget now: %s", error)
            return
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            logger.error("storage cannot be kept to its budget: %s: %s", type(error).__name__, error)
            return
        self.removed_bytes += done.freed_bytes
        left, budget = show_bytes(done.left_bytes), show_bytes(self._job.budget_bytes)
        said = f"storage: removed {done.spans} spans, {show_bytes(done.freed_bytes)}; {left} are left of a budget of {budget}"
        above = done.left_bytes > self._job.budget_bytes
        worth_warning = above or done.undeleted
        logger.log(
            logging.WARNING if worth_warning else logging.INFO, "%s%s", said, done.reasons(self._job.budget_bytes)
        )

    async def _is_turn(self, least_s: float) -> bool:
        try:
            last_s = await self._store.modified(COLLECTED_PATH)
        except StoreError as error:
            if error.cause is not Cause.ABSENT:
                raise
        else:
            if await store_clock(self._store) - last_s < least_s:
                return False
        await self._store.replace(COLLECTED_PATH, [b""])
        return True

    async def _collect(self) -> Collected:
        process = await asyncio.create_subprocess_exec(
            *self._command, str(os.getpid()), stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                out, said = await process.communicate(msgspec.json.encode(self._job))
        except RuntimeError as error:  # uvloop's, of a process that has ended before it was told what to do
            raise StoreError(Cause.FAILED, f"the process that looks through it ended at once: {error}") from error
        finally:
            await _end(process)
        if process.returncode:
            raise StoreError(Cause.FAILED, said.decode(errors="replace").strip()[-400:] or f"exit {process.returncode}")
        return msgspec.json.decode(out, type=Collected)


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()
