"""Turns the runs of a plan into the tensors of one forward. Knows the page tables of known sequences; nothing of models.

Of a table, only pages that the run can reach become part of the batch: entries out of a window are stale, and their pages
may be another sequence's by now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from disagg.messages.layout import LayerGroup
from disagg.messages.sequence_diff import RunView
from disagg.models.batch import AttentionTables, DecodeBatch, ForwardBatch, PageTable, PrefillRun, StateTables
from disagg.types.arithmetic import ceil_div

UNKNOWN = -1  # in place of a token that is sampled, but not on the host yet
NOT_CARRIED = -1


def build_batch(
    runs: Sequence[RunView],
    groups: Sequence[LayerGroup],
    page_tokens: int,
    carried: Mapping[int, int] | None = None,
) -> tuple[ForwardBatch, list[RunView]]:
    """The batch, on the host, and the runs in row order: prefill runs, then single tokens after a context.

    carried: of sequences whose last token is UNKNOWN, by id: its place among the tokens of the step before.
    """
    builder = _Builder(runs, page_tokens, carried or {})
    return builder.batch(groups), builder.prefills + builder.decodes


class _Builder:
    """One plan's runs, apart by kind."""

    def __init__(self, runs: Sequence[RunView], page_tokens: int, carried: Mapping[int, int]) -> None:
        self.prefills = [run for run in runs if run.num_tokens > 1 or run.start == 0]
        self.decodes = [run for run in runs if run.num_tokens == 1 and run.start > 0]
        self._page_tokens = page_tokens
        self._carried = carried

    def batch(self, groups: Sequence[LayerGroup]) -> ForwardBatch:
        ids: list[int] = []
        positions: list[int] = []
        logits_rows: list[int] = []
        prefill_runs = []
        for run in self.prefills:
            prefill_runs.append(PrefillRun(len(ids), run.num_tokens, run.start, run.sample))
            ids += run.token_ids
            positions += range(run.start, run.start + run.num_tokens)
            if run.sample:
                logits_rows.append(len(positions) - 1)
        decodes = None
        if self.decodes:
            lengths = [run.start + 1 for run in self.decodes]
            decodes = DecodeBatch(len(positions), _longs(lengths), max(lengths), sum(lengths))
        for run in self.decodes:
            ids += run.token_ids
            positions.append(run.start)
            if run.sample:
                logits_rows.append(len(positions) - 1)
        assert len(ids) == len(positions), "a run names tokens that this worker does not know"
        carried = None
        if UNKNOWN in ids:
            row = len(ids) - len(self.decodes)
            assert UNKNOWN not in ids[:row], "a chunk of a prompt names a token that is not known yet"
            carried = [NOT_CARRIED] * row
            for run, token in zip(self.decodes, ids[row:], strict=True):
                carried.append(self._carried[run.sequence.seq_id] if token == UNKNOWN else NOT_CARRIED)
            ids = [max(token, 0) for token in ids]
        position_ids = _longs(positions)
        return ForwardBatch(
            input_ids=_longs(ids),
            positions=position_ids,
            write_offsets=position_ids % self._page_tokens,
            prefills=tuple(prefill_runs),
            decodes=decodes,
            logits_rows=_longs(logits_rows),
            tables=tuple(
                self._state_tables(index) if group.is_state else self._attention_tables(index, group.window)
                for index, group in enumerate(groups)
            ),
            carried=None if carried is None else _longs(carried),
        )

    def _attention_tables(self, group: int, window: int) -> AttentionTables:
        """window: as LayerGroup's; 0 is none."""
        page_tokens = self._page_tokens
        write_pages: list[int] = []
        for run in self.prefills:
            table, stop = run.sequence.tables[group], run.start + run.num_tokens
            write_pages += [table[position // page_tokens] for position in range(run.start, stop)]
        write_pages += [run.sequence.tables[group][run.start // page_tokens] for run in self.decodes]
        return AttentionTables(
            _longs(write_pages),
            self._page_table(self.prefills, group, window),
            self._page_table(self.decodes, group, window),
        )

    def _page_table(self, runs: Sequence[RunView], group: int, window: int) -> PageTable | None:
        if not runs:
            return None
        page_tokens = self._page_tokens
        firsts = [_first_page(run.start, window, page_tokens) for run in runs]
        rows = [
            run.sequence.tables[group][first : ceil_div(run.start + run.num_tokens, page_tokens)]
            for run, first in zip(runs, firsts, strict=True)
        ]
        width = max(map(len, rows))
        # The last page is surely a live one: it takes the run's own token.
        pages = bytearray().join([row if len(row) == width else row + row[-1:] * (width - len(row)) for row in rows])
        table = torch.frombuffer(pages, dtype=torch.int64).view(len(rows), width)
        return PageTable(table, _longs(firsts), tuple(firsts))

    def _state_tables(self, group: int) -> StateTables:
        runs = self.prefills + self.decodes
        reads = [run.last_pages[group] if run.start else -1 for run in runs]
        return StateTables(_longs(reads), _longs([run.sequence.tables[group][-1] for run in runs]))


def _longs(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))  # torch takes ten times as long to read lists


def _first_page(position: int, window: int, page_tokens: int) -> int:
    """Number of the first page that the token at `position` attends to."""
    return max(0, position + 1 - window) // page_tokens if window else 0
