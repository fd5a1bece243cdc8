"""Pools for tests of the kernels, which are called as staging/copy is, and compared with it byte for byte.

In Triton's interpreter by default, where a program takes some 10 ms; with `TRITON_INTERPRET=0`, on a CUDA device (see
tests/conftest).
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from disagg.messages.pieces import HeadSlice, Piece
from disagg.staging import copy
from disagg.staging.kernels import SUMS, VERDICT_OK, VERDICT_WRONG, launch_of
from disagg.staging.pieces import framed_bytes
from disagg.staging.rows import PagedRows, PageShape

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
SEED = 0xF234_5678_9ABC_DEF0  # above 2^63: keys are unsigned
SPARE = 24  # bytes behind a piece in staging


def long(*values: object) -> Any:
    """Parameters that `make check` leaves out."""
    return pytest.param(*values, marks=pytest.mark.long)


class Pool:
    """Random bytes with one sequence in shuffled pages. On CPU; `bytes_there` is the same pool on the kernels' device."""

    def __init__(self, shape: PageShape, positions: int, seed: int, slack: int = 0) -> None:
        """slack: bytes by which pages are farther apart than they are long."""
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.shape = shape
        pages = -(-positions // shape.page_tokens)
        self.page_ids = torch.tensor(rng.sample(range(pages + 3), pages))
        self._flat = torch.randint(0, 256, (pages + 3, shape.nbytes + slack), dtype=torch.uint8, generator=generator)
        self._flat_there = self._flat.to(DEVICE, copy=True)

    @property
    def bytes(self) -> torch.Tensor:
        return self._flat[:, : self.shape.nbytes]

    @property
    def bytes_there(self) -> torch.Tensor:
        return self._flat_there[:, : self.shape.nbytes]

    def rows(self, piece: Piece, part: HeadSlice) -> PagedRows:
        """Of the pool on CPU."""
        return PagedRows(self.bytes, self.page_ids, self.shape, piece, part, SEED)

    def same(self) -> bool:
        """Whether what the kernels and what staging/copy did to the pool is the same, between pages too."""
        return torch.equal(self._flat_there.cpu(), self._flat)


class Kernels:
    """The kernels, called as staging/copy is."""

    def __init__(self) -> None:
        self.sums = torch.zeros(SUMS, dtype=torch.int64, device=DEVICE)

    def gather(self, pool: Pool, piece: Piece, part: HeadSlice, seed: int = SEED, offset: int = 0) -> torch.Tensor:
        """What is in staging afterwards, SPARE bytes included. offset: of the piece in staging."""
        out = torch.full(
            (offset + framed_bytes(pool.shape.payload_bytes(piece, part.heads)) + SPARE,),
            0xEE,
            dtype=torch.uint8,
            device=DEVICE,
        )
        first = piece.token_start // pool.shape.page_tokens
        ids = pool.page_ids[first:].to(DEVICE)
        rows = PagedRows(pool.bytes_there, ids, pool.shape, piece, part, seed, first_page=first)
        assert rows.staged_bytes == len(out) - offset - SPARE
        launch_of(rows, out[offset:], self.sums, None)()
        assert self.sums.tolist() == [0] * SUMS, "the next launch would begin with this one's sum"
        return out[offset:].cpu()

    def scatter(
        self, staging: torch.Tensor, pool: Pool, piece: Piece, part: HeadSlice, seed: int = SEED, offset: int = 0
    ) -> bool:
        first = piece.token_start // pool.shape.page_tokens
        ids, there = (
            pool.page_ids[first:].to(DEVICE),
            torch.empty(offset + len(staging), dtype=torch.uint8, device=DEVICE),
        )
        there[offset:] = staging.to(DEVICE)
        verdict = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        rows = PagedRows(pool.bytes_there, ids, pool.shape, piece, part, seed, first_page=first)
        launch_of(rows, there[offset:], self.sums, verdict)()
        assert self.sums.tolist() == [0] * SUMS
        assert int(verdict) in (VERDICT_OK, VERDICT_WRONG)
        return int(verdict) == VERDICT_OK


def expected(pool: Pool, piece: Piece, part: HeadSlice) -> torch.Tensor:
    out = torch.full((framed_bytes(pool.shape.payload_bytes(piece, part.heads)) + SPARE,), 0xEE, dtype=torch.uint8)
    copy.gather(pool.rows(piece, part), out)
    return out


def move(src: Pool, dst: Pool, piece: Piece, part: HeadSlice, offset: int = 0) -> None:
    """Gather and scatter with both, and compare every byte."""
    kernels = Kernels()
    staged = expected(src, piece, part)
    gathered = kernels.gather(src, piece, part, offset=offset)
    assert torch.equal(gathered, staged)
    assert src.same(), "a gather wrote into the pool"
    assert kernels.scatter(gathered, dst, piece, part, offset=offset)
    assert copy.scatter(dst.rows(piece, part), staged)
    assert dst.same()


ONE_HEAD = HeadSlice(0, 0, 0, 0, 1)
