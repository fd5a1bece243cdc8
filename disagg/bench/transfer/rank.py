"""`python -m disagg.bench.transfer.rank`: one rank of a measured transfer (`trial`). Started by `disagg bench transfer`.

Has what a worker has for transfers: a pool, a transfer driver, a thread that polls it. It computes no model, so the thread
polls without naps. Talks over an inherited socket; how far each decode rank's ring is free stands in shared memory, where
a cluster's engines would say it over the link.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from disagg.bench.transfer import trial
from disagg.bench.transfer.unstaged import UnstagedAgent
from disagg.messages.transfer import (
    Bound,
    Landing,
    PeerAdded,
    PeerWired,
    PieceFailed,
    PieceSent,
    TransferEvent,
    Unbind,
    Unbound,
)
from disagg.models.pool import Pool
from disagg.staging.ring import RingAllocator, RingEntry, RingWriterView
from disagg.telemetry.memory import keep_loaded
from disagg.telemetry.process import die_with_parent
from disagg.transfer.backends.base import BackendError
from disagg.transfer.backends.memory import allocate
from disagg.types.errors import ConfigError, DisaggError
from disagg.worker.transfer_driver import TransferDriver

Report = TypeVar("Report", bound=TransferEvent)

POLL_IDLE_S = 0.0002
COPY_WARM_UPS = 3
POISON = 0xA5
EARLY_S = 0.00005  # before a trial starts its plan is said to be computed, and nothing looks until it starts


class Rank:
    """Obeys the coordinator, command by command, and polls the driver meanwhile."""

    def __init__(self, connection: Connection, watermarks: memoryview) -> None:
        """watermarks: int64, by decode rank."""
        self._connection = connection
        self._watermarks = watermarks
        self._opened: trial.Open | None = None
        self._pool: Pool | None = None
        self._driver: TransferDriver | None = None
        self._unstaged: UnstagedAgent | None = None
        self._ways: dict[str, None] = {}

    def run(self) -> None:
        """Until Quit, or until the coordinator is gone."""
        gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        self._answer(trial.Hello(gpus))
        while True:
            if self._connection.poll(POLL_IDLE_S):
                try:
                    command = trial.decode_command(self._connection.recv_bytes())
                except EOFError:
                    return
                if isinstance(command, trial.Quit):
                    if self._driver is not None:
                        self._driver.close()
                    if self._unstaged is not None:
                        self._unstaged.close()
                    return
                try:
                    self._answer(self._do(command))
                except (DisaggError, BackendError) as error:
                    self._answer(trial.Failed(str(error), refused=isinstance(error, ConfigError)))
                except (RuntimeError, ValueError, AssertionError, OSError) as error:
                    self._answer(trial.Failed(f"{type(error).__name__}: {error}"))
            if self._driver is not None:
                self._driver.turn()
                self._check_peers()
            if self._unstaged is not None:
                self._unstaged.poll()

    def _answer(self, answer: trial.Answer) -> None:
        self._connection.send_bytes(trial.encode(answer))

    def _do(self, command: trial.Command) -> trial.Answer:
        match command:
            case trial.Open():
                return self._open(command)
            case trial.Meet():
                return self._meet(command)
            case trial.Fill():
                self._fill(command)
                return trial.Done()
            case trial.Receive():
                return self._receive(command)
            case trial.Send():
                return self._send(command)
            case trial.ReceiveUnstaged():
                assert self._unstaged is not None
                self._answer(trial.Done())
                self._unstaged.wait(command.writes, command.deadline_s)
                return trial.Received(time.monotonic(), ())
            case trial.SendUnstaged():
                assert self._unstaged is not None
                _sleep_until(command.start_s)
                self._unstaged.send(command)
                return trial.Sent((trial.Interval("wire", command.start_s, time.monotonic()),))
            case trial.Check():
                return trial.Checked(self._wrong_pages(command))
            case trial.CopyAlong():
                return trial.Copied(_copy_along(command.routes, command.repeats, command.pause_s))
            case _:
                raise ValueError(f"{type(command).__name__} is no command for a rank")

    # ---- setting up

    def _open(self, command: trial.Open) -> trial.Opened:
        torch.set_num_threads(1)
        device = torch.device(command.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        page_bytes = command.group.page_bytes(command.page_tokens)
        storage = allocate(command.num_pages * page_bytes, device)
        generator = torch.Generator(device).manual_seed(command.rank + 1)
        storage.random_(generator=generator)
        pool = Pool((command.group,), storage, page_bytes, (page_bytes,), command.page_tokens)
        self._opened, self._pool = command, pool
        self._driver = TransferDriver(command.rank, command.transfer, pool)
        unstaged = None
        if command.unstaged:
            transfer = command.transfer
            name = f"{transfer.incarnation}/{command.rank}/unstaged"
            self._unstaged = UnstagedAgent(name, transfer.ucx_tls, transfer.ucx_net_devices, pool)
            unstaged = self._unstaged.describe(command.rank)
        keep_loaded()  # as a worker does
        return trial.Opened(self._driver.opened(os.getpid()), unstaged)

    def _meet(self, command: trial.Meet) -> trial.Answer:
        assert self._driver is not None
        for peer in command.peers:
            self._driver.handle(peer)
        self._check_peers()
        for other in command.unstaged:
            assert self._unstaged is not None
            self._unstaged.meet(other)
        return trial.Done()

    def _check_peers(self) -> None:
        """Take what a driver reports between trials: raises DisaggError for a peer that was lost."""
        assert self._driver is not None
        for report in self._driver.take_events():
            if isinstance(report, PeerAdded) and report.error:
                raise DisaggError(report.error)
            self._note(report)

    def _note(self, report: TransferEvent) -> None:
        if isinstance(report, PeerWired):
            self._ways.update(dict.fromkeys(report.ways))

    # ---- content

    def _rows(self) -> torch.Tensor:
        """The pool's pages: [pages, layers, planes, heads, page_tokens, bytes of a row]."""
        assert self._opened is not None
        assert self._pool is not None
        group, page_tokens = self._opened.group, self._opened.page_tokens
        row_bytes = group.head_dim * group.dtype_bytes
        pages = self._pool.views[0].bytes
        sizes = (len(group.layers), group.planes, group.kv_heads, page_tokens, row_bytes)
        return pages.view(len(pages), *sizes)

    def _content(self, seed: int, head: int, num_pages: int) -> torch.Tensor:
        """What the sequence's pages hold of one of this rank's heads: the same on both sides, and never zeros."""
        assert self._opened is not None
        rows = self._rows()
        generator = torch.Generator(rows.device).manual_seed(seed * 4096 + self._opened.first_head + head)
        content = torch.empty((num_pages, *rows.shape[1:3], *rows.shape[4:]), dtype=torch.uint8, device=rows.device)
        return content.random_(generator=generator)

    def _fill(self, command: trial.Fill) -> None:
        assert self._opened is not None
        rows = self._rows()
        pages = torch.tensor(command.pages, device=rows.device)
        if self._opened.side == "decode":
            rows.index_fill_(0, pages, POISON)
        else:
            for head in range(self._opened.group.kv_heads):
                rows[:, :, :, head].index_copy_(0, pages, self._content(command.seed, head, len(pages)))
        _settle(rows.device)

    def _wrong_pages(self, command: trial.Check) -> int:
        """How many pages are not what was sent, in any of this rank's heads."""
        assert self._opened is not None
        rows = self._rows()
        pages = torch.tensor(command.pages, device=rows.device)
        wrong = torch.zeros(len(pages), dtype=torch.bool, device=rows.device)
        for head in range(self._opened.group.kv_heads):
            landed = rows[:, :, :, head].index_select(0, pages)
            differs = landed != self._content(command.seed, head, len(pages))
            differs[-1, :, :, (command.num_tokens - 1) % self._opened.page_tokens + 1 :] = False  # past the end
            wrong |= differs.flatten(1).any(1)
        return int(wrong.sum())

    # ---- moving

    def _receive(self, command: trial.Receive) -> trial.Answer:
        driver, opened = self._driver, self._opened
        assert driver is not None
        assert opened is not None
        ring = RingAllocator(command.capacity_bytes, command.segment_bytes)
        entries: dict[int, RingEntry] = {}
        for expected, ring_byte in zip(command.entries, command.ring_bytes, strict=True):
            entries[expected.entry_id] = ring.assign(expected.nbytes)
            assert entries[expected.entry_id].ring_byte == ring_byte
        self._watermarks[opened.rank] = 0
        driver.handle(command.bind)
        for expected in command.entries:
            driver.handle(expected)
        while not _take(driver, self._note, Bound, command.deadline_s):
            pass
        self._answer(trial.Done())
        intervals: list[trial.Interval] = []
        landed_s = 0.0
        while entries:
            for landing in _take(driver, self._note, Landing, command.deadline_s):
                landed_s = time.monotonic()
                if not landing.ok:
                    raise DisaggError(f"a piece did not land: {landing.reason}")
                intervals.append(trial.Interval("scatter", landed_s - landing.scatter_s, landed_s))
                ring.free(entries.pop(landing.entry_id))
                self._watermarks[opened.rank] = ring.watermark
        driver.handle(Unbind(command.bind.key))
        while not _take(driver, self._note, Unbound, command.deadline_s):
            pass
        return trial.Received(landed_s, tuple(intervals))

    def _send(self, command: trial.Send) -> trial.Answer:
        driver = self._driver
        assert driver is not None
        views: dict[int, RingWriterView] = {}
        queues: dict[int, deque[tuple[int, int]]] = {}  # by decode rank: (index, ring_byte)
        for index, (piece, ring_byte) in enumerate(zip(command.pieces, command.ring_bytes, strict=True)):
            rank = piece.slice.head_slice.dst_rank
            views.setdefault(rank, RingWriterView(command.capacity_bytes))
            queues.setdefault(rank, deque()).append((index, ring_byte))
        intervals: list[trial.Interval] = []

        def hand_over() -> None:
            for rank, queue in queues.items():
                view = views[rank]
                view.update(self._watermarks[rank])
                while queue and view.may_write(RingEntry(queue[0][1], command.pieces[queue[0][0]].nbytes)):
                    driver.handle(command.pieces[queue.popleft()[0]])

        def send_all(left: int) -> None:
            while left:
                hand_over()
                for sent in _take(driver, self._note, PieceSent, command.deadline_s):
                    done_s = time.monotonic()
                    posted_s = done_s - sent.wire_s
                    intervals.append(trial.Interval("gather", posted_s - sent.gather_s, posted_s))
                    intervals.append(trial.Interval("wire", posted_s, done_s))
                    left -= 1

        hand_over()
        driver.plan_computed(command.plan_no - 1)
        send_all(command.lead)
        intervals.clear()
        self._answer(trial.Done())
        start_s = self._hear_start(command.deadline_s)
        while time.monotonic() < start_s - EARLY_S:
            driver.turn()
        # As a worker says of the last layer, when it has launched it and not when it ends.
        driver.plan_computed(command.plan_no)
        _sleep_until(start_s)
        send_all(len(command.pieces) - command.lead)
        return trial.Sent(tuple(intervals), tuple(self._ways))

    def _hear_start(self, deadline_s: float) -> float:
        """Polls the driver meanwhile. Raises TimeoutError."""
        assert self._driver is not None
        while not self._connection.poll(0):
            self._driver.turn()
            if time.monotonic() > deadline_s:
                raise TimeoutError("nobody said in time when to start")
        start = trial.decode_command(self._connection.recv_bytes())
        assert isinstance(start, trial.Start), f"{type(start).__name__} came instead of Start"
        return start.start_s


