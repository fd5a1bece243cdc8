"""Copies lists of pages between a rank's pool and its host pool, in the way that is fastest on this machine.

    plain     memcpy by the CPU: both pools are in the machine's memory
    memcpy    one asynchronous copy for each extent: pages that lie side by side in both pools
    kernel    one launch for all pages of a group (worker/kernels)

The last two work on a stream of their own, which waits for nothing: what is copied out was computed by plans that have been
reported, and what is copied in is named by no plan before the copy is. Copies on it follow each other in the order in which
they are begun, so one may begin before the one before it is waited for: then the device never waits for the host.

    host      sort 0, launch 0 │ sort 1, launch 1 │ wait 0 │ sort 2, launch 2 │ wait 1
    device               copy 0 ──────────────────│ copy 1 ────────────────────│ copy 2

Knows pages and bytes; nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from disagg.messages.tiers import PageMove
from disagg.models.pool import Pool
from disagg.types.errors import ConfigError
from disagg.worker.host_memory import HostMemory

Ids = npt.NDArray[np.int64]
Copy = Literal["auto", "kernel", "memcpy"]

AT_ONCE = 2  # copies that are begun and not waited for
TABLE_MOVES = 4096  # for which a kernel's table has room at first; it grows with the largest copy
MEASURED_PAGES = 256
MEASURED_BYTES = 256 << 20
WARM_UPS, ROUNDS = 2, 5


class GroupMoves(NamedTuple):
    """Pages of one group, [n] each: one of the pool and one of the host pool."""

    group: int
    pool: Ids
    host: Ids


class Extent(NamedTuple):
    """`length` pages that follow each other in both pools."""

    pool: int
    host: int
    length: int


class Copier(Protocol):
    """A way to copy. One thread uses it at a time."""

    def begin(self, moves: Sequence[GroupMoves], *, out: bool) -> Callable[[], None]:
        """What is returned is to be called once, and returns when every byte is where it belongs: in the order in which copies
        began, and before AT_ONCE more do. out: from the pool to the host, else the other way.
        """


def copy_whole(copier: Copier, moves: Sequence[GroupMoves], *, out: bool) -> None:
    """From its beginning to its end."""
    copier.begin(moves, out=out)()


def by_group(moves: Iterable[PageMove]) -> list[GroupMoves]:
    """In the order of the pool's pages."""
    table = np.array([(move.group, move.gpu_page, move.host_page) for move in moves], dtype=np.int64).reshape(-1, 3)
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    cuts = np.flatnonzero(np.diff(table[:, 0])) + 1
    parts = np.split(table, cuts) if len(table) else []
    return [
        GroupMoves(int(part[0, 0]), np.ascontiguousarray(part[:, 1]), np.ascontiguousarray(part[:, 2]))
        for part in parts
    ]


def extents(moves: GroupMoves) -> list[Extent]:
    """moves: in the order of the pool's pages."""
    if not len(moves.pool):
        return []
    breaks = np.flatnonzero((np.diff(moves.pool) != 1) | (np.diff(moves.host) != 1)) + 1
    starts = [0, *breaks.tolist()]
    stops = [*starts[1:], len(moves.pool)]
    return [
        Extent(int(moves.pool[start]), int(moves.host[start]), stop - start)
        for start, stop in zip(starts, stops, strict=True)
    ]


class PlainCopier:
    """See Copier. Between two pools on the CPU."""

    def __init__(self, pool: Pool, host: HostMemory) -> None:
        self._pool, self._host, self._cut = pool.bytes.numpy(), host.bytes.numpy(), host

    def begin(self, moves: Sequence[GroupMoves], *, out: bool) -> Callable[[], None]:
        """Nothing is done before it is waited for: then nobody waits for the copy behind it."""
        return partial(self._copy, moves, out)

    def _copy(self, moves: Sequence[GroupMoves], out: bool) -> None:
        for each in moves:
            for extent in extents(each):
                ours, theirs = _bytes_of(extent, each.group, self._cut)
                if out:
                    self._host[theirs] = self._pool[ours]
                else:
                    self._pool[ours] = self._host[theirs]


