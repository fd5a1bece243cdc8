"""Does in storage what an engine wants done there, for one incarnation of its workers. The bytes of KV go through the ranks.

    engine                    keeper                         ranks
    Upload ─────────────────> remembered ──WriteParts──────> each writes its heads ──PartsWritten──> remembered
    Publish ────────────────> one span of all their parts, found from now on ──> StorePublished
    Discard ────────────────> their parts are deleted, also those that are reported later
    Ask ────────────────────> what is found is remembered ──> StoreFound
    Fetch ──────────────────> what each rank has to read ──ReadParts──> each reads its heads ──PartsRead

Every Ask and Publish is answered once, and not from within `do`. A store that fails is left alone: its breaker refuses calls,
asks are answered at once with nothing, the engine is told, and the keeper tries by itself whether it works again.

A rank that could not read says so, but not what is damaged. So the keeper reads again what that rank was to read: a span that
is damaged is then counted and removed, so that whoever has its pages stores them again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from msgspec.structs import replace

from disagg.messages.stored import PartRead, PartRef
from disagg.messages.tiers import GroupParts, PartsRead, PartsWritten, ReadParts, TierCommand, WriteParts
from disagg.offload.breaker import Breaker, StoreState
from disagg.offload.causes import Cause
from disagg.offload.instructions import (
    Ask,
    Discard,
    Fetch,
    ForgetAsk,
    Publish,
    StoreCommand,
    StoreEvent,
    StoreFound,
    StorePublished,
    StoreWorks,
    Upload,
)
from disagg.offload.store import ObjectStore, StoreError
from disagg.offload.survey import CLOCK_PATH
from disagg.offload.tier import Found, Missed, StorageTier, beyond, what_is_found
from disagg.offload.units import heads_of
from disagg.server.keeper_facts import KeeperFacts, KeeperLimits
from disagg.server.tier_sums import TierSums
from disagg.types.bounded import forget_oldest

logger = logging.getLogger(__name__)

TENANTS = 64  # salts of which something is remembered
WALK_S = 30.0  # for looking a sequence up, however long the one who asked has waited for it
CLOSE_S = 2.0
TRY_EVERY_S = 0.5  # how often a failing store's breaker is asked whether it may be tried
TRY_BYTES = 64 << 10  # what is written to see whether it works: a full disk has room for nothing but names
PASSING = (Cause.FAILED, Cause.LATE, Cause.DEGRADED)  # says nothing of the object


@dataclass(eq=False)
class _Upload:
    """opened: of the breaker of writes, when ranks were told. parts: by rank, of those that have reported; by group. failed: on
    some rank.
    """

    command: Upload
    opened: int
    parts: dict[int, tuple[tuple[PartRef, ...], ...]] = field(default_factory=dict)
    failed: bool = False
    discarded: bool = False


@dataclass(eq=False)
class _Fetch:
    """reads: by rank, of those that have not reported. damaged: first hashes of spans that were found to be."""

    tier: StorageTier
    reads: dict[int, tuple[PartRead, ...]]
    damaged: set[bytes] = field(default_factory=set)


class StoreKeeper:
    """A `dispatch.StorePort`. send: as Workers.send. tell: hears what has happened. clock: seconds, rising."""

    def __init__(
        self,
        store: ObjectStore,
        facts: KeeperFacts,
        send: Callable[[int, Sequence[TierCommand]], None],
        tell: Callable[[StoreEvent], None],
        sums: TierSums,
        *,
        limits: KeeperLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._facts = facts
        self._send = send
        self._tell = tell
        self._sums = sums
        self._limits = limits = limits or KeeperLimits()
        self._clock = clock
        self._writes = Breaker()  # of what ranks write: a store that can be read may have no room
        self._tiers: OrderedDict[str, StorageTier] = OrderedDict()  # by salt
        self._uploads: dict[int, _Upload] = {}  # until they are being published, or discarded by all ranks
        self._publishing: set[int] = set()
        self._asking: set[int] = set()  # that are not answered
        self._asks: OrderedDict[int, tuple[StorageTier, list[Found]]] = OrderedDict()  # that are, with what was found
        self._known_spans = 0
        self._fetches: dict[int, _Fetch] = {}
        self._walks = asyncio.Semaphore(limits.walks)
        self._publishes = asyncio.Semaphore(limits.publishes)
        self._looking = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._extra: set[asyncio.Task[Any]] = set()  # of these, those that nobody waits for
        self._said_works = True
        self._trial: asyncio.Task[None] | None = None
        self._tried_s = float("-inf")
        self._broken: BaseException | None = None
        self._closed = False

    # ---- what the server asks

    @property
    def works(self) -> bool:
        return self._store.state is StoreState.OK and self._writes.state is StoreState.OK

    @property
    def idle(self) -> bool:
        """Nothing is being written."""
        return not self._uploads and not self._publishing

    def tick(self) -> None:
        """Time has passed. Raises what an engine raised that was told something."""
        if self._broken is not None:
            raise self._broken
        self._watch()
        now_s = self._clock()
        trying = self._trial is not None and not self._trial.done()
        if not self.works and not trying and not self._closed and now_s - self._tried_s >= TRY_EVERY_S:
            self._tried_s = now_s
            self._trial = self._start(self._try_store())

    async def close(self) -> None:
        """Says nothing to the engine from now on, and ends all work within CLOSE_S."""
        self._closed = True
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)

    def describe(self) -> dict[str, object]:
        """For a person."""
        return {
            "works": self.works,
            "tenants": len(self._tiers),
            "uploads": sorted(self._uploads),
            "publishing": sorted(self._publishing),
            "asks without an answer": sorted(self._asking),
            "asks that are remembered": len(self._asks),
            "fetches": {op: sorted(fetch.reads) for op, fetch in self._fetches.items()},
        }

    # ---- what the engine wants

    def do(self, command: StoreCommand) -> None:
        if self._closed:
            return
        match command:
            case Upload():
                self._upload(command)
            case Publish():
                self._publish(command.op)
            case Discard():
                self._discard(command.op)
            case Ask():
                self._ask(command)
            case Fetch():
                self._fetch(command)
            case ForgetAsk():
                self._forget(command.ask)

    def rank_report(self, rank: int, report: PartsWritten | PartsRead) -> None:
        if self._closed:
            return
        match report:
            case PartsWritten():
                self._written(rank, report)
            case PartsRead():
                self._read(rank, report)

    # ---- writing

    def _upload(self, upload: Upload) -> None:
        self._uploads[upload.op] = _Upload(upload, self._writes.opened)
        groups = tuple(GroupParts(share.hashes, share.host_pages) for share in upload.shares)
        for rank in range(self._facts.tp):
            self._send(rank, [WriteParts(upload.op, upload.salt, groups)])

    def _written(self, rank: int, report: PartsWritten) -> None:
        upload = self._uploads.get(report.op)
        self._sums.failures += bool(report.error)
        # A rank that writes nothing proves nothing, and so does one that has tried since before the store was given up.
        if any(report.parts) or (report.error and upload is not None and upload.opened == self._writes.opened):
            self._note_write(failed=bool(report.error))
        if upload is None:
            return
        if report.error:
            logger.info("rank %d could not write upload %d to storage: %s", rank, report.op, report.error)
            upload.failed = True
        upload.parts[rank] = report.parts
        if upload.discarded:
            self._delete(report.parts)
            if len(upload.parts) == self._facts.tp:
                del self._uploads[report.op]

    def _note_write(self, *, failed: bool) -> None:
        """As a call of the store: when the store is left alone, what was begun before says nothing."""
        now_s = self._clock()
        if (call := self._writes.begin(now_s)) is not None:
            self._writes.end(call, now_s, Cause.FAILED if failed else None)

    def _discard(self, op: int) -> None:
        upload = self._uploads[op]
        upload.discarded = True
        for parts in upload.parts.values():
            self._delete(parts)
        if len(upload.parts) == self._facts.tp:
            del self._uploads[op]

    def _delete(self, parts: Sequence[Sequence[PartRef]]) -> None:
        paths = [part.path for group in parts for part in group]
        if paths:
            self._start_extra(self._store.delete(paths))

    def _publish(self, op: int) -> None:
        upload = self._uploads.pop(op)
        assert len(upload.parts) == self._facts.tp and not upload.failed, f"upload {op} is not on every rank"
        self._publishing.add(op)
        self._start(self._publish_span(upload))

    async def _publish_span(self, upload: _Upload) -> None:
        command = upload.command
        answer = StorePublished(command.op, None)
        try:
            async with self._publishes:
                answer = await self._published(self._tier(command.salt), upload)
        except StoreError as error:
            logger.info("upload %d could not be published: %s", command.op, error)
        except Exception:  # whatever a store holds, the engine hears something
            logger.exception("upload %d could not be published", command.op)
        self._publishing.discard(command.op)
        self._say(answer)

    async def _published(self, tier: StorageTier, upload: _Upload) -> StorePublished:
        """What can be found now. Raises StoreError."""
        command = upload.command
        shares = [
            tier.share(g, share.page_nos, [part for parts in upload.parts.values() for part in parts[g]])
            for g, share in enumerate(command.shares)
        ]
        span = tier.span(command.start, command.parent, command.hashes, command.before, shares)
        there = await tier.publish(span)
        num_pages = sum(len(share.pages) for share in shares)
        if there == span:
            self._sums.published_pages += num_pages
        else:
            self._sums.duplicate_pages += num_pages
        return what_is_found(command.op, there, span)

    # ---- finding

    def _ask(self, ask: Ask) -> None:
        why = None if self.works else Cause.DEGRADED
        if len(self._asking) >= self._limits.asks:
            why = Cause.LATE
        self._asking.add(ask.ask)
        if why is not None:
            self._sums.misses[why] += 1
        self._start(self._answer(ask) if why is None else self._answer_nothing(ask))

    async def _answer_nothing(self, ask: Ask) -> None:
        self._asking.discard(ask.ask)
        self._say(StoreFound(ask.ask, ask.first, (), known=False))

    async def _answer(self, ask: Ask) -> None:
        """Within the deadline. Calls of the store go on, so that its breaker hears how they end."""
        tier, until_s = self._tier(ask.salt), self._clock() + self._limits.ask_s
        try:
            async with asyncio.timeout(self._limits.ask_s):
                await self._walks.acquire()
            walk = self._start(self._walk(tier, ask))
            await asyncio.wait({walk}, timeout=max(0.0, until_s - self._clock()))
            if not walk.done():
                raise TimeoutError
            found, known = walk.result()
        except TimeoutError:
            self._sums.misses[Cause.LATE] += 1
            await self._answer_nothing(ask)
            return
        self._say_found(ask, tier, found, known=known)

    async def _walk(self, tier: StorageTier, ask: Ask) -> tuple[list[Found], bool]:
        """What is found, and whether the store has said all of it. A place among the walks is taken, and given back here."""
        found: list[Found] = []
        passing = self._passing_misses()
        whole = False
        try:
            async with asyncio.timeout(WALK_S):
                found = await tier.walk(ask.hashes, ask.first)
                if not found and ask.first:  # no span begins there, but one may go through it
                    found = await tier.walk(ask.hashes)
            whole = True
        except TimeoutError:
            pass
        except Exception:  # whatever a store holds, the engine hears something
            logger.exception("storage could not be asked")
        finally:
            self._walks.release()
        return found, whole and passing == self._passing_misses()

    def _passing_misses(self) -> int:
        """Of all walks and fetches: what one of them missed for a while, another takes for unknown, too."""
        return sum(self._sums.misses[cause] for cause in PASSING)

    def _say_found(self, ask: Ask, tier: StorageTier, found: list[Found], *, known: bool) -> None:
        self._asking.discard(ask.ask)
        if not found:
            self._say(StoreFound(ask.ask, ask.first, (), known))
            return
        self._asks[ask.ask] = tier, found
        self._known_spans += len(found)
        while len(self._asks) > self._limits.known_asks or (
            self._known_spans > self._limits.known_spans and len(self._asks) > 1
        ):
            self._forget(next(iter(self._asks)))
        last = found[-1]
        page_nos = tuple(_readable(found, g) for g in range(len(self._facts.scope.groups)))
        pages = max(ask.first, last.span.start + last.pages)
        self._say(StoreFound(ask.ask, pages, page_nos, known, beyond(found)))

    def _forget(self, ask: int) -> None:
        _, found = self._asks.pop(ask, (None, []))
        self._known_spans -= len(found)

    # ---- reading

    def _fetch(self, fetch: Fetch) -> None:
        """Always sent, so that numbers go on: ranks answer with an error where nothing says what to read."""
        known, scope, tp = self._asks.get(fetch.ask), self._facts.scope, self._facts.tp
        if known is None:
            for rank in range(tp):
                self._send(rank, [ReadParts(fetch.op, "", (), fetch.places)])
            return
        tier, found = known
        reads: dict[int, tuple[PartRead, ...]] = {}
        for rank in range(tp):
            reads[rank] = tuple(
                read
                for g, places in enumerate(fetch.places)
                if places
                for read in tier.reads(found, g, [at for at, _ in places], heads_of(rank, tp, scope.groups[g]))
            )
            self._send(rank, [ReadParts(fetch.op, tier.scope.salt, reads[rank], fetch.places)])
        self._fetches[fetch.op] = _Fetch(tier, reads)
        first_hashes = {read.span.hashes[0] for each in reads.values() for read in each}
        self._start_extra(tier.note_read([each for each in found if each.span.hashes[0] in first_hashes]))

    def _read(self, rank: int, report: PartsRead) -> None:
        fetch = self._fetches.get(report.op)
        if fetch is None:
            return
        reads = fetch.reads.pop(rank, ())
        if not fetch.reads:
            del self._fetches[report.op]
        if report.error and reads:
            self._sums.failures += 1
            logger.info("rank %d could not read %d from storage: %s", rank, report.op, report.error)
            self._start_extra(self._look_again(fetch, reads))

    async def _look_again(self, fetch: _Fetch, reads: Sequence[PartRead]) -> None:
        """Finds which spans are damaged, which the tier then remembers. One after the other, so that each counts once."""
        async with self._looking:
            for read in reads:
                first_hash = read.span.hashes[0]
                if first_hash in fetch.damaged:
                    continue
                try:
                    await fetch.tier.fetch(read)
                except Missed as missed:
                    logger.warning("stored KV is not used: %s: %s", missed.cause, missed)
                    if missed.cause in PASSING:
                        return
                    fetch.damaged.add(first_hash)
                    if missed.cause is not Cause.VERSION:
                        await _without_errors(fetch.tier.remove(read.span))

    # ---- the store's state

    async def _try_store(self) -> None:
        """Whether it works again, if its breakers say that it may be tried."""
        now_s = self._clock()
        trial = self._writes.begin(now_s)
        if trial is None:
            return
        failed: Cause | None = Cause.DEGRADED
        try:
            await self._store.replace(CLOCK_PATH, [bytes(TRY_BYTES)])
            failed = None
        except StoreError as error:
            failed = error.cause
        finally:
            if failed is Cause.DEGRADED:  # it was not tried
                self._writes.give_up(trial, self._clock())
            elif failed is None:  # a disk with no room for what ranks write may have room for this
                self._writes.succeed_small(trial)
            else:
                self._writes.end(trial, self._clock(), failed)

    def _watch(self) -> None:
        works = self.works
        if works == self._said_works or self._closed:
            return
        self._said_works = works
        if works:
            logger.warning("storage works again")
        else:
            logger.error("storage fails: it is left alone, but for a trial after 1 to 30 s, until it works again")
        self._say(StoreWorks(works))

    # ---- tasks

    def _tier(self, salt: str) -> StorageTier:
        tier = self._tiers.get(salt)
        if tier is None:
            tier = self._tiers[salt] = StorageTier(
                self._store,
                replace(self._facts.scope, salt=salt),
                checkpoint_tokens=self._facts.checkpoint_tokens,
                compression=self._facts.compression,
                random=Random(),
                clock=self._clock,
            )
            tier.misses = self._sums.misses  # of all tenants together
        self._tiers.move_to_end(salt)
        forget_oldest(self._tiers, TENANTS)
        return tier

    def _say(self, event: StoreEvent) -> None:
        if not self._closed:
            self._tell(event)

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _start_extra(self, work: Coroutine[Any, Any, Any]) -> None:
        """What nobody waits for, and may be left out. A store that does not do it says so to its breaker."""
        if len(self._extra) >= self._limits.extra or self._closed:
            work.close()
            return
        self._extra.add(self._start(_without_errors(work)))

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._extra.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = self._broken or error


async def _without_errors(work: Coroutine[Any, Any, Any]) -> None:
    try:
        await work
    except StoreError as error:
        logger.debug("storage: %s", error)
    except Exception:  # nobody waits for it, and no server ends for what a store holds
        logger.exception("something was not done in storage")


def _readable(found: Sequence[Found], g: int) -> tuple[int, ...]:
    """The numbers of a group's pages that are in these spans, as far as they are the sequence's."""
    return tuple(
        sorted({at for each in found for at in each.span.shares[g].pages if at < each.span.start + each.pages})
    )
