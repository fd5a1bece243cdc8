"""The attention function that Hugging Face modules call, and the forward it belongs to.

Registered with transformers' `AttentionInterface` under one name. With no mask function registered under that name,
transformers builds no mask at all. Which batch and pool a call is for, it finds in a context variable that
`PagedModel.forward` sets. Knows how a layer's call maps onto a pool; nothing of which models are served.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from transformers import AttentionInterface

from disagg.messages.heads import RankHeads
from disagg.models.attention.backend import AttentionPlan, Capabilities, DecodeWork, PrefillWork, Scoring
from disagg.models.attention.choice import MadeBackends
from disagg.models.attention.torch_backend import TorchPlan
from disagg.models.attention.writer import Rotator, writer_of
from disagg.models.batch import AttentionTables, ForwardBatch, PrefillRun
from disagg.models.pool import AttentionPages, Pool
from disagg.models.ranks import Ranks

ATTENTION_NAME = "disagg_paged"


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer's K and V are: layer `index` of those in the pages of layer group `group`, both counted from 0.

    writes: False of a layer that has no K and V of its own and reads those of an earlier one, which has the same place.
    cut: which heads of what the layer passes are this rank's; None if all are.
    """

    group: int
    index: int
    writes: bool = True
    cut: RankHeads | None = None


class LayerAttention(Protocol):
    """What one forward does with each layer's call."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """query, key, value: [1, heads, N, head_dim]. Returns [1, N, query_heads, head_dim]."""


class RotatingAttention(Protocol):
    """A module whose queries, keys and values are one tensor, and not rotated yet (models/fused)."""

    layer_idx: int
    head_dim: int
    scaling: float
    head_norms: Any  # of queries and keys, or None


_ACTIVE: ContextVar[LayerAttention | None] = ContextVar("disagg_layer_attention", default=None)


@contextlib.contextmanager
def active(attention: LayerAttention) -> Iterator[None]:
    """Within it, calls of the registered function in this thread go to `attention`."""
    token = _ACTIVE.set(attention)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls, with its conventions: see LayerAttention.attend for the shapes."""
    attention = _ACTIVE.get()
    assert attention is not None, "paged attention was called outside PagedModel.forward"
    return attention.attend(module, query, key, value, attention_mask, options), None