class _Stream:
    """A stream of a device; on a CPU, where tests are, nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def work(self) -> contextlib.AbstractContextManager[object]:
        """What is asked of the device within goes to this stream."""
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)

    def mark(self) -> Callable[[], None]:
        """What waits until all asked before is done. The thread sleeps: one that spins would take a core from the model."""
        if self._stream is None:
            return _nothing
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        wait: Callable[[], None] = event.synchronize
        return wait


def _nothing() -> None:
    """There is nothing to wait for."""


class MemcpyCopier:
    """See Copier."""

    def __init__(self, pool: Pool, host: HostMemory) -> None:
        self._pool, self._host, self._cut = pool.bytes, host.bytes, host
        self._stream = _Stream(pool.device)

    def begin(self, moves: Sequence[GroupMoves], *, out: bool) -> Callable[[], None]:
        with self._stream.work():
            for each in moves:
                for extent in extents(each):
                    ours, theirs = _bytes_of(extent, each.group, self._cut)
                    if out:
                        self._host[theirs].copy_(self._pool[ours], non_blocking=True)
                    else:
                        self._pool[ours].copy_(self._host[theirs], non_blocking=True)
        return self._stream.mark()


class KernelCopier:
    """See Copier."""

    def __init__(self, pool: Pool, host: HostMemory) -> None:
        from disagg.worker.kernels import copy_pages

        self._copy_pages = copy_pages
        self._pool, self._host = pool.bytes, host
        self._stream = _Stream(pool.device)
        self._pinned = pool.device.type == "cuda"
        self._tables = [self._new_table(TABLE_MOVES) for _ in range(AT_ONCE)]
        self._over = [_nothing] * AT_ONCE  # waits until a table is no longer read
        self._begun = 0

    def _new_table(self, moves: int) -> torch.Tensor:
        return torch.empty((moves, 2), dtype=torch.int64, pin_memory=self._pinned)

    def begin(self, moves: Sequence[GroupMoves], *, out: bool) -> Callable[[], None]:
        which = self._begun % AT_ONCE
        self._begun += 1
        self._over[which]()
        count = sum(len(each.pool) for each in moves)
        if count > len(self._tables[which]):  # twice as many, so that this is rare: page-locking takes its time
            self._tables[which] = self._new_table(2 * count)
        table = self._tables[which]
        numbers = table.numpy()
        used = 0
        with self._stream.work():
            for each in moves:
                where = slice(used, used + len(each.pool))
                used = where.stop
                numbers[where, 0], numbers[where, 1] = each.pool, each.host
                cut = self._host.page_bytes[each.group], self._host.strides[each.group]
                self._copy_pages(self._pool, self._host.bytes, table[where], *cut, out)
        self._over[which] = self._stream.mark()
        return self._over[which]


def open_copier(wanted: Copy, pool: Pool, host: HostMemory) -> tuple[Copier, str]:
    """A copier, and which and why, in words. Raises ConfigError for a kernel that cannot be.

    To measure, pages are copied out and back in: nobody else may use either pool.
    """
    if pool.device.type != "cuda":
        return PlainCopier(pool, host), "plain: there is no GPU"
    has_triton = importlib.util.find_spec("triton") is not None
    if wanted == "kernel" and not has_triton:
        raise ConfigError("offload.copy = 'kernel': Triton is not installed; it must be 'auto' or 'memcpy'")
    torch.cuda.synchronize(pool.device)  # what made the pool, on another stream
    copiers: dict[str, Copier] = {}
    if wanted != "memcpy" and has_triton:
        copiers["kernel"] = KernelCopier(pool, host)
    if wanted != "kernel":
        copiers["memcpy"] = MemcpyCopier(pool, host)
    for copier in copiers.values():
        warm_up(copier, host)
    if len(copiers) > 1:
        return fastest(copiers, pool, host)
    (name,) = copiers
    return copiers[name], f"{name} ({'as configured' if name == wanted else 'Triton is not installed'})"


def warm_up(copier: Copier, host: HostMemory) -> None:
    """Do now what the first copies of each group would otherwise wait for (compiling). The pool stays as it is."""
    first = np.zeros(1, dtype=np.int64)
    for g in range(len(host.strides)):
        for out in (True, False):
            copy_whole(copier, [GroupMoves(g, first, first)], out=out)


def fastest(
    copiers: dict[str, Copier], pool: Pool, host: HostMemory, clock: Callable[[], float] = time.perf_counter
) -> tuple[Copier, str]:
    """The one that is fastest there and back, and how fast they were."""
    moves = _scattered(pool, host)
    nbytes = 2 * sum(len(each.pool) * host.page_bytes[each.group] for each in moves)
    rates = {name: nbytes / _seconds(copier, moves, clock) / 1e9 for name, copier in copiers.items()}
    best = max(rates, key=lambda name: rates[name])
    others = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items() if name != best)
    return copiers[best], f"{best} ({rates[best]:.1f} GB/s; {others})"


def _seconds(copier: Copier, moves: Sequence[GroupMoves], clock: Callable[[], float]) -> float:
    """Median of a few rounds, warm, out and back in, which leaves both pools as they are after the first."""
    took = []
    for _ in range(WARM_UPS + ROUNDS):
        started = clock()
        copy_whole(copier, moves, out=True)
        copy_whole(copier, moves, out=False)
        took.append(clock() - started)
    return max(statistics.median(took[WARM_UPS:]), 1e-9)


def _scattered(pool: Pool, host: HostMemory) -> list[GroupMoves]:
    """Pages all over both pools, of the group with the largest ones."""
    group = max(range(len(host.page_bytes)), key=lambda g: host.page_bytes[g])
    there = pool.views[group].num_pages, host.num_pages(group)
    count = min(MEASURED_PAGES, max(1, MEASURED_BYTES // host.page_bytes[group]), *there)
    random = np.random.default_rng(0)
    ours, theirs = (random.permutation(num)[:count].astype(np.int64) for num in there)
    return [GroupMoves(group, np.sort(ours), theirs)]


def _bytes_of(extent: Extent, group: int, cut: HostMemory) -> tuple[Any, Any]:
    """Where an extent is in both pools. What is between its pages is nobody's, and comes along."""
    stride = cut.strides[group]
    nbytes = (extent.length - 1) * stride + cut.page_bytes[group]
    return slice(extent.pool * stride, extent.pool * stride + nbytes), slice(
        extent.host * stride, extent.host * stride + nbytes
    )
