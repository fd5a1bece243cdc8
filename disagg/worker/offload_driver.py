"""A rank's offload: copies between the GPU and the host on one thread, storage on another, so that neither delays the other.

    transfer thread ── handle ──┬──> thread "copies"    copies, in their order               ──┐
            ^                   └──> thread "offload"   a loop: writes and reads, overlapping ──┤
            └───────── take_reports, when woken <─── reports, of each kind in their order <─────┘

The engine decides. A command that names what is not there is a ProtocolError, before anything is done; what a store does
is in the report. Knows pages, parts and threads; nothing of sockets or requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from disagg.messages.control import OffloadOpen, OpenOffload
from disagg.messages.stored import HASH_BYTES, MAX_PAGES, PartRead
from disagg.messages.tiers import (
    CopiedIn,
    CopiedOut,
    CopyIn,
    CopyOut,
    PageMove,
    PartsRead,
    PartsWritten,
    ReadParts,
    TierCommand,
    TierEvent,
    WriteParts,
)
from disagg.models.pool import Pool
from disagg.offload.units import heads_of
from disagg.types.errors import ConfigError, ProtocolError
from disagg.worker.host_memory import HostMemory, allocate_host
from disagg.worker.page_copies import AT_ONCE, by_group, open_copier

if TYPE_CHECKING:
    from disagg.offload.store import ObjectStore
    from disagg.worker.rank_storage import RankStorage

logger = logging.getLogger(__name__)

MAX_MOVES = 1 << 17  # of a copy
MAX_READS = 1 << 16
BYTES_THREADS = 4  # that cut, compress, verify and join
END_S = 1.0  # for what is cancelled to end

NO_STORAGE = "there is no storage: storage.url is empty"


class Commands:
    """Checks commands against the pools. Every method raises ProtocolError."""

    def __init__(self, rank: int, tp: int, opened: OpenOffload, pool: Pool, host: HostMemory) -> None:
        self._groups = range(len(pool.groups))
        self._gpu_pages = [view.num_pages for view in pool.views]
        self._host_pages = [host.num_pages(g) for g in self._groups]
        self._heads = [heads_of(rank, tp, group) for group in opened.groups]
        self._last: dict[type[TierCommand], int] = {}

    def check(self, command: TierCommand) -> None:
        kind = type(command)
        if command.op <= self._last.get(kind, -1):
            raise ProtocolError(f"{kind.__name__} {command.op} came after {self._last[kind]}")
        self._last[kind] = command.op
        match command:
            case CopyOut() | CopyIn():
                self._moves(command.moves, "host_page" if isinstance(command, CopyOut) else "gpu_page")
            case WriteParts():
                self._by_group(command.groups)
                for g, group in enumerate(command.groups):
                    if len(group.hashes) != len(group.host_pages) or len(group.hashes) > MAX_PAGES:
                        raise ProtocolError(f"{len(group.hashes)} names for {len(group.host_pages)} pages of group {g}")
                    if any(len(each) != HASH_BYTES for each in group.hashes):
                        raise ProtocolError(f"a name of a page of group {g} is not of {HASH_BYTES} bytes")
                    for page in group.host_pages:
                        self._host_page(g, page)
            case ReadParts():
                self._by_group(command.places)
                for g, places in enumerate(command.places):
                    self._places(g, places)
                if len(command.reads) > MAX_READS:
                    raise ProtocolError(f"{len(command.reads)} parts; at most {MAX_READS} are read at once")
                for read in command.reads:
                    self._read(read)

    def _moves(self, moves: Sequence[PageMove], target: str) -> None:
        if len(moves) > MAX_MOVES:
            raise ProtocolError(f"{len(moves)} pages; at most {MAX_MOVES} are copied at once")
        for move in moves:
            self._group(move.group)
            if not 0 <= move.gpu_page < self._gpu_pages[move.group]:
                raise ProtocolError(f"{move}: group {move.group} has {self._gpu_pages[move.group]} pages on the device")
            self._host_page(move.group, move.host_page)
        if len({(move.group, getattr(move, target)) for move in moves}) != len(moves):
            raise ProtocolError("two pages are copied to one place")

    def _by_group(self, by_group: Sequence[object]) -> None:
        if len(by_group) != len(self._groups):
            raise ProtocolError(f"something of {len(by_group)} groups; there are {len(self._groups)}")

    def _group(self, g: int) -> None:
        if g not in self._groups:
            raise ProtocolError(f"group {g}; there are {len(self._groups)}")

    def _host_page(self, g: int, page: int) -> None:
        if not 0 <= page < self._host_pages[g]:
            raise ProtocolError(f"page {page} of the host; group {g} has {self._host_pages[g]} there")

    def _places(self, g: int, places: Sequence[tuple[int, int]]) -> None:
        for _, page in places:
            self._host_page(g, page)
        if not len(places) == len({at for at, _ in places}) == len({page for _, page in places}):
            raise ProtocolError(f"a page number or a page of group {g} is named twice")

    def _read(self, read: PartRead) -> None:
        self._group(read.group)
        if len(read.span.shares) != len(self._groups):
            raise ProtocolError(f"a span of {len(read.span.shares)} groups; there are {len(self._groups)}")
        held, ref = self._heads[read.group], read.ref
        start, stop = max(held.start, ref.head_start), min(held.stop, ref.head_stop)
        if not start <= read.head_start < read.head_stop <= stop:
            raise ProtocolError(
                f"heads {read.head_start} to {read.head_stop - 1}, of {start} to {stop - 1}, are to be read"
            )


class Begun(NamedTuple):
    """A copy that is under way."""

    command: CopyOut | CopyIn
    wait: Callable[[], None]
    nbytes: int
    started_s: float


class OffloadDriver:
    """`handle` commands, and `take_reports` when `wake` was called. `close`, then `join`. handle and take_reports belong to
    one thread; wake is called by others.
    """

    def __init__(
        self,
        rank: int,
        tp: int,
        opened: OpenOffload,
        pool: Pool,
        wake: Callable[[], object],
        store: ObjectStore | None = None,
    ) -> None:
        """store: instead of the one at opened.url. Raises ConfigError. May take seconds: memory is locked, ways to copy are
        measured, and nobody else may use the pool.
        """
        if opened.num_large < 1:
            raise ConfigError(f"a host pool of {opened.num_large} large pages; it must have one at least")
        # What leaves a window is kept or not (engine.keep_windows): the pool is the same.
        kept = [group.on_rank(tp).keeping_all() for group in opened.groups]
        assert kept == [group.keeping_all() for group in pool.groups], "the model's groups are not those of the pool"
        strides = tuple(view.bytes.stride(0) for view in pool.views)
        assert opened.strides == strides, f"pages {opened.strides} bytes apart; those of the pool are {strides}"
        storage = allocate_host(opened.num_large * opened.large_bytes, pinned=pool.device.type == "cuda")
        self._host = HostMemory(pool.groups, storage, opened.strides, opened.page_tokens)
        self._rank = rank
        self._device = pool.device
        self._copier, self._how = open_copier(opened.copy, pool, self._host)
        self._commands = Commands(rank, tp, opened, pool, self._host)
        self._wake = wake
        self._reports: queue.SimpleQueue[TierEvent] = queue.SimpleQueue()
        self._failure = ""
        self._copies: queue.SimpleQueue[CopyOut | CopyIn | None] = queue.SimpleQueue()
        self._copied = 0
        self._copied_at_s = 0.0  # when the last of them was over
        self._storage = self._open_storage(tp, opened, store)
        self._copying = threading.Thread(target=self._copy_all, name="copies", daemon=True)
        self._copying.start()

    def _open_storage(self, tp: int, opened: OpenOffload, store: ObjectStore | None) -> StorageThread | None:
        if not opened.url and store is None:
            return None
        from disagg.offload.breaker import Breaker
        from disagg.offload.store import open_store
        from disagg.worker.rank_storage import RankStorage

        # The server decides whether the store is left alone, from what ranks report, too. A rank with a mind of its own would
        # refuse, when the store is back, all but one of what it is told to do.
        store = store or open_store(opened.url, opened.options, breaker=Breaker(failures=math.inf))
        return StorageThread(RankStorage(self._rank, tp, opened, self._host, store), self._report, self._fail)

    def opened(self) -> OffloadOpen:
        return OffloadOpen(self._rank, self._host.bytes.numel(), self._how)

    def handle(self, command: TierCommand) -> None:
        """Returns at once. Raises ProtocolError for what cannot be meant."""
        self._commands.check(command)
        match command:
            case CopyOut() | CopyIn():
                self._copies.put(command)
            case _ if self._storage is not None:
                self._storage.begin(command)
            case WriteParts():
                self._report(PartsWritten(command.op, NO_STORAGE, tuple(() for _ in command.groups), 0, 0.0))
            case ReadParts():
                self._report(PartsRead(command.op, NO_STORAGE, 0, 0.0))

    def take_reports(self) -> list[TierEvent]:
        """Raises RuntimeError if a thread could not go on."""
        if self._failure:
            raise RuntimeError(self._failure)
        reports = []
        while not self._reports.empty():
            reports.append(self._reports.get())
        return reports

    def describe(self) -> str:
        """For a dump."""
        storage = self._storage.describe() if self._storage is not None else "no storage"
        return (
            f"{self._how}, {self._copied} copies made, {self._copies.qsize()} waiting; host pool of "
            f"{self._host.bytes.numel()} bytes; {storage}"
        )

    def close(self) -> None:
        """Let the threads end, whatever is under way. Returns at once."""
        self._copies.put(None)
        if self._storage is not None:
            self._storage.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads to end, so long for both together."""
        deadline_s = time.monotonic() + timeout_s
        self._copying.join(timeout_s)
        if self._storage is not None:
            self._storage.join(max(0.0, deadline_s - time.monotonic()))

    # ---- other threads

    def _report(self, report: TierEvent) -> None:
        self._reports.put(report)
        self._wake()

    def _fail(self, why: str) -> None:
        self._failure = why
        self._wake()

    def _copy_all(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._copy_in_order()
        except Exception as error:  # a copy has no report that says so: the workers end
            logger.exception("copies cannot go on")
            self._fail(f"copies: {type(error).__name__}: {error}")

    def _copy_in_order(self) -> None:
        """Until there is None to do. The next copy begins before the one before it is waited for."""
        begun: deque[Begun] = deque()
        closing = False
        while begun or not closing:
            if not closing and len(begun) < AT_ONCE and (not begun or not self._copies.empty()):
                command = self._copies.get()
                if command is None:
                    closing = True
                else:
                    begun.append(self._begin_copy(command))
                continue
            self._report(self._end_copy(begun.popleft()))
            self._copied += 1

    def _begin_copy(self, command: CopyOut | CopyIn) -> Begun:
        started_s = time.perf_counter()
        moves = by_group(command.moves)
        nbytes = sum(len(each.pool) * self._host.page_bytes[each.group] for each in moves)
        wait = self._copier.begin(moves, out=isinstance(command, CopyOut))
        return Begun(command, wait, nbytes, started_s)

    def _end_copy(self, begun: Begun) -> TierEvent:
        """The time that it took is its own: without what it waited for the one before it."""
        begun.wait()
        now_s = time.perf_counter()
        seconds = now_s - max(begun.started_s, self._copied_at_s)
        self._copied_at_s = now_s
        kind = CopiedOut if isinstance(begun.command, CopyOut) else CopiedIn
        return kind(begun.command.op, begun.nbytes, seconds)


class StorageThread:
    """The thread "offload": a loop that writes and reads, and reports in the order of the operations."""

    def __init__(self, storage: RankStorage, report: Callable[[TierEvent], None], fail: Callable[[str], None]) -> None:
        self._storage = storage
        self._report = report
        self._fail = fail
        self._loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(BYTES_THREADS, thread_name_prefix="offload-bytes")
        self._loop.set_default_executor(self._threads)
        self._under_way: dict[type[TierCommand], deque[asyncio.Task[Any]]] = {WriteParts: deque(), ReadParts: deque()}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="offload", daemon=True)
        self._thread.start()

    def begin(self, command: WriteParts | ReadParts) -> None:
        """By another thread. Nothing is begun once it is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._begin, command)

    def describe(self) -> str:
        writes, reads = (len(each) for each in self._under_way.values())
        return f"{writes} writes and {reads} reads under way, {self._storage.describe()}"

    def close(self) -> None:
        """By another thread. Returns at once."""
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._loop.stop)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # ---- the thread itself

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._closing = True
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left, timeout=END_S))
        except Exception as error:  # not an operation's: it would have reported it
            logger.exception("the offload thread cannot go on")
            self._fail(f"offload thread: {type(error).__name__}: {error}")
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._loop.close()

    def _begin(self, command: WriteParts | ReadParts) -> None:
        work: Coroutine[Any, Any, TierEvent] = (
            self._storage.write(command) if isinstance(command, WriteParts) else self._storage.read(command)
        )
        task = self._loop.create_task(work)
        under_way = self._under_way[type(command)]
        under_way.append(task)
        task.add_done_callback(lambda _: self._settle(under_way))

    def _settle(self, under_way: deque[asyncio.Task[Any]]) -> None:
        """Report what is done, and what was begun before it."""
        while under_way and under_way[0].done() and not self._closing:
            task = under_way.popleft()
            if task.cancelled() or task.exception() is not None:
                self._fail(f"offload thread: an operation ended without a report: {task!r}")
            else:
                self._report(task.result())
