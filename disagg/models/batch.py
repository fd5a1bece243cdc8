"""What one forward computes: rows of tokens, and which pages each row's sequence lives in.

All tensors are on the model's device. Rows of prefill runs come first, then decode rows:

    row        0 1 2 3 4 5 6 │ 7 8 9 │ 10  11  12
               prefill run 0 │ run 1 │ decodes, one row each
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PrefillRun:
    """Consecutive tokens of one sequence: `num_tokens` rows from row `start`.

    context_tokens: tokens of the sequence already in the cache before this run. pages: [ceil((context + num) /
    page_tokens)] int64, the sequence's pages in order.
    """

    start: int
    num_tokens: int
    context_tokens: int
    pages: torch.Tensor

    @property
    def total_tokens(self) -> int:
        return self.context_tokens + self.num_tokens


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Sequences with one new token each: rows from `start`, one per sequence.

    pages: [B, max_pages] int64, each row's pages in order, padded with any valid page id. lengths: [B] int64, tokens of
    each sequence including the new one. max_length: the largest of them, known on the host without a device sync.
    """

    start: int
    pages: torch.Tensor
    lengths: torch.Tensor
    max_length: int

    @property
    def num_sequences(self) -> int:
        return self.pages.shape[0]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """input_ids, positions: [N] int64. slot_pages, slot_offsets: [N] int64, the page and the token within it where each
    row's K and V are written; no two rows share a slot. logits_rows: [R] int64, the rows whose logits are wanted."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_pages: torch.Tensor
    slot_offsets: torch.Tensor
    prefills: tuple[PrefillRun, ...]
    decodes: DecodeRun | None
    logits_rows: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]

    def check(self) -> None:
        """Asserts that the runs tile the rows. Looks at shapes only, so it costs no device sync."""
        row = 0
        for run in self.prefills:
            assert run.start == row, f"prefill run starts at row {run.start}, not {row}"
            assert run.num_tokens > 0 and run.context_tokens >= 0, f"prefill run {run}"
            row += run.num_tokens
        if self.decodes is not None:
            assert self.decodes.start == row, f"decode rows start at {self.decodes.start}, not {row}"
            assert self.decodes.lengths.shape == (self.decodes.num_sequences,), "one length per decode row"
            row += self.decodes.num_sequences
        assert row == self.num_rows, f"runs cover {row} of {self.num_rows} rows"
        for column in (self.positions, self.slot_pages, self.slot_offsets):
            assert column.shape == (row,), f"a column of {tuple(column.shape)} for {row} rows"
