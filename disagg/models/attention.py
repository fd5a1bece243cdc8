"""The attention function that Hugging Face modules call, and the forward it belongs to.

Registered with transformers' `AttentionInterface` under one name. With no mask function registered under that name,
transformers builds no mask at all. Which batch and pool a call is for, it finds in a context variable that
`PagedModel.forward` sets. Knows how a layer's call maps onto a pool; nothing of which models are served.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol, cast

import torch
from transformers import AttentionInterface

from disagg.models.batch import ForwardBatch
from disagg.models.pool import KvPool
from disagg.models.runs import Scoring, WindowPlan

ATTENTION_NAME = "disagg_paged"


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


AttentionInterface.register(ATTENTION_NAME, paged_attention)


class PagedAttention:
    """One forward over one pool: writes each layer's new K and V to their slots, then attends over the pages."""

    def __init__(self, batch: ForwardBatch, pool: KvPool, slot_of_layer: dict[int, int]) -> None:
        self._batch = batch
        self._pool = pool
        self._slot_of_layer = slot_of_layer
        self._row_index = pool.row_index(batch.slot_pages, batch.slot_offsets)
        self._plans: dict[int | None, WindowPlan] = {}
        self._calls = bytearray(len(slot_of_layer))
        totals = [run.total_tokens for run in batch.prefills]
        self._longest = max([*totals, batch.decodes.max_length if batch.decodes else 0])

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        layer_slot = self._slot_of_layer[cast(int, module.layer_idx)]
        self._calls[layer_slot] += 1
        assert attention_mask is None, "transformers built a mask that paged attention would ignore"
        self._pool.write(layer_slot, self._row_index, key[0], value[0])
        plan = self._plan(options.get("sliding_window"))
        scaling = options.get("scaling")
        if scaling is None:
            scaling = query.shape[-1] ** -0.5
        scoring = Scoring(scaling, options.get("softcap"), options.get("s_aux"))
        return plan.attend(layer_slot, query, key, value, scoring)

    def assert_every_layer_ran_once(self) -> None:
        """A layer that bypasses the registry, or runs twice, would give wrong text without any error."""
        wrong = {layer: self._calls[slot] for layer, slot in self._slot_of_layer.items() if self._calls[slot] != 1}
        assert not wrong, f"attention calls per layer, where not one: {wrong}"

    def _plan(self, window: int | None) -> WindowPlan:
        if window is not None and window >= self._longest:
            window = None  # the window holds every sequence, so that one plan serves these layers too
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = WindowPlan(
                self._batch, self._pool, window, one_bucket=self._pool.device.type != "cpu"
            )
        return plan
