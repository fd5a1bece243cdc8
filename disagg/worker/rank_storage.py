"""What one rank writes to storage and reads from it: units of its own heads, out of the host pool and into it.

    write   host pages ──cut──> [heads, pages, unit] ──> one part per group      at most UPLOADS operations at once
    read    parts, READS at once, MAX_READING bytes ──> units ──join──> host pages

An operation that fails says why, and raises for nothing but being cancelled. Work on bytes is done on threads beside the loop,
and an operation is over only when no thread looks at its pages any more. Knows heads, pages and parts; nothing of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from disagg.messages.control import OpenOffload
from disagg.messages.stored import PartRead, PartRef
from disagg.messages.tiers import GroupParts, PartsRead, PartsWritten, ReadParts, WriteParts
from disagg.offload.keys import Scope
from disagg.offload.objects import BadObject
from disagg.offload.store import ObjectStore, StoreError
from disagg.offload.tier import Missed, StorageTier, Unit
from disagg.offload.units import Bytes, cut_page, heads_of, join_unit, unit_bytes, written_by
from disagg.types.bounded import forget_oldest
from disagg.types.plain import one_line
from disagg.worker.host_memory import HostMemory

logger = logging.getLogger(__name__)

UPLOADS = 4
READS = 16
MAX_READING = 256 << 20  # uncompressed bytes that are being read; one part that is larger is read alone
MAX_TIERS = 64
EXPECTED = (StoreError, Missed, BadObject)  # of any store; all have a cause


class Budget:
    """Lets in whoever fits, in the order in which they came."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._inside = self._bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def of(self, nbytes: int) -> AsyncIterator[None]:
        """Whoever is larger than the budget is in alone."""
        if self._waiting or not self._fits(nbytes):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((nbytes, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._leave(nbytes)
                else:
                    with contextlib.suppress(ValueError):  # it was passed over already
                        self._waiting.remove((nbytes, turn))
                    self._admit()
                raise
        else:
            self._enter(nbytes)
        try:
            yield
        finally:
            self._leave(nbytes)

    def _fits(self, nbytes: int) -> bool:
        return not self._inside or (self._inside < self._most and self._bytes + nbytes <= self._most_bytes)

    def _enter(self, nbytes: int) -> None:
        self._inside += 1
        self._bytes += nbytes

    def _leave(self, nbytes: int) -> None:
        self._inside -= 1
        self._bytes -= nbytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            nbytes, turn = self._waiting.popleft()
            if turn.cancelled():  # whoever waited for it is cancelled, and has not run since
                continue
            self._enter(nbytes)
            turn.set_result(None)


class RankStorage:
    """Belongs to one loop."""

    def __init__(self, rank: int, tp: int, opened: OpenOffload, host: HostMemory, store: ObjectStore) -> None:
        self._opened = opened
        self._host = host
        self._store = store
        self._own = tuple(group.on_rank(tp) for group in opened.groups)
        self._held = tuple(heads_of(rank, tp, group) for group in opened.groups)
        self._written = tuple(written_by(rank, tp, group) for group in opened.groups)
        self._units = tuple(unit_bytes(group, opened.page_tokens) for group in opened.groups)
        self._tiers: OrderedDict[str, StorageTier] = OrderedDict()  # by salt, least recently used first
        self._uploads = asyncio.Semaphore(UPLOADS)
        self._reads = Budget(READS, MAX_READING)
        self._deleting: set[asyncio.Task[None]] = set()

    def describe(self) -> str:
        return f"{len(self._tiers)} tenants of late, deleting {len(self._deleting)}"

    # ---- writing

    async def write(self, request: WriteParts) -> PartsWritten:
        async with self._uploads:
            started = time.perf_counter()
            parts: list[tuple[PartRef, ...]] = []
            error = ""
            try:
                tier = self._tier(request.salt)
                for g, group in enumerate(request.groups):
                    parts.append(await self._write_group(tier, g, group))
            except EXPECTED as failed:
                error = one_line(f"{failed.cause}: {failed}")
            except Exception as failed:  # a bug, but of this operation alone
                logger.exception("writing %d failed", request.op)
                error = one_line(f"{type(failed).__name__}: {failed}")
            if error:
                self._delete_beside([ref.path for refs in parts for ref in refs])
                parts = [() for _ in request.groups]
            nbytes = sum(
                len(group.hashes) * unit * len(heads)
                for group, unit, heads in zip(request.groups, self._units, self._written, strict=True)
            )
            return PartsWritten(request.op, error, tuple(parts), 0 if error else nbytes, time.perf_counter() - started)

    async def _write_group(self, tier: StorageTier, g: int, group: GroupParts) -> tuple[PartRef, ...]:
        heads = self._written[g]
        if not heads or not group.hashes:
            return ()
        units = await _beside(self._cut, g, group.host_pages)
        return (await tier.write_part(g, group.hashes, heads.start, units),)

    def _cut(self, g: int, pages: Sequence[int]) -> Bytes:
        """[heads, pages, unit_bytes] of this rank's."""
        own = self._own[g]
        units = np.empty((own.kv_heads, len(pages), self._units[g]), dtype=np.uint8)
        for i, page in enumerate(pages):
            units[:, i] = cut_page(self._host.page(g, page), own, self._opened.page_tokens)
        return units

    def _delete_beside(self, paths: Sequence[str]) -> None:
        """What cannot be deleted is collected later, as what belongs to no span."""

        async def delete() -> None:
            with contextlib.suppress(StoreError):
                await self._store.delete(paths)

        if paths:
            task = asyncio.create_task(delete())
            self._deleting.add(task)
            task.add_done_callback(self._deleting.discard)

    # ---- reading

    async def read(self, request: ReadParts) -> PartsRead:
        started = time.perf_counter()
        error = ""
        try:
            await self._read(request)
        except EXPECTED as failed:
            error = one_line(f"{failed.cause}: {failed}")
        except Exception as failed:  # as above
            logger.exception("reading %d failed", request.op)
            error = one_line(f"{type(failed).__name__}: {failed}")
        nbytes = sum(len(places) * each for places, each in zip(request.places, self._host.page_bytes, strict=True))
        return PartsRead(request.op, error, 0 if error else nbytes, time.perf_counter() - started)

    async def _read(self, request: ReadParts) -> None:
        tier = self._tier(request.salt)
        places = [dict(of_group) for of_group in request.places]
        filled: set[tuple[int, int, int]] = set()  # group, page_no, head

        async def read(part: PartRead) -> None:
            unit = self._units[part.group]
            share = part.span.shares[part.group]
            async with self._reads.of((part.head_stop - part.head_start) * len(share.pages) * unit):
                units = await tier.fetch(part)
                wanted = [each for each in units if each.page_no in places[part.group]]
                await _beside(self._join, part.group, wanted, places[part.group])
                filled.update((part.group, each.page_no, each.head) for each in wanted)

        await _all([read(part) for part in request.reads])
        for g, of_group in enumerate(places):
            missing = [p for p in of_group if any((g, p, head) not in filled for head in self._held[g])]
            assert not missing, f"pages {sorted(missing)[:16]} of group {g} are in no part that was to be read"

    def _join(self, g: int, units: Sequence[Unit], places: dict[int, int]) -> None:
        for unit in units:
            page = self._host.page(g, places[unit.page_no])
            join_unit(unit.data, unit.head - self._held[g].start, self._own[g], self._opened.page_tokens, page)

    # ---- both

    def _tier(self, salt: str) -> StorageTier:
        tier = self._tiers.pop(salt, None)
        if tier is None:
            opened = self._opened
            scope = Scope(opened.weights, opened.dtype, opened.page_tokens, opened.groups, salt)
            tier = StorageTier(
                self._store,
                scope,
                checkpoint_tokens=opened.checkpoint_tokens,
                compression=opened.compression,
            )
        self._tiers[salt] = tier
        forget_oldest(self._tiers, MAX_TIERS)
        return tier


async def _beside(work: Callable[..., Any], *args: Any) -> Any:
    """Done on a thread; left only when the thread is through with it, also by who is cancelled."""
    under_way = asyncio.get_running_loop().run_in_executor(None, work, *args)
    try:
        return await asyncio.shield(under_way)
    except asyncio.CancelledError:
        await asyncio.wait([under_way])
        raise


async def _all(work: Sequence[Any]) -> None:
    """All at once. The first that fails ends the others, and is raised when they have ended."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
