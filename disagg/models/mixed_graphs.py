"""Steps of both phases as CUDA graphs: a chunk of prompts, and a token for each sequence that decodes.

    row        0 1 2 3 4 5 6 │ 7 8 │ 9 10 11 12
               chunks        │ decodes   │ of no sequence: they write nothing

Which row is the first that decodes is said on the device, so one graph serves any parts of so many rows. So are the rows whose
logits are wanted: there is a graph for few of them and one for many. Attention is that of the backends that may be captured, each
by its own tables: tiles of the chunks (attention/triton_prefill), lengths of the sequences (attention/triton_decode).

Knows a model and a pool; nothing of plans or samplers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.models.argmax.first import first_argmax_into
from disagg.models.batch import AttentionTables, DecodeBatch, ForwardBatch, PageTable, PrefillRun
from disagg.models.device import Uploads
from disagg.models.graphs import NO_PAGE, GraphMemory
from disagg.models.model import PagedModel
from disagg.models.pool import AttentionPages, Pool
from disagg.models.prefill_graphs import MOST_RUNS, MOST_TOKENS, MOST_TOKENS_ALIKE, PrefillGraphs, sizes_for
from disagg.models.spread.launch import spread

SIZES = (64, 128, 256, 384, 512, 640, 768)  # rows of both phases; above, the GPU takes longer than Python
MOST_DECODES = 256  # rows that decode
FEW_LOGITS = 64  # rows whose logits are wanted


@dataclass(frozen=True, slots=True)
class _Group:
    """Of one layer group, what all graphs read. chunks and sequences: [rows, width], tables of pages."""

    write_pages: Tensor
    chunk_firsts: Tensor
    tiles: Tensor
    sequence_firsts: Tensor
    chunks: Tensor
    sequences: Tensor


class MixedGraphs:
    """`capture` its variants, then `forward` for any batch that is `captured`."""

    def __init__(self, model: PagedModel, pool: Pool, max_slots: int, most_chunks: int, tokens_before: Tensor) -> None:
        """most_chunks: rows of prompts in steps that are to be captured, as far as any are. tokens_before: what any batch carries
        tokens over from (models/batch)."""
        from disagg.models.attention.triton_prefill import most_tiles

        self._model = model
        self._pool = pool
        self._tokens_before = tokens_before
        self._uploads = Uploads(model.device)
        self._views = [view for view in pool.views if isinstance(view, AttentionPages)]
        self._most_decodes = min(MOST_DECODES, max_slots)
        most = MOST_TOKENS_ALIKE if model.chunks_are_captured_as_launched else MOST_TOKENS
        self._longest_chunk = min(most, model.max_model_len)
        self._sizes = sizes_for(SIZES, most_chunks + self._most_decodes)
        rows, self._most_logits = self._sizes[-1], MOST_RUNS + self._most_decodes
        # ids, positions, offsets, carried; rows of logits; the first row that decodes; lengths
        self._lengths = [rows, rows, rows, rows, self._most_logits, 1, self._most_decodes]
        for view in self._views:
            self._lengths += [rows, MOST_RUNS, 4 * most_tiles(view, rows, MOST_RUNS), self._most_decodes]
        self._empty = torch.zeros(sum(self._lengths), dtype=torch.int64)
        parts = self._split(self._empty)
        for minus_one in (parts[3], *parts[7::4]):
            minus_one.fill_(NO_PAGE)
        self._columns = self._empty.to(model.device, copy=True)
        self._ids, self._positions, self._offsets, self._carried, *rest = self._split(self._columns)
        self._logits_rows, self._first_row, self._decode_lengths, *columns = rest
        self._groups = [
            _Group(
                columns[4 * at],
                columns[4 * at + 1],
                columns[4 * at + 2].view(-1, 4),
                columns[4 * at + 3],
                self._table(MOST_RUNS, self._longest_chunk),
                self._table(self._most_decodes, self._seen(view)),
            )
            for at, view in enumerate(self._views)
        ]
        self._logits = torch.empty(0)  # [most logits, vocab], in the dtype that the model turns out to give
        self._first = torch.zeros(self._most_logits, dtype=torch.int64, device=model.device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by rows, and rows of logits
        self._memory = GraphMemory()

    @staticmethod
    def fit(model: PagedModel) -> bool:
        """Whether steps of the model can be captured, as far as attention goes."""
        return PrefillGraphs.fit(model)

    @property
    def variants(self) -> list[tuple[int, int]]:
        """(rows, rows of logits) of each graph, in rising order."""
        logits = sorted({min(FEW_LOGITS, self._most_logits), self._most_logits})
        return [(size, most) for size in self._sizes for most in logits]

    @torch.inference_mode()
    def capture(self, variants: Sequence[tuple[int, int]]) -> None:
        """See Capturable."""
        self._graphs |= self._memory.capture_each(variants, lambda variant: self.batch(*variant), self.run)

    def batch(self, size: int, logits: int) -> ForwardBatch:
        """The first rows of the inputs. Which of them are of which phase is in the tables; here they are any."""
        from disagg.models.attention.triton_prefill import most_tiles

        first = size - MOST_RUNS + 1
        runs = (PrefillRun(0, first, 0, False), *(PrefillRun(row, 1, 0, False) for row in range(first, size)))
        none = (0,) * self._most_decodes
        tables = tuple(
            AttentionTables(
                group.write_pages[:size],
                PageTable(group.chunks, group.chunk_firsts, none[:MOST_RUNS]),
                PageTable(group.sequences, group.sequence_firsts, none),
                group.tiles[: most_tiles(view, size, MOST_RUNS)],
            )
            for group, view in zip(self._groups, self._views, strict=True)
        )
        decodes = DecodeBatch(0, self._decode_lengths, self._model.max_model_len, 1, self._first_row)
        columns = (self._ids[:size], self._positions[:size], self._offsets[:size])
        carried, before = self._carried[:size], self._tokens_before
        return ForwardBatch(*columns, runs, decodes, self._logits_rows[:logits], tables, carried, before)

    def run(self, batch: ForwardBatch) -> None:
        """What is captured."""
        if not self._logits.numel():
            logits = self._model.forward(batch, self._pool)
            self._logits = logits.new_empty((self._most_logits, self._model.vocab_size))
        wanted = batch.logits_rows.shape[0]
        logits = self._logits[:wanted]
        self._model.forward(batch, self._pool, logits_out=logits)
        first_argmax_into(logits, self._first[:wanted])

    def captured(self, batch: ForwardBatch) -> bool:
        return (
            bool(self._graphs)
            and batch.decodes is not None
            and 0 < len(batch.prefills) <= MOST_RUNS
            and batch.num_rows <= self._sizes[-1]
            and batch.decodes.num_sequences <= self._most_decodes
            and all(run.total_tokens <= self._longest_chunk for run in batch.prefills)
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """(logits as PagedModel.forward gives them, the place of each row's first maximum, int64). batch: on the host.

        What it returns lasts until the next call.
        """
        assert self.captured(batch), "not a batch that was captured"
        wanted = batch.logits_rows.shape[0]
        variant = next((rows, most) for rows, most in self.variants if rows >= batch.num_rows and most >= wanted)
        self._fill(batch)
        self._graphs[variant].replay()
        return self._logits[:wanted], self._first[:wanted]

    def _fill(self, batch: ForwardBatch) -> None:
        """By one copy. Rows behind the batch's own become rows of no sequence."""
        from disagg.models.attention.triton_prefill import tiles_of

        assert batch.decodes is not None
        columns = self._empty.clone()
        parts = self._split(columns)
        values = [batch.input_ids, batch.positions, batch.write_offsets]
        values.append(parts[3][: batch.num_rows] if batch.carried is None else batch.carried)
        values += [batch.logits_rows, torch.tensor([batch.decodes.start]), batch.decodes.lengths]
        pages, tables = [], []
        for group, view, of_group in zip(self._groups, self._views, batch.tables, strict=True):
            assert isinstance(of_group, AttentionTables)
            chunks, sequences = of_group.prefills, of_group.decodes
            assert chunks is not None and sequences is not None
            tiles = tiles_of(view, batch.prefills, range(len(batch.prefills)))
            values += [of_group.write_pages, chunks.first_pages, tiles.view(-1), sequences.first_pages]
            pages += [chunks.pages, sequences.pages]
            tables += [group.chunks, group.sequences]
        for part, value in zip(parts, values, strict=True):
            part[: value.shape[0]] = value
        arrived, *arrived_pages = self._uploads.together([columns, *pages])
        spread(arrived, self._columns, arrived_pages, tables)

    def _split(self, columns: Tensor) -> Sequence[Tensor]:
        return torch.split(columns, self._lengths)

    def _table(self, rows: int, tokens: int) -> Tensor:
        """Of pages that hold so many tokens. A window begins and ends within pages."""
        width = math.ceil(tokens / self._pool.page_tokens) + 2
        return torch.zeros((rows, width), dtype=torch.int64, device=self._model.device)

    def _seen(self, view: AttentionPages) -> int:
        """Tokens that a sequence's newest one attends to, at most."""
        longest = self._model.max_model_len
        return min(view.group.window, longest) if view.group.window else longest
