"""A mover as on a GPU: moves are over when the test says, in order, and a scatter writes before it knows its verdict."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from disagg.staging import copy
from disagg.staging.checksum import checksum
from disagg.staging.pieces import TRAILER_BYTES
from disagg.staging.rows import PagedRows, PageShape


class SlowMove:
    def __init__(self, nbytes: int, run: Callable[[], bool]) -> None:
        self.nbytes = nbytes
        self._run = run
        self._verdict: bool | None = None

    def run(self) -> None:
        self._verdict = self._run()

    def done(self) -> bool:
        return self._verdict is not None

    def ok(self) -> bool:
        assert self._verdict is not None, "asked before it was done"
        return self._verdict

    def seconds(self) -> float:
        assert self._verdict is not None, "asked before it was done"
        return 0.25


class SlowMover:
    """`run` ends the oldest moves. With `at_once`, moves end when they are asked for, as on CPU."""

    def __init__(self) -> None:
        self.waiting: deque[SlowMove] = deque()
        self.at_once = False
        self.prepared: list[int] = []  # first token of the piece of every move that was prepared

    def run(self, moves: int = 1) -> None:
        for _ in range(moves):
            self.waiting.popleft().run()

    def pages(self, page_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(page_ids, dtype=torch.int64)

    def prepare(self, pool: torch.Tensor, shape: PageShape, staging: torch.Tensor) -> None:
        pass

    def prepare_gather(self, rows: PagedRows, out: torch.Tensor) -> Callable[[torch.Tensor], SlowMove]:
        self.prepared.append(rows.piece.token_start)

        def begin(into: torch.Tensor) -> SlowMove:
            def run() -> bool:
                copy.gather(rows, into)
                return True

            return self._begin(rows.staged_bytes, run)

        return begin

    def prepare_scatter(self, rows: PagedRows, staging: torch.Tensor) -> Callable[[], SlowMove]:
        self.prepared.append(rows.piece.token_start)
        padded = rows.staged_bytes - TRAILER_BYTES

        def run() -> bool:
            whole = staging.clone()
            trailer = checksum(whole[:padded], rows.payload_bytes, rows.seed).to_bytes(TRAILER_BYTES, "little")
            whole[padded : padded + TRAILER_BYTES] = torch.frombuffer(bytearray(trailer), dtype=torch.uint8)
            assert copy.scatter(rows, whole)
            return torch.equal(whole, staging)

        return lambda: self._begin(rows.staged_bytes, run)

    def zero(self, pool: torch.Tensor, page_ids: torch.Tensor) -> SlowMove:
        def run() -> bool:
            pool.index_fill_(0, page_ids, 0)
            return True

        return self._begin(0, run)

    def _begin(self, nbytes: int, run: Callable[[], bool]) -> SlowMove:
        move = SlowMove(nbytes, run)
        if self.at_once:
            move.run()
        else:
            self.waiting.append(move)
        return move
