"""Short prompts and short chunks of prompts as CUDA graphs: the GPU computes a few hundred rows faster than Python launches them.

    batch of n rows ──> the smallest captured size that holds it; rows behind its own are of no sequence, and write nothing
        host: one copy of all its integers ──> the tensors that every graph reads ──> replay ──> logits of sampled rows

Attention is that of the backend whose tiles (which rows, behind how many tokens) are on the device. Where another one is faster
after long contexts, the GPU is busy for longer there than Python: those are launched kernel by kernel.

Knows a model and a pool; nothing of plans or samplers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.models.batch import AttentionTables, ForwardBatch, PageTable, PrefillRun
from disagg.models.graphs import NO_PAGE, DecodeGraphs, GraphMemory
from disagg.models.model import PagedModel
from disagg.models.pool import AttentionPages, Pool

SIZES = (64, 128, 256, 384, 512, 768)  # rows; above, the GPU takes longer than Python
SILENT_SIZES = (512, 768)  # also captured without the output layer, for chunks that no token is sampled from
MOST_CHUNK_ROWS = SIZES[-1]
MOST_RUNS = 8  # of a captured batch
MOST_TOKENS = 8192 + 512  # of a run with its context, where another backend is faster behind more
MOST_TOKENS_ALIKE = 65536 + 512  # where none is: what all runs' tables of pages take, which each step copies


@dataclass(frozen=True, slots=True)
class _Group:
    """Of one layer group, what all graphs read."""

    write_pages: Tensor
    first_pages: Tensor
    table: Tensor
    tiles: Tensor


class PrefillGraphs:
    """`capture` its variants, then `forward` for any batch that is `captured`."""

    def __init__(self, model: PagedModel, pool: Pool, most_rows: int) -> None:
        """most_rows: of steps that are to be captured, as far as any are."""
        from disagg.models.attention.triton_prefill import most_tiles

        self._model = model
        self._pool = pool
        self._views = [view for view in pool.views if isinstance(view, AttentionPages)]
        most = MOST_TOKENS_ALIKE if model.chunks_are_captured_as_launched else MOST_TOKENS
        self._longest = longest = min(most, model.max_model_len)
        self._sizes = sizes_for(SIZES, most_rows)
        rows = self._sizes[-1]
        shapes: list[tuple[int, ...]] = [(rows,), (rows,), (rows,), (MOST_RUNS,)]
        for view in self._views:
            # A window begins and ends within pages.
            shapes += [
                (rows,),
                (MOST_RUNS,),
                (MOST_RUNS, longest // pool.page_tokens + 2),
                (most_tiles(view, rows, MOST_RUNS), 4),
            ]
        self._shapes = shapes
        self._empty = torch.zeros(sum(map(math.prod, shapes)), dtype=torch.int64)
        for write_pages in self._split(self._empty)[4::4]:
            write_pages.fill_(NO_PAGE)
        self._inputs = self._empty.to(model.device, copy=True)
        self._ids, self._positions, self._offsets, self._logits_rows, *groups = self._split(self._inputs)
        self._groups = [_Group(*groups[at : at + 4]) for at in range(0, len(groups), 4)]
        self._logits = torch.empty(0)  # [MOST_RUNS, vocab], in the dtype that the model turns out to give
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}  # by size, and whether any token is sampled
        self._memory = GraphMemory()

    @staticmethod
    def fit(model: PagedModel) -> bool:
        """Whether chunks of the model can be captured, as far as attention goes."""
        return DecodeGraphs.fit(model) and model.prefill_may_be_captured

    @property
    def variants(self) -> list[tuple[int, bool]]:
        """(rows, whether any token is sampled) of each graph, in rising order."""
        silent = [(size, False) for size in self._sizes if size in SILENT_SIZES]
        return sorted([*((size, True) for size in self._sizes), *silent])

    @torch.inference_mode()
    def capture(self, variants: Sequence[tuple[int, bool]]) -> None:
        """See Capturable."""
        self._graphs |= self._memory.capture_each(variants, lambda variant: self.batch(*variant), self.run)

    def batch(self, size: int, sampled: bool) -> ForwardBatch:
        """The first rows of the inputs. Which runs they are is in the tiles; here they are any."""
        first = size - MOST_RUNS + 1
        runs = (PrefillRun(0, first, 0, False), *(PrefillRun(row, 1, 0, False) for row in range(first, size)))
        tables = tuple(
            AttentionTables(
                group.write_pages[:size],
                PageTable(group.table, group.first_pages, (0,) * MOST_RUNS),
                None,
                group.tiles[:most],
            )
            for group, most in zip(self._groups, self._most_tiles(size), strict=True)
        )
        rows = self._logits_rows if sampled else self._logits_rows[:0]
        columns = (self._ids[:size], self._positions[:size], self._offsets[:size])
        return ForwardBatch(*columns, runs, None, rows, tables)

    def run(self, batch: ForwardBatch) -> None:
        """What is captured."""
        logits = self._model.forward(batch, self._pool)
        if not batch.logits_rows.shape[0]:
            return
        if not self._logits.numel():
            self._logits = torch.empty_like(logits)
        self._logits.copy_(logits)

    def captured(self, batch: ForwardBatch) -> bool:
        return (
            bool(self._graphs)
            and batch.decodes is None
            and batch.carried is None
            and batch.num_rows <= self._sizes[-1]
            and len(batch.prefills) <= MOST_RUNS
            and all(run.total_tokens <= self._longest for run in batch.prefills)
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> tuple[Tensor, None]:
        """(logits as PagedModel.forward gives them, None), which last until the next call. batch: on the host."""
        assert self.captured(batch), "not a batch that was captured"
        size = next(size for size in self._sizes if size >= batch.num_rows)
        sampled = batch.logits_rows.shape[0]
        self._fill(batch)
        self._graphs.get((size, bool(sampled)), self._graphs[size, True]).replay()
        return self._logits[:sampled], None

    def _fill(self, batch: ForwardBatch) -> None:
        """By one copy. Rows behind the batch's own become rows of no sequence."""
        from disagg.models.attention.triton_prefill import tiles_of

        on_gpu = self._inputs.device.type != "cpu"
        packed = torch.empty(self._empty.shape, dtype=torch.int64, pin_memory=on_gpu).copy_(self._empty)
        columns = self._split(packed)
        rows, runs = batch.num_rows, len(batch.prefills)
        for column, value in zip(columns, (batch.input_ids, batch.positions, batch.write_offsets), strict=False):
            column[:rows] = value
        columns[3][: batch.logits_rows.shape[0]] = batch.logits_rows
        for group, (view, tables) in enumerate(zip(self._views, batch.tables, strict=True)):
            assert isinstance(tables, AttentionTables) and tables.prefills is not None
            write_pages, first_pages, table, tiles = columns[4 + 4 * group : 8 + 4 * group]
            write_pages[:rows] = tables.write_pages
            first_pages[:runs] = tables.prefills.first_pages
            table[:runs, : tables.prefills.pages.shape[1]] = tables.prefills.pages
            cut = tiles_of(view, batch.prefills, range(runs))
            tiles[: cut.shape[0]] = cut
        self._inputs.copy_(packed, non_blocking=True)

    def _split(self, packed: Tensor) -> list[Tensor]:
        """Views of it, in the order of the shapes: ids, positions, offsets, rows of logits, then of each group four."""
        parts = torch.split(packed, [math.prod(shape) for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _most_tiles(self, size: int) -> list[int]:
        from disagg.models.attention.triton_prefill import most_tiles

        return [most_tiles(view, size, MOST_RUNS) for view in self._views]


def sizes_for(sizes: Sequence[int], most_rows: int) -> tuple[int, ...]:
    """Those that steps of up to so many rows need, of sizes in rising order."""
    smaller = [size for size in sizes if size < most_rows]
    return tuple(sizes[: len(smaller) + 1])