def _take(
    driver: TransferDriver, note: Callable[[TransferEvent], None], kind: type[Report], deadline_s: float
) -> list[Report]:
    """One turn: its reports of one kind; all are noted. Raises DisaggError for a failed write, TimeoutError past the deadline."""
    driver.turn()
    wanted: list[Report] = []
    for report in driver.take_events():
        if isinstance(report, PieceFailed):
            raise DisaggError(f"a piece was not written: {report.reason}")
        note(report)
        if isinstance(report, kind):
            wanted.append(report)
    if not wanted:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no {kind.__name__} came in time; {driver.describe()}")
        os.sched_yield()  # more ranks than cores: let the other side run
    return wanted


def _sleep_until(start_s: float) -> None:
    while time.monotonic() < start_s:
        pass


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copy_along(along: tuple[tuple[str, str, int], ...], repeats: int, pause_s: float) -> tuple[float, ...]:
    """Seconds of each of `repeats` rounds, in which every route copies once, all at the same time, each after a pause."""
    buffers = []
    for src, dst, nbytes in along:
        source = torch.empty(nbytes, dtype=torch.uint8, device=src).random_()
        buffers.append((source, torch.empty(nbytes, dtype=torch.uint8, device=dst)))
    devices = {tensor.device for pair in buffers for tensor in pair}
    streams = [
        torch.cuda.Stream(source.device) if source.is_cuda else None  # type: ignore[no-untyped-call]
        for source, _ in buffers
    ]
    seconds = []
    for _ in range(COPY_WARM_UPS + repeats):
        for device in devices:
            _settle(device)
        _sleep_until(time.monotonic() + pause_s)
        started = time.perf_counter()
        for (source, target), stream in zip(buffers, streams, strict=True):
            if stream is None:
                target.copy_(source)
            else:
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        for device in devices:
            _settle(device)
        seconds.append(time.perf_counter() - started)
    return tuple(seconds[COPY_WARM_UPS:])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m disagg.bench.transfer.rank", description=__doc__)
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--shared-fd", type=int, required=True, help="watermarks, int64 by decode rank")
    parser.add_argument("--parent", type=int, required=True, help="pid of the coordinator")
    args = parser.parse_args()
    die_with_parent(args.parent)
    with mmap.mmap(args.shared_fd, 0) as shared, memoryview(shared).cast("q") as watermarks:
        Rank(Connection(args.socket_fd), watermarks).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