def rotating_attention(
    module: RotatingAttention, qkv: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """What fused modules call. qkv: [N, (query_heads + 2 * kv_heads) * head_dim]; rotation: cosines and sines, [1, N, head_dim]
    each. Returns [N, query_heads, head_dim]."""
    attention = _ACTIVE.get()
    assert isinstance(attention, PagedAttention), "fused attention was called outside PagedModel.forward"
    return attention.rotate_and_attend(module, qkv, rotation)


AttentionInterface.register(ATTENTION_NAME, paged_attention)


class PagedAttention:
    """One forward over one pool: writes each layer's new K and V to their places, then attends over the pages."""

    def __init__(
        self,
        batch: ForwardBatch,
        pool: Pool,
        layer_places: Mapping[int, LayerPlace],
        backends: Mapping[int, MadeBackends],
        ranks: Ranks,
        written: Callable[[int], None] | None = None,
    ) -> None:
        """layer_places: of every layer that calls attention, by its index in the model. backends: of every group of such layers,
        by its index. written: see PagedModel.forward."""
        self._written = written
        self._layer_places = layer_places
        self._ranks = ranks
        self._calls = dict.fromkeys(layer_places, 0)
        self._groups = {
            index: _GroupAttention(batch, tables, view, backends[index])
            for index, (tables, view) in enumerate(zip(batch.tables, pool.views, strict=True))
            if isinstance(tables, AttentionTables) and isinstance(view, AttentionPages)
        }

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        layer = cast(int, module.layer_idx)
        self._calls[layer] += 1
        assert attention_mask is None, "transformers built a mask that paged attention would ignore"
        where = self._layer_places[layer]
        group = self._groups[where.group]
        sinks: torch.Tensor | None = options.get("s_aux")
        if where.cut is not None:
            query, key, value = query[:, where.cut.queries], key[:, where.cut.kvs], value[:, where.cut.kvs]
            sinks = None if sinks is None else sinks[where.cut.queries]
        if where.writes:
            group.writer.write(where.index, key[0], value[0])
            self._say_written(layer)
        scaling = options.get("scaling")
        if scaling is None:
            scaling = query.shape[-1] ** -0.5
        scoring = Scoring(scaling, options.get("softcap"), sinks)
        attended = group.attend(where.index, query[0], key[0], value[0], scoring).unsqueeze(0)
        return attended if where.cut is None else self._ranks.join(attended, dim=2)

    def rotate_and_attend(
        self, module: RotatingAttention, qkv: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """See rotating_attention."""
        self._calls[module.layer_idx] += 1
        where = self._layer_places[module.layer_idx]
        assert where.writes and where.cut is None, "such a layer's attention is not fused"
        group = self._groups[where.group]
        query, key, value = group.rotator.rotate_and_write(where.index, qkv, rotation, module.head_norms)
        self._say_written(module.layer_idx)
        return group.attend(where.index, query, key, value, Scoring(module.scaling))

    def _say_written(self, layer: int) -> None:
        if self._written is not None:
            self._written(layer)

    def assert_every_layer_ran_once(self) -> None:
        """A layer that bypasses the registry, or runs twice, would give wrong text without any error."""
        wrong = {layer: calls for layer, calls in self._calls.items() if calls != 1}
        assert not wrong, f"attention calls per layer, where not one: {wrong}"


class _GroupAttention:
    """What the layers of one group have in common in one forward: who attends for which rows."""

    def __init__(
        self, batch: ForwardBatch, tables: AttentionTables, view: AttentionPages, backends: MadeBackends
    ) -> None:
        self.writer = writer_of(view, tables.write_pages, batch.write_offsets)
        self.rotator = Rotator(view, tables.write_pages, batch.write_offsets)
        self._plans: list[AttentionPlan] = []
        if tables.prefills is not None and tables.tiles is not None:
            captured = next(backend for capabilities, backend in backends.prefill if capabilities.captured)
            rows = tuple(range(len(batch.prefills)))
            self._plans.append(captured.plan(PrefillWork(view, batch.prefills, tables.prefills, rows, tables.tiles)))
        elif tables.prefills is not None:
            left = list(enumerate(batch.prefills))
            for capabilities, backend in backends.prefill:
                taken, left = shares(left, capabilities)
                if taken:
                    rows, runs = zip(*taken, strict=True)
                    self._plans.append(backend.plan(PrefillWork(view, runs, tables.prefills, rows)))
            assert not left, "the last backend takes runs of any length"
        if batch.decodes is not None:
            assert tables.decodes is not None
            self._plans.append(backends.decode.plan(DecodeWork(view, batch.decodes, tables.decodes)))
        self._one_bucket = _one_bucket(self._plans, batch.num_rows)

    def attend(
        self, layer_in_group: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """query, key, value: [heads, N, head_dim]. Returns [N, query_heads, head_dim]."""
        if self._one_bucket is not None:
            return self._one_bucket.run_one_bucket(layer_in_group, query, scoring)
        query_heads, num_rows, head_dim = query.shape
        out = torch.empty((num_rows, query_heads, head_dim), dtype=query.dtype, device=query.device)
        for plan in self._plans:
            plan.run(layer_in_group, query, key, value, scoring, out)
        return out


def _one_bucket(plans: Sequence[AttentionPlan], num_rows: int) -> TorchPlan | None:
    """The only plan, if it needs no output to write to."""
    plan = plans[0] if len(plans) == 1 else None
    return plan if isinstance(plan, TorchPlan) and plan.is_one_bucket(num_rows) else None


def shares(
    runs: list[tuple[int, PrefillRun]], capabilities: Capabilities
) -> tuple[list[tuple[int, PrefillRun]], list[tuple[int, PrefillRun]]]:
    """(what a backend takes of runs, what it leaves), each with its row of the page table. K and V of all are in their pages:
    what is left may be before and behind what is taken."""
    taken, left = [], []
    for row, run in runs:
        before, count = capabilities.share(run)
        if count:
            taken.append((row, _part(run, before, count)))
        parts = ((0, before), (before + count, run.num_tokens - before - count)) if count else ((0, run.num_tokens),)
        left += [(row, _part(run, first, rows)) for first, rows in parts if rows]
    return taken, left


def _part(run: PrefillRun, first: int, count: int) -> PrefillRun:
    return replace(run, start=run.start + first, num_tokens=count, context_tokens=run.context_tokens + first)
