"""Decode steps as CUDA graphs: all that a forward launches, in one launch. One graph per batch size of a few.

    batch of n rows ──> the smallest captured size that holds it: rows n, n + 1, ... are of no sequence
        host: one copy of all its integers ──> the tensors that every graph reads ──> replay ──> logits [n, vocab], and
        (while the step before it runs)                    (one launch)                          each row's first argmax

A row of no sequence has length 0 and no place (page -1): it writes nothing, and what it computes is dropped. What depends on
lengths is decided on the device (attention/triton_decode), so a graph serves any lengths. The first argmax is written where the
next step looks for tokens that it carries over: of greedy rows nothing more is to be done between two graphs.

Knows a model and a pool; nothing of plans or samplers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from disagg.models.argmax.first import first_argmax_into
from disagg.models.batch import AttentionTables, DecodeBatch, ForwardBatch, PageTable
from disagg.models.device import Uploads, upload
from disagg.models.model import PagedModel
from disagg.models.pool import Pool
from disagg.models.spread.launch import spread

logger = logging.getLogger(__name__)

MOST_ROWS = 512  # of a captured batch: larger ones keep the GPU busy for longer than launching takes
FEW_ROWS = 8  # up to here sizes double, then there are four per doubling
NO_PAGE = -1


def sizes_up_to(max_rows: int) -> list[int]:
    """Batch sizes to capture: none is left with over a quarter of its rows empty, but for the smallest."""
    sizes, size = [1], 1
    most = min(max_rows, MOST_ROWS)
    while size < most:
        size += size if size < FEW_ROWS else max(FEW_ROWS, 1 << (size.bit_length() - 3))
        sizes.append(min(size, most))
    return sizes


class DecodeGraphs:
    """`capture` its variants, then `forward` for any batch that is `captured`."""

    def __init__(self, model: PagedModel, pool: Pool, max_rows: int, tokens_before: Tensor) -> None:
        """tokens_before: what any batch carries tokens over from (models/batch), at least max_rows of them. Each forward writes
        its rows' first argmax there."""
        self._model = model
        self._pool = pool
        self._sizes = sizes_up_to(max_rows)
        self._inputs = _Inputs(model, pool, self._sizes[-1], tokens_before)
        self._logits = torch.empty(0)  # [largest size, vocab], in the dtype that the model turns out to give
        self._first = tokens_before[: self._sizes[-1]]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._memory = GraphMemory()

    @staticmethod
    def fit(model: PagedModel) -> bool:
        """Whether steps of the model can be captured: on a GPU, by backends that may be part of a graph, and with collectives
        of this rank's group only (NCCL's, which all its ranks capture and replay in one order)."""
        return model.device.type == "cuda" and model.spread is None and model.may_be_captured

    @property
    def variants(self) -> list[int]:
        """Rows of each graph, in rising order."""
        return self._sizes

    @torch.inference_mode()
    def capture(self, variants: Sequence[int]) -> None:
        """See Capturable."""
        self._graphs |= self._memory.capture_each(variants, self._inputs.batch, self._run)

    def _run(self, batch: ForwardBatch) -> None:
        if not self._logits.numel():
            logits = self._model.forward(batch, self._pool)
            self._logits = logits.new_empty((self._sizes[-1], self._model.vocab_size))
        logits = self._logits[: batch.num_rows]
        self._model.forward(batch, self._pool, logits_out=logits)
        first_argmax_into(logits, self._first[: batch.num_rows])

    def captured(self, batch: ForwardBatch) -> bool:
        return not batch.prefills and batch.num_rows <= max(self._graphs, default=0)

    def graph_of(self, rows: int) -> torch.cuda.CUDAGraph:
        """The one that serves a batch of so many rows."""
        return self._graphs[min(size for size in self._graphs if size >= rows)]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """(logits as PagedModel.forward gives them, the place of each row's first maximum, int64). batch: on the host.

        What it returns lasts until the next call.
        """
        assert self.captured(batch) and batch.decodes is not None, "not a batch that was captured"
        self._inputs.fill(batch)
        self.graph_of(batch.num_rows).replay()
        if batch.wants_every_row:
            return self._logits[: batch.num_rows], self._first[: batch.num_rows]
        rows = upload(batch.logits_rows, self._logits.device)
        return self._logits.index_select(0, rows), self._first.index_select(0, rows)


