"""Device tables of the sampler that only some slots need: tokens seen (penalties), and lists of tokens to edit.

Both hand out rows, the lowest first, grow in chunks, and give memory back, down to one chunk, when less than half of it is
in use: a server whose clients use no penalties pays nothing, and one whose clients used many for a while little. Nothing
here waits for the device. Knows rows and tokens; nothing of requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from disagg.models.device import upload

_CHUNK_ROWS = 8


class Rows:
    """Which rows of a table are in use, and how many the table should have."""

    def __init__(self) -> None:
        self.count = 0  # rows that the table has
        self._free: list[int] = []  # a heap
        self._used: set[int] = set()

    def take(self) -> int:
        """The lowest free row. The caller makes the table `count` rows high."""
        if not self._free:
            self._free = list(range(self.count, self.count + _CHUNK_ROWS))
            self.count += _CHUNK_ROWS
        row = heapq.heappop(self._free)
        self._used.add(row)
        return row

    def free(self, row: int) -> bool:
        """True if `count` is less now: rows above it are to be given back.

        That happens when the highest row in use is in the lower half, so a row is copied once for each that was freed.
        """
        self._used.remove(row)
        heapq.heappush(self._free, row)
        needed = (max(self._used, default=0) // _CHUNK_ROWS + 1) * _CHUNK_ROWS
        if needed > self.count // 2:
            return False
        self.count = needed
        self._free = [row for row in self._free if row < needed]
        heapq.heapify(self._free)
        return True


class SeenTokens:
    """Per row and token: 2 x (times in the output) + (1 if in the prompt), so that one gather serves all penalties."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._seen = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._rows = Rows()

    @property
    def nbytes(self) -> int:
        return self._seen.nbytes

    def put(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> int:
        row = self._rows.take()
        rows, vocab_size = self._seen.shape
        if rows < self._rows.count:
            more = torch.zeros(self._rows.count - rows, vocab_size, dtype=torch.int32, device=self._device)
            self._seen = torch.cat([self._seen, more])
        seen = self._seen[row].zero_()
        if prompt_ids:
            seen.index_fill_(0, upload(torch.tensor(prompt_ids, dtype=torch.int64), self._device), 1)
        if output_ids:
            ids = upload(torch.tensor(output_ids, dtype=torch.int64), self._device)
            seen.index_add_(0, ids, torch.full_like(ids, 2, dtype=torch.int32))
        return row

    def free(self, row: int) -> None:
        if self._rows.free(row):
            self._seen = self._seen[: self._rows.count].clone()

    def count(self, rows: Tensor, token_ids: Tensor) -> None:
        """One more output token for each row. rows, token_ids: [P] int64; no row twice."""
        cells = rows * self._seen.shape[1] + token_ids
        flat = self._seen.view(-1)
        flat.index_copy_(0, cells, flat[cells] + 2)

    def penalize(self, x: Tensor, positions: Tensor, rows: Tensor, penalties: Tensor) -> None:
        """Penalises x[positions[i]] by what row `rows[i]` has seen, in place. Order and formulas as in vLLM.

        x: [R, V] float32; positions, rows: [P], none twice; penalties: [P, 3] float32: repetition, frequency, presence.
        """
        seen = self._seen.index_select(0, rows)
        if x.device.type == "cpu":  # most cells are zero, and here looking is free
            row, token = seen.nonzero(as_tuple=True)
            cells = positions[row] * x.shape[1] + token
            flat = x.view(-1)
            flat[cells] = _penalized(flat[cells], seen[row, token], *penalties[row].unbind(1))
        else:
            some = _penalized(x.index_select(0, positions), seen, *penalties.unsqueeze(-1).unbind(1))
            x.index_copy_(0, positions, some)


class TokenLists:
    """Per row a list of different token ids, each with a value. Lists are padded with their own first entry, so that
    writing one entry twice writes the same thing twice."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ids = torch.zeros(0, 1, dtype=torch.int64, device=device)
        self._values = torch.zeros(0, 1, dtype=torch.float32, device=device)
        self._rows = Rows()
        self._lengths: dict[int, int] = {}  # of the lists, by row

    @property
    def nbytes(self) -> int:
        return self._ids.nbytes + self._values.nbytes

    def put(self, entries: Sequence[tuple[int, float]]) -> int:
        assert entries
        rows, width = self._ids.shape
        if len(entries) > width:
            more = len(entries) - width  # only ever up to the largest list the limits on requests allow
            self._ids = torch.cat([self._ids, self._ids[:, :1].expand(-1, more)], dim=1)
            self._values = torch.cat([self._values, self._values[:, :1].expand(-1, more)], dim=1)
            width = len(entries)
        row = self._rows.take()
        self._lengths[row] = len(entries)
        if rows < self._rows.count:
            more = self._rows.count - rows
            self._ids = torch.cat([self._ids, self._ids.new_zeros(more, width)])
            self._values = torch.cat([self._values, self._values.new_zeros(more, width)])
        padded = [*entries, *[entries[0]] * (width - len(entries))]
        self._ids[row] = upload(torch.tensor([i for i, _ in padded], dtype=torch.int64), self._device)
        self._values[row] = upload(torch.tensor([v for _, v in padded], dtype=torch.float32), self._device)
        return row

    def free(self, row: int) -> None:
        del self._lengths[row]
        rows, width = self._ids.shape
        if self._rows.free(row):
            rows = self._rows.count
        longest = max(self._lengths.values(), default=1)
        if longest <= width // 2:  # the first entries of a list are all of it: what follows repeats its first one
            width = longest
        if (rows, width) != self._ids.shape:
            self._ids = self._ids[:rows, :width].clone()
            self._values = self._values[:rows, :width].clone()

    def add_to(self, x: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Adds the values of list `rows[i]` to x[positions[i]], in place. x: [R, V] float32; no position twice."""
        cells = self._cells(x, positions, rows)
        flat = x.view(-1)
        flat.scatter_(0, cells, flat[cells] + self._values.index_select(0, rows).view(-1))

    def fill(self, x: Tensor, positions: Tensor, rows: Tensor, value: float) -> None:
        """Writes one value at every token of list `rows[i]` of x[positions[i]], in place. As `add_to`."""
        x.view(-1).scatter_(0, self._cells(x, positions, rows), value)

    def _cells(self, x: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        return (positions.unsqueeze(1) * x.shape[1] + self._ids.index_select(0, rows)).view(-1)


def _penalized(x: Tensor, seen: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    x = torch.where(seen > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    outputs = seen >> 1
    return x.sub_(frequency * outputs).sub_(presence * (outputs > 0))
