"""Pools of a rank for tests of offload, of random bytes. Knows nothing of storage, whose libraries a GPU machine may lack."""

from __future__ import annotations

import torch

from disagg.memory.groups import spec_of
from disagg.memory.layout import PageSizing, PoolLayout, pool_layout
from disagg.models.pool import Pool
from disagg.offload.keys import Scope
from tests.offload.pages import CHECKPOINT_TOKENS

POOL_LARGE = 12


def layout_of(scope: Scope, tp: int, sizing: PageSizing = PageSizing.LCM) -> PoolLayout:
    """Of a rank."""
    specs = [spec_of(group.on_rank(tp), scope.page_tokens) for group in scope.groups]
    return pool_layout(specs, scope.page_tokens, CHECKPOINT_TOKENS, sizing)


def pool_of(scope: Scope, tp: int, sizing: PageSizing = PageSizing.LCM, num_large: int = POOL_LARGE) -> Pool:
    """A rank's, of random bytes."""
    layout = layout_of(scope, tp, sizing)
    groups = tuple(group.on_rank(tp) for group in scope.groups)
    pool = Pool.create(groups, num_large, layout.large_bytes, layout.strides, scope.page_tokens, "cpu")
    pool.bytes.copy_(
        torch.randint(0, 256, pool.bytes.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    )
    return pool
