"""Moves pieces between a pool's pages and staging memory, by whichever kernels suit the device.

    mover = create_mover(config.transfer.kernels, pool.device)
    begin = mover.prepare_scatter(...)  # before the piece arrives
    move = begin()                   # returns at once
    ...
    if move.done(): landed(move.ok())

One thread makes a mover and uses it. Moves of one mover are done in the order in which they were asked for, but a gather
or scatter may begin before the one before it is done: whoever asks for a move of what another reads or writes has seen that
one done. Zeroing keeps its place among them: it finds all moves before it done, and is done when one behind it begins.
`TorchMover` has done its work when a call returns; `TritonMover` has a stream of its own, on which nothing ever waits for
the host, and which waits for no other stream: whoever asks for a gather knows that the KV is final, whoever asks for a
scatter that nobody reads the pages yet.

Of a piece that does not verify TorchMover writes nothing, while TritonMover, which reads, sums and writes in one pass, has
written every row by then. That does no harm: the pages belong to a sequence that has not begun, and that waits for the
verdict; the piece is asked for again, or the sequence is given up and its pages are made blank.

Knows pages and bytes; nothing of requests, peers or rings.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from disagg.staging import copy
from disagg.staging.rows import PagedRows, PageShape
from disagg.types.errors import ConfigError

Kernels = Literal["auto", "triton", "torch"]

PREPARED_ALIGN = 256  # bytes: gathers prepared for one place may go to any that lies whole multiples of this from it


class Move(Protocol):
    """A gather, a scatter or a zeroing that was asked for."""

    @property
    def nbytes(self) -> int:
        """Of the piece in staging, padding and trailer included; 0 of a zeroing."""

    def done(self) -> bool:
        """Whether all bytes are where they belong. Never waits; stays true once it is."""

    def ok(self) -> bool:
        """Of a scatter, whether the checksum was right; else true. Only to be asked once done."""

    def seconds(self) -> float:
        """From when it was begun to when it was found to be done. Only to be asked once done."""


class Mover(Protocol):
    """What TorchMover and TritonMover have in common. Every tensor is on the mover's device; page tables are from `pages`.

    out, staging: [>= rows.staged_bytes] uint8, contiguous, 8-byte aligned (at 16 bytes the kernels are faster).
    """

    def pages(self, page_ids: Sequence[int]) -> torch.Tensor:
        """A page table for the calls below, which stays as it is for as long as it is held itself (not a view of it), and until
        what was begun by then is done. [n] int64."""

    def prepare(self, pool: torch.Tensor, shape: PageShape, staging: torch.Tensor) -> None:
        """Do now what the first moves between these would otherwise wait for (compiling). Moves nothing."""

    def prepare_gather(self, rows: PagedRows, out: torch.Tensor) -> Callable[[torch.Tensor], Move]:
        """Prepares a gather; calling the result with the memory to gather into begins it.

        That memory is aligned as `out` is. Until the move is done nobody else may write it, nor the pages. Preparing is most
        of what a move costs the host, and needs no final KV.
        """

    def prepare_scatter(self, rows: PagedRows, staging: torch.Tensor) -> Callable[[], Move]:
        """Prepares a scatter; calling the result, once, begins it. Preparing needs nothing to have arrived.

        Nobody may read the pages before the move is done and ok.
        """

    def zero(self, pool: torch.Tensor, page_ids: torch.Tensor) -> Move:
        """Make whole pages blank. pool: [num_pages, page_bytes] uint8."""


def create_mover(kernels: Kernels, device: torch.device) -> Mover:
    """kernels: "auto" is triton on CUDA and torch elsewhere. Raises ConfigError if they cannot run there."""
    if kernels == "auto":
        kernels = "triton" if device.type == "cuda" else "torch"
    if kernels == "torch":
        return TorchMover(device)
    if device.type != "cuda":
        raise ConfigError(
            f'transfer.kernels = "triton": Triton has no kernels for {device.type}; use "auto" or "torch"'
        )
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            'transfer.kernels: Triton is not installed; install triton, or use "torch", which is slow on CUDA'
        )
    # Triton takes a second to import, which a worker on CPU need not wait for.
    from disagg.staging.triton_mover import CudaQueue, TritonMover

    return TritonMover(device, CudaQueue(device))


@dataclass(frozen=True, slots=True)
class _Moved:
    """A move that was over when it was asked for."""

    nbytes: int
    was_ok: bool
    took_s: float

    def done(self) -> bool:
        return True

    def ok(self) -> bool:
        return self.was_ok

    def seconds(self) -> float:
        return self.took_s


class TorchMover:
    """Moves with staging/copy, on the calling thread. On CUDA it works, and makes the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pages(self, page_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(page_ids, dtype=torch.int64, device=self._device)

    def prepare(self, pool: torch.Tensor, shape: PageShape, staging: torch.Tensor) -> None:
        """Does nothing: this mover compiles nothing."""

    def prepare_gather(self, rows: PagedRows, out: torch.Tensor) -> Callable[[torch.Tensor], Move]:
        def begin(into: torch.Tensor) -> Move:
            started = time.perf_counter()
            nbytes = copy.gather(rows, into)
            return _Moved(nbytes, was_ok=True, took_s=time.perf_counter() - started)

        return begin

    def prepare_scatter(self, rows: PagedRows, staging: torch.Tensor) -> Callable[[], Move]:
        def begin() -> Move:
            started = time.perf_counter()
            ok = copy.scatter(rows, staging)
            return _Moved(rows.staged_bytes, was_ok=ok, took_s=time.perf_counter() - started)

        return begin

    def zero(self, pool: torch.Tensor, page_ids: torch.Tensor) -> Move:
        started = time.perf_counter()
        pool.index_fill_(0, page_ids, 0)
        return _Moved(0, was_ok=True, took_s=time.perf_counter() - started)
