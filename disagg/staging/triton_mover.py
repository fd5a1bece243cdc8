"""Moves pieces with the kernels of staging/kernels, on a stream of their own, whose end the host polls.

    host     scatter ──> Move                 done()? no     done()? yes: ok()
    stream           [mark][ kernel ... │verdict][mark]

A verdict is a number in pinned memory, which the last program of a scatter writes: to read it takes no copy, only the
mark behind it. Knows streams, marks and verdicts; nothing of how bytes are moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from disagg.messages.lane import Piece
from disagg.staging.copy import PageShape
from disagg.staging.kernels import (
    SUMS,
    VERDICT_OK,
    bind_launch,
    compile_launch,
    launch_gather,
    launch_scatter,
    plan_launch,
)
from disagg.staging.mover import Move
from disagg.staging.pieces import framed_bytes

UNDECIDED = 0
PLANNED_ALIGN = 256
VERDICTS = 256  # are made at a time; there are as many as scatters were ever under way at once


class Mark(Protocol):
    """A place in a queue's work."""

    def query(self) -> bool:
        """Whether all work before it is done."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to `end`, another mark of the same queue, once both are reached."""


class Queue(Protocol):
    """A stream of a device."""

    def current(self) -> AbstractContextManager[object]:
        """What torch and Triton are asked to do within goes to this queue."""

    def mark(self) -> Mark:
        """After all that was asked for so far."""

    def host(self, values: Sequence[int]) -> torch.Tensor:
        """[n] int64 on the host, where the device can read and write it."""


class CudaQueue:
    """A stream that waits for no other, not even the default one. The thread that makes it works on it from then on."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._stream)

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def host(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, pin_memory=True)


class _Verdicts:
    """Numbers that kernels write and the host reads, each lent to one scatter at a time."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """[1] int64, undecided."""
        if not self._free:
            numbers = self._queue.host([UNDECIDED] * VERDICTS)
            self._free = [numbers[i : i + 1] for i in range(VERDICTS)]
        return self._free.pop()

    def give_back(self, verdict: torch.Tensor) -> None:
        verdict.fill_(UNDECIDED)
        self._free.append(verdict)


class _QueuedMove:
    """A move on a queue. verdict: of a scatter, and given back as soon as it was read."""

    def __init__(self, nbytes: int, begin: Mark, end: Mark, verdicts: _Verdicts, verdict: torch.Tensor | None) -> None:
        self._nbytes = nbytes
        self._begin = begin
        self._end = end
        self._verdicts = verdicts
        self._verdict = verdict
        self._done = False
        self._ok = True

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def done(self) -> bool:
        if not self._done and self._end.query():
            self._done = True
            if self._verdict is not None:
                number = int(self._verdict)
                assert number != UNDECIDED, "a scatter ended without a verdict"
                self._ok = number == VERDICT_OK
                self._verdicts.give_back(self._verdict)
                self._verdict = None
        return self._done

    def ok(self) -> bool:
        assert self._done, "the move is under way"
        return self._ok

    def seconds(self) -> float:
        assert self._done, "the move is under way"
        return self._begin.elapsed_time(self._end) / 1e3


class TritonMover:
    """See mover.Mover."""

    def __init__(self, device: torch.device, queue: Queue) -> None:
        self._device = device
        self._queue = queue
        self._verdicts = _Verdicts(queue)
        with queue.current():
            self._sums = torch.zeros(SUMS, dtype=torch.int64, device=device)

    def pages(self, page_ids: Sequence[int]) -> torch.Tensor:
        with self._queue.current():
            return self._queue.host(page_ids).to(self._device, non_blocking=True)

    def prepare(self, pool: torch.Tensor, shape: PageShape, staging: torch.Tensor) -> None:
        piece = Piece(0, 0, 1, 0, 1)
        page_ids, verdict = self.pages([0]), self._verdicts.take()
        for of_scatter in (None, verdict):
            compile_launch(plan_launch(pool, page_ids, shape, piece, 0, 1, staging, 0, self._sums, of_scatter, 0))
        self._verdicts.give_back(verdict)

    def gather(
        self,
        pool: torch.Tensor,
        page_ids: torch.Tensor,
        shape: PageShape,
        piece: Piece,
        head_start: int,
        heads: int,
        out: torch.Tensor,
        seed: int,
        first_page: int = 0,
    ) -> Move:
        with self._queue.current():
            begin = self._queue.mark()
            nbytes = launch_gather(pool, page_ids, shape, piece, head_start, heads, out, seed, self._sums, first_page)
        return _QueuedMove(nbytes, begin, self._queue.mark(), self._verdicts, None)

    def scatter(
        self,
        staging: torch.Tensor,
        pool: torch.Tensor,
        page_ids: torch.Tensor,
        shape: PageShape,
        piece: Piece,
        head_start: int,
        heads: int,
        seed: int,
        first_page: int = 0,
    ) -> Move:
        verdict = self._verdicts.take()
        with self._queue.current():
            begin = self._queue.mark()
            launch_scatter(
                staging, pool, page_ids, shape, piece, head_start, heads, seed, self._sums, verdict, first_page
            )
        nbytes = framed_bytes(shape.payload_bytes(piece, heads))
        return _QueuedMove(nbytes, begin, self._queue.mark(), self._verdicts, verdict)

    def plan_gather(
        self,
        pool: torch.Tensor,
        page_ids: torch.Tensor,
        shape: PageShape,
        piece: Piece,
        head_start: int,
        heads: int,
        out: torch.Tensor,
        seed: int,
        first_page: int = 0,
    ) -> Callable[[torch.Tensor], Move]:
        planned = plan_launch(pool, page_ids, shape, piece, head_start, heads, out, seed, self._sums, None, first_page)
        launch, units = bind_launch(planned, "staging"), planned.arguments["staging"].dtype
        nbytes = framed_bytes(shape.payload_bytes(piece, heads))

        def begin(into: torch.Tensor) -> Move:
            assert (into.data_ptr() - out.data_ptr()) % PLANNED_ALIGN == 0, "planned for memory aligned otherwise"
            with self._queue.current():
                begin = self._queue.mark()
                launch(into[:nbytes].view(units))
                return _QueuedMove(nbytes, begin, self._queue.mark(), self._verdicts, None)

        return begin

    def plan_scatter(
        self,
        staging: torch.Tensor,
        pool: torch.Tensor,
        page_ids: torch.Tensor,
        shape: PageShape,
        piece: Piece,
        head_start: int,
        heads: int,
        seed: int,
        first_page: int = 0,
    ) -> Callable[[], Move]:
        verdict = self._verdicts.take()
        launch = bind_launch(
            plan_launch(
                pool, page_ids, shape, piece, head_start, heads, staging, seed, self._sums, verdict, first_page
            ),
            "verdict",
        )
        self._verdicts.give_back(verdict)
        nbytes = framed_bytes(shape.payload_bytes(piece, heads))

        def begin() -> Move:
            verdict = self._verdicts.take()
            with self._queue.current():
                begin = self._queue.mark()
                launch(verdict)
                return _QueuedMove(nbytes, begin, self._queue.mark(), self._verdicts, verdict)

        return begin

    def zero(self, pool: torch.Tensor, page_ids: torch.Tensor) -> Move:
        with self._queue.current():
            begin = self._queue.mark()
            pool.index_fill_(0, page_ids, 0)
        return _QueuedMove(0, begin, self._queue.mark(), self._verdicts, None)