class _Inputs:
    """The tensors that every graph reads: columns of a batch, a row each, and a table of pages per layer group."""

    def __init__(self, model: PagedModel, pool: Pool, max_rows: int, tokens_before: Tensor) -> None:
        device = model.device
        self._uploads = Uploads(device)
        self._tokens_before = tokens_before
        self._longest = model.max_model_len
        self._max_rows = max_rows
        # ids, positions, offsets, lengths, carried, then of each group: pages to write, first pages
        self._columns = torch.zeros((5 + 2 * len(pool.groups), max_rows), dtype=torch.int64, device=device)
        self._empty = torch.zeros(self._columns.shape, dtype=torch.int64)
        self._empty[4] = -1
        self._empty[5::2] = NO_PAGE
        self._columns.copy_(self._empty)
        self._tables = []
        for group in pool.groups:
            seen = min(group.window, self._longest) if group.window else self._longest
            width = seen // pool.page_tokens + 2  # a window begins and ends within pages
            self._tables.append(torch.zeros((max_rows, width), dtype=torch.int64, device=device))
        self._all_rows = torch.arange(max_rows, device=device)

    def batch(self, rows: int) -> ForwardBatch:
        """The first rows of them, as a batch."""
        ids, positions, offsets, lengths, carried, *of_groups = self._columns[:, :rows]
        tables = tuple(
            AttentionTables(write_pages, None, PageTable(table[:rows], first_pages, (0,) * rows))
            for table, write_pages, first_pages in zip(self._tables, of_groups[::2], of_groups[1::2], strict=True)
        )
        decodes = DecodeBatch(0, lengths, max_length=self._longest, total_length=1)
        all_rows = self._all_rows[:rows]
        return ForwardBatch(ids, positions, offsets, (), decodes, all_rows, tables, carried, self._tokens_before)

    def fill(self, batch: ForwardBatch) -> None:
        """With a batch that is on the host, by one copy. Rows behind its own become rows of no sequence."""
        assert batch.decodes is not None
        rows = batch.num_rows
        tables = [table for table in batch.tables if isinstance(table, AttentionTables)]
        decodes = [table.decodes for table in tables if table.decodes is not None]
        pages = [table.pages for table in decodes]
        columns = self._empty.clone()
        carried = columns[4, :rows] if batch.carried is None else batch.carried
        values = [batch.input_ids, batch.positions, batch.write_offsets, batch.decodes.lengths, carried]
        for of_group, decode in zip(tables, decodes, strict=True):
            values += [of_group.write_pages, decode.first_pages]
        for column, value in zip(columns, values, strict=True):
            column[:rows] = value
        arrived = self._uploads.together([columns, *pages])
        spread(arrived[0], self._columns, arrived[1:], self._tables)


# ---- what graphs of all kinds of steps have in common


class Capturable(Protocol):
    """Graphs of one kind of steps."""

    @property
    def variants(self) -> Sequence[Any]:
        """What tells its graphs apart, the smallest first."""

    def capture(self, variants: Sequence[Any]) -> None:
        """Those that are larger come first, in one call or in several: what comes later finds room in their memory.

        Raises RuntimeError if something in the model cannot be captured, such as a look at the device's values.
        """


Graphs = TypeVar("Graphs", bound=Capturable)
Variant = TypeVar("Variant", int, tuple[int, bool], tuple[int, int])


def captured_or_none(graphs: Graphs, steps: str) -> Graphs | None:
    """All of them. None, and the reason in the log, where they cannot be captured. steps: what they are of."""
    started_s = time.perf_counter()
    try:
        graphs.capture(graphs.variants)
    except RuntimeError as error:
        torch.cuda.synchronize()
        logger.warning("%s are launched one kernel at a time: %s", steps, str(error).partition("\n")[0])
        return None
    rows = sorted({each if isinstance(each, int) else each[0] for each in graphs.variants})
    seconds = time.perf_counter() - started_s
    logger.info("%s of %s rows are captured, in %.1f s", steps, ", ".join(map(str, rows)), seconds)
    return graphs


class GraphMemory:
    """What graphs of one kind, of which one runs at a time, compute in."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture_each(
        self,
        variants: Sequence[Variant],
        batch_of: Callable[[Variant], ForwardBatch],
        run: Callable[[ForwardBatch], None],
    ) -> dict[Variant, torch.cuda.CUDAGraph]:
        """A graph for each variant, which are in rising order. The largest is captured first."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graphs = {}
        for variant in reversed(variants):
            batch = batch_of(variant)
            run(batch)  # compiles, and takes what libraries keep for themselves
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # The thread that transfers may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                run(batch)
            graphs[variant] = graph
        return graphs
