"""Which steps of a server are captured as CUDA graphs: kinds of steps, and how many rows the largest of each has.

    only sequences that decode ──> models/graphs        only chunks of prompts ──> models/prefill_graphs
    both in one step           ──> models/mixed_graphs  larger ones, and what cannot be captured ──> launched kernel by kernel

Knows kinds of graphs, a model and a pool; nothing of plans or samplers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from disagg.models.batch import ForwardBatch
from disagg.models.graphs import MOST_ROWS, DecodeGraphs, captured_or_none
from disagg.models.mixed_graphs import MixedGraphs
from disagg.models.model import PagedModel
from disagg.models.pool import Pool
from disagg.models.prefill_graphs import MOST_CHUNK_ROWS, PrefillGraphs

Graphs = DecodeGraphs | PrefillGraphs | MixedGraphs


@dataclass(frozen=True, slots=True)
class Captures:
    """Rows of the largest steps that are captured. decodes: of sequences that decode; chunks: of prompts; mixed: of prompts
    beside sequences that decode. 0: none of that kind are."""

    decodes: int = MOST_ROWS
    chunks: int = MOST_CHUNK_ROWS
    mixed: int = 0


NO_CAPTURES = Captures(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Kind:
    """Of steps: what is said of them, and their graphs, of which none is captured yet."""

    name: str
    make: Callable[[], Graphs]


def kinds(model: PagedModel, pool: Pool, max_slots: int, tokens_before: Tensor, captures: Captures) -> list[Kind]:
    """Those that are wanted, and that the model may have. tokens_before: as of DecodeGraphs."""
    found = []
    if captures.decodes and DecodeGraphs.fit(model):
        most = min(max_slots, captures.decodes)
        found.append(Kind("decode steps", lambda: DecodeGraphs(model, pool, most, tokens_before)))
    if captures.chunks and PrefillGraphs.fit(model):
        found.append(Kind("short chunks", lambda: PrefillGraphs(model, pool, captures.chunks)))
    if captures.mixed and MixedGraphs.fit(model):
        make = lambda: MixedGraphs(model, pool, max_slots, captures.mixed, tokens_before)  # noqa: E731
        found.append(Kind("steps of both phases", make))
    return found


class CapturedSteps:
    """What has been captured. have: whether all ranks that compute the model together have a kind, of which each asks once."""

    def __init__(self, wanted: list[Kind], have: Callable[[bool], bool] = bool) -> None:
        made = [captured_or_none(kind.make(), kind.name) for kind in wanted]
        self._graphs = [graphs for graphs in made if have(graphs is not None) and graphs is not None]

    @property
    def decodes(self) -> DecodeGraphs | None:
        return next((graphs for graphs in self._graphs if isinstance(graphs, DecodeGraphs)), None)

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None] | None:
        """(logits, and where each row's first maximum is, if that is known), which last until the next call; None for a batch
        that is not captured. batch: on the host."""
        for graphs in self._graphs:
            if graphs.captured(batch):
                return graphs.forward(batch)
        return None
