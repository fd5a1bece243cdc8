"""Moves pieces with the kernels of staging/kernels, on a stream of their own, whose end the host polls.

    host     begin() ──> Move                 done()? no     done()? yes: ok()
    stream            [ kernel ... │verdict][mark]

Moves that are begun one right after the other overlap (staging/kernels): one begins while the last programs of the one before
it are at work. Behind a page table or a zeroing a move is ordered: it waits for all that was asked for before it.

A verdict is a number in pinned memory, which the last program of a scatter writes: to read it takes no copy, only the
mark behind it. What the host does for a move counts, for it can take as long as the move: so marks, verdicts and the memory
of page tables are used again, and nothing is timed on the device. Knows streams, marks and verdicts; nothing of how bytes
are moved.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from disagg.messages.pieces import HeadSlice, Piece
from disagg.staging.kernels import SUMS, VERDICT_OK, Launcher, launch_of
from disagg.staging.mover import PREPARED_ALIGN, Move
from disagg.staging.rows import PagedRows, PageShape
from disagg.types.arithmetic import round_up
from disagg.types.bounded import forget_oldest

UNDECIDED = 0
TABLE_IDS = 1 << 16  # of page tables that lie side by side
LINE_IDS = 16  # of a line of the device's caches, of 128 bytes
RECENT_TABLES = 8  # are looked up before another like them is made
FIRST_BLOCKS = 4  # of memory for them: to make one takes the host milliseconds
VERDICTS = 256  # are made at a time; there are as many as scatters were ever under way at once


class Mark(Protocol):
    """A place in a queue's work."""

    def query(self) -> bool:
        """Whether all work before it is done."""


class Queue(Protocol):
    """A stream of a device, on which its thread works from when it was made."""

    @property
    def handle(self) -> int:
        """The stream, as the driver knows it."""

    def mark(self) -> Mark:
        """After all that was asked for so far."""

    def reuse(self, mark: Any) -> None:
        """Nobody asks this mark any more."""

    def host(self, values: Sequence[int]) -> torch.Tensor:
        """[n] int64 on the host, where the device can read and write it."""


class CudaQueue:
    """A stream that waits for no other, not even the default one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._free: list[torch.cuda.Event] = []
        torch.cuda.set_stream(self._stream)

    @property
    def handle(self) -> int:
        return int(self._stream.cuda_stream)

    def mark(self) -> Mark:
        event = self._free.pop() if self._free else torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def reuse(self, mark: Any) -> None:
        self._free.append(mark)

    def host(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, pin_memory=True)


class _Block:
    """Memory of page tables that lie side by side, on the host and on the device."""

    __slots__ = ("here", "live", "numbers", "there", "unread", "used")

    def __init__(self, count: int, queue: Queue, device: torch.device) -> None:
        self.here = queue.host([0] * count)
        self.numbers = self.here.numpy()
        self.there = torch.empty(count, dtype=torch.int64, device=device)
        self.used = 0
        self.live = 0  # tables that somebody holds
        self.unread: Mark | None = None  # where the queue is through with what it was asked while tables here were held

    def left(self) -> int:
        return len(self.numbers) - self.used


class _PageTables:
    """Page tables, copied from the host to the device one by one, into memory that is used again.

    A table is held until the last move that reads it was asked of the queue. When no table of a block is held any more, and
    the queue is through with all that it had been asked by then, the block is free. Pieces that are cut by layers have the
    same pages soon after one another, and share a table.

    Each begins with a line of the caches: kernels that read the one before it have not loaded any of it before it was there.
    """

    def __init__(self, queue: Queue, device: torch.device) -> None:
        self._queue = queue
        self._device = device
        self._free = [_Block(TABLE_IDS, queue, device) for _ in range(FIRST_BLOCKS)]
        self._block = self._free.pop()
        self._held: dict[weakref.ref[torch.Tensor], _Block] = {}
        self._recent: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()  # oldest first

    def find(self, page_ids: tuple[int, ...]) -> torch.Tensor | None:
        """[n] int64 on the device, if such a table was made lately."""
        return self._recent.get(page_ids)

    def make(self, page_ids: tuple[int, ...]) -> torch.Tensor:
        """[n] int64 on the device, in place before what is asked of the queue from now on."""
        forget_oldest(self._recent, RECENT_TABLES - 1)
        if self._block.left() < len(page_ids):
            self._next_block(len(page_ids))
        block = self._block
        where = slice(block.used, block.used + len(page_ids))
        block.used = round_up(where.stop, LINE_IDS)
        block.numbers[where] = page_ids
        table = block.there[where].copy_(block.here[where], non_blocking=True)
        block.live += 1
        self._held[weakref.ref(table, self._let_go)] = block
        self._recent[page_ids] = table
        return table

    def _next_block(self, count: int) -> None:
        if not self._block.live:
            self._give_back(self._block)
        for block in self._free:
            if block.left() >= count and self._is_unread(block):
                self._free.remove(block)
                break
        else:
            block = _Block(max(TABLE_IDS, count), self._queue, self._device)
        self._block = block

    def _is_unread(self, block: _Block) -> bool:
        if block.unread is not None and block.unread.query():
            self._queue.reuse(block.unread)
            block.unread = None
        return block.unread is None

    def _let_go(self, table: weakref.ref[torch.Tensor]) -> None:
        block = self._held.pop(table)
        block.live -= 1
        if not block.live and block is not self._block:
            self._give_back(block)

    def _give_back(self, block: _Block) -> None:
        block.used = 0
        block.unread = self._queue.mark()
        self._free.append(block)


class _Verdict:
    """A number that a scatter writes and the host reads. where: [1] int64, as the kernel takes it."""

    __slots__ = ("_numbers", "where")

    def __init__(self, where: torch.Tensor) -> None:
        self.where = where
        self._numbers = where.numpy()  # the same memory, at a tenth of what a tensor's element costs

    def read(self) -> int:
        """What was written; from here on it is undecided again."""
        number = int(self._numbers[0])
        self._numbers[0] = UNDECIDED
        return number


class _Verdicts:
    """Each is lent to one scatter at a time."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._free: list[_Verdict] = []

    def take(self) -> _Verdict:
        if not self._free:
            numbers = self._queue.host([UNDECIDED] * VERDICTS)
            self._free = [_Verdict(numbers[i : i + 1]) for i in range(VERDICTS)]
        return self._free.pop()

    def give_back(self, verdict: _Verdict) -> None:
        self._free.append(verdict)


