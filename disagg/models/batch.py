"""What one forward computes: rows of tokens, and where the caches of each row's sequence live.

All tensors are on one device: made on the host, and taken to the model's by one copy (`ForwardBatch.on`). Rows of prefill
runs come first, then decode rows:

    row        0 1 2 3 4 5 6 │ 7 8 9 │ 10  11  12
               prefill run 0 │ run 1 │ decodes, one row each
    run        0             │ 1     │ 2   3   4

What is equal for all layers is in the batch itself; what differs between layer groups, which have pages of their own, is
in its `tables`, one per group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from disagg.models.device import upload_together


@dataclass(frozen=True, slots=True)
class PrefillRun:
    """Consecutive tokens of one sequence: `num_tokens` rows from row `start`.

    context_tokens: tokens of the sequence that were computed before this run. sample: the last row's logits are wanted.
    """

    start: int
    num_tokens: int
    context_tokens: int
    sample: bool

    @property
    def total_tokens(self) -> int:
        return self.context_tokens + self.num_tokens


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Sequences with one new token each, after others: rows from `start`, one per sequence.

    lengths: [B] int64, tokens of each sequence including the new one. What the host knows of them without a device sync:
    none is above max_length, and together they are at least total_length.

    first_row: [1] int64, where the first row is, if that is on the device: in graphs of both phases, whose rows are then said by
    their tables alone. A sequence of length 0 has no row.
    """

    start: int
    lengths: torch.Tensor
    max_length: int
    total_length: int
    first_row: torch.Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return self.lengths.shape[0]


@dataclass(frozen=True, slots=True)
class PageTable:
    """The pages that runs reach, a row per run. Holds no page that has left the window: it may be another sequence's.

    pages: [R, width] int64, in order, padded with the row's last; its first column is page number first_pages
    [R] int64. firsts: the same numbers on the host.
    """

    pages: torch.Tensor
    first_pages: torch.Tensor
    firsts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AttentionTables:
    """One group of attention layers.

    write_pages: [N] int64, the page where each row's K and V are written; no two rows share a place. prefills: a row per
    prefill run; decodes: a row per decode row. None without such runs. tiles: how prefill runs are cut, as Triton's attention
    takes them (attention/triton_prefill), where that is on the device already: in graphs.
    """

    write_pages: torch.Tensor
    prefills: PageTable | None
    decodes: PageTable | None
    tiles: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StateTables:
    """One group of recurrent layers, per run: prefill runs, then decode rows.

    reads: [runs] int64, the page with the state that the run continues, -1 for a sequence's beginning (only a prefill run
    without context). writes: [runs] int64, the page for the state after the run; it may be the one that is read.
    """

    reads: torch.Tensor
    writes: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """input_ids, positions: [N] int64. write_offsets: [N] int64, each row's token within its page. logits_rows: [R] int64,
    the rows whose logits are wanted, in rising order. tables: per layer group.

    carried: [N] int64, for a row whose token the host does not know yet: which of `tokens_before` it is; -1 for one whose id
    is in input_ids. None if all are. tokens_before: int64, on the device: what the step before sampled; -1 of a
    row that had no token (models/argmax/first), which counts as 0 here: what is computed of it is thrown away.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    write_offsets: torch.Tensor
    prefills: tuple[PrefillRun, ...]
    decodes: DecodeBatch | None
    logits_rows: torch.Tensor
    tables: tuple[AttentionTables | StateTables, ...]
    carried: torch.Tensor | None = None
    tokens_before: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def wants_every_row(self) -> bool:
        """Whether `logits_rows` are all of them in order. As many rows of a batch with prefills may be others: where it is
        captured, which they are is said anew at each replay."""
        return not self.prefills and self.logits_rows.shape[0] == self.num_rows

    def token_ids(self) -> torch.Tensor:
        """[N] int64, of all rows."""
        if self.carried is None:
            return self.input_ids
        assert self.tokens_before is not None, "tokens of no step are carried over"
        before = self.tokens_before.index_select(0, self.carried.clamp(min=0)).clamp_(min=0)
        return torch.where(self.carried < 0, self.input_ids, before)

    def on(self, device: torch.device) -> ForwardBatch:
        """The same batch there. Waits for nothing that the device does."""
        if device.type == "cpu":
            return self
        sources: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> torch.Tensor:
            sources.append(tensor)
            return tensor

        self._each(collect)
        there = iter(upload_together(sources, device))
        return self._each(lambda _: next(there))

    def _each(self, of: Callable[[torch.Tensor], torch.Tensor]) -> ForwardBatch:
        """The batch with `of` of each tensor in place of it, always in the same order."""

        def of_table(table: PageTable | None) -> PageTable | None:
            return table and replace(table, pages=of(table.pages), first_pages=of(table.first_pages))

        return replace(
            self,
            input_ids=of(self.input_ids),
            positions=of(self.positions),
            write_offsets=of(self.write_offsets),
            decodes=self.decodes and replace(self.decodes, lengths=of(self.decodes.lengths)),
            logits_rows=of(self.logits_rows),
            carried=None if self.carried is None else of(self.carried),
            tables=tuple(
                StateTables(of(table.reads), of(table.writes))
                if isinstance(table, StateTables)
                else AttentionTables(of(table.write_pages), of_table(table.prefills), of_table(table.decodes))
                for table in self.tables
            ),
        )

    def check(self) -> None:
        """Asserts that the runs tile the rows. Looks at shapes only, so it costs no device sync."""
        row = 0
        for run in self.prefills:
            assert run.start == row, f"prefill run starts at row {run.start}, not {row}"
            assert run.num_tokens > 0 and run.context_tokens >= 0, f"prefill run {run}"
            row += run.num_tokens
        num_runs = len(self.prefills)
        if self.decodes is not None and self.decodes.first_row is None:
            assert self.decodes.start == row, f"decode rows start at {self.decodes.start}, not {row}"
            row += self.decodes.num_sequences
            num_runs += self.decodes.num_sequences
        assert row == self.num_rows, f"runs cover {row} of {self.num_rows} rows"
        for column in (self.positions, self.write_offsets, *(() if self.carried is None else (self.carried,))):
            assert column.shape == (row,), f"a column of {tuple(column.shape)} for {row} rows"
        for table in self.tables:
            if isinstance(table, AttentionTables):
                assert table.write_pages.shape == (row,), f"places of {table.write_pages.shape[0]} rows of {row}"
                num_prefills = 0 if table.prefills is None else table.prefills.pages.shape[0]
                assert num_prefills == len(self.prefills), "pages for every prefill run"
                assert (table.decodes is None) == (self.decodes is None), "pages for every decode row"
            else:
                assert table.reads.shape == table.writes.shape == (num_runs,), f"states of {num_runs} runs"
