"""Pools for tests: sized as the engines size them, and whose pages are handed out in shuffled order."""

from __future__ import annotations

import random

import torch

from disagg.memory.groups import spec_of
from disagg.memory.layout import PageSizing, pool_layout
from disagg.messages.layout import LayerGroup
from disagg.models.pool import AttentionPages, Pool


def make_pool(
    groups: tuple[LayerGroup, ...],
    num_large: int,
    page_tokens: int,
    sizing: PageSizing = PageSizing.LCM,
    device: str | torch.device = "cpu",
) -> Pool:
    layout = pool_layout([spec_of(group, page_tokens) for group in groups], page_tokens, page_tokens, sizing)
    return Pool.create(groups, num_large, layout.large_bytes, layout.strides, page_tokens, device)


def fill(pool: Pool, std: float = 3.0, seed: int = 0) -> None:
    """Numbers in every attention page, as if it had been used before."""
    generator = torch.Generator(pool.device).manual_seed(seed)
    for view in pool.views:
        if isinstance(view, AttentionPages):
            view.kv.normal_(std=std, generator=generator)


class PageSource:
    """Hands out small pages in shuffled order. A large page is one group's for ever."""

    def __init__(self, pool: Pool, seed: int = 0) -> None:
        self._per_large = [view.num_pages // pool.num_large for view in pool.views]
        self._rng = random.Random(seed)
        self._large = list(range(pool.num_large))
        self._rng.shuffle(self._large)
        self._free: list[list[int]] = [[] for _ in pool.views]

    def take(self, group: int) -> int:
        free = self._free[group]
        if not free:
            large, per_large = self._large.pop(), self._per_large[group]
            free += range(large * per_large, (large + 1) * per_large)
            self._rng.shuffle(free)
        return free.pop()

    def give_back(self, group: int, page: int) -> None:
        self._free[group].append(page)