class _QueuedMove:
    """A move on a queue. verdict: of a scatter; like the mark it is given back as soon as it was read."""

    def __init__(self, nbytes: int, queue: Queue, verdicts: _Verdicts, verdict: _Verdict | None) -> None:
        """When it has been asked of the queue."""
        self._nbytes = nbytes
        self._queue = queue
        self._end = queue.mark()
        self._verdicts = verdicts
        self._verdict = verdict
        self._begun_s = time.perf_counter()
        self._took_s = 0.0
        self._done = False
        self._ok = True

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def done(self) -> bool:
        if not self._done and self._end.query():
            self._done = True
            self._took_s = time.perf_counter() - self._begun_s
            self._queue.reuse(self._end)
            if self._verdict is not None:
                number = self._verdict.read()
                assert number != UNDECIDED, "a scatter ended without a verdict"
                self._ok = number == VERDICT_OK
                self._verdicts.give_back(self._verdict)
        return self._done

    def ok(self) -> bool:
        assert self._done, "the move is under way"
        return self._ok

    def seconds(self) -> float:
        assert self._done, "the move is under way"
        return self._took_s


class TritonMover:
    """See mover.Mover."""

    def __init__(self, device: torch.device, queue: Queue) -> None:
        self._device = device
        self._queue = queue
        self._launcher = Launcher(queue.handle)
        self._tables = _PageTables(queue, device)
        self._verdicts = _Verdicts(queue)
        self._sums = torch.zeros(SUMS, dtype=torch.int64, device=device)
        self._ordered = True  # whether the next launch is: something else was asked for since the last one

    def pages(self, page_ids: Sequence[int]) -> torch.Tensor:
        ids = tuple(page_ids)
        table = self._tables.find(ids)
        if table is None:
            table = self._tables.make(ids)
            self._ordered = True
        return table

    def prepare(self, pool: torch.Tensor, shape: PageShape, staging: torch.Tensor) -> None:
        rows = PagedRows(pool, self.pages([0]), shape, Piece(0, 0, 1, 0, 1), HeadSlice(0, 0, 0, 0, 1), seed=0)
        for verdict in (None, self._sums):
            self._launcher.bind(launch_of(rows, staging, self._sums, verdict))

    def prepare_gather(self, rows: PagedRows, out: torch.Tensor) -> Callable[[torch.Tensor], Move]:
        launch = self._launcher.bind(launch_of(rows, out, self._sums, None))
        nbytes, address = rows.staged_bytes, out.data_ptr()

        def begin(into: torch.Tensor) -> Move:
            assert (into.data_ptr() - address) % PREPARED_ALIGN == 0, "prepared for memory aligned otherwise"
            launch(into, self._sums, self._takes_order())
            return _QueuedMove(nbytes, self._queue, self._verdicts, None)

        return begin

    def prepare_scatter(self, rows: PagedRows, staging: torch.Tensor) -> Callable[[], Move]:
        launch = self._launcher.bind(launch_of(rows, staging, self._sums, self._sums))
        nbytes = rows.staged_bytes

        def begin() -> Move:
            verdict = self._verdicts.take()
            launch(staging, verdict.where, self._takes_order())
            return _QueuedMove(nbytes, self._queue, self._verdicts, verdict)

        return begin

    def zero(self, pool: torch.Tensor, page_ids: torch.Tensor) -> Move:
        self._ordered = True
        pool.index_fill_(0, page_ids, 0)
        return _QueuedMove(0, self._queue, self._verdicts, None)

    def _takes_order(self) -> bool:
        """Whether the launch that begins now is ordered; those behind it need not be."""
        ordered, self._ordered = self._ordered, False
        return ordered
