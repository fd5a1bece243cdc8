"""One layer group's KV pages as one tensor of bytes, and the views of it that attention reads and writes.

Knows the layout of a page; nothing of who owns which page, of requests, or of models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disagg.messages.layout import LayerGroup

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KvPool:
    """The pages of one layer group.

    Whatever is in the pool must be finite numbers: attention reads whole pages and gives the slots past a sequence's
    end weight zero, and zero times NaN is NaN. A new pool is zeros, and a copied or landed page was computed once.
    """

    def __init__(self, group: LayerGroup, storage: torch.Tensor, page_tokens: int) -> None:
        """storage: uint8 [num_pages, page_bytes], contiguous, aligned to the group's dtype."""
        assert storage.dtype == torch.uint8 and storage.is_contiguous(), "the pool's storage is contiguous bytes"
        assert storage.shape[1] == group.page_bytes(page_tokens), (
            f"pages of {storage.shape[1]} bytes do not hold {group.page_bytes(page_tokens)}"
        )
        layers, heads, dim = len(group.layers), group.kv_heads, group.head_dim
        self.group = group
        self.page_tokens = page_tokens
        self.num_pages = storage.shape[0]
        self.page_bytes = storage.shape[1]
        self.bytes = storage
        self.kv = storage.view(TORCH_DTYPES[group.dtype]).view(self.num_pages, layers, 2, heads, page_tokens, dim)
        # A page holds layers * 2 * heads units of [page_tokens, head_dim]. Unit (page, slot, K or V, head) is row
        # page * units_per_page + (slot * 2 + which) * heads + head of this view. The views below start at a slot's
        # first unit, so that one index, computed once per forward for slot 0, serves every layer.
        self.units_per_page = layers * 2 * heads
        units = self.kv.view(-1, page_tokens * dim)
        rows = self.kv.view(-1, dim)
        self._slot_units = [units[slot * 2 * heads :] for slot in range(layers)]
        self._slot_rows = [rows[slot * 2 * heads * page_tokens :] for slot in range(layers)]

    @classmethod
    def create(cls, group: LayerGroup, num_pages: int, page_tokens: int, device: str | torch.device) -> KvPool:
        """A pool of zeros."""
        # Not under inference_mode, even when the caller is: an inference tensor could never be written outside it.
        with torch.inference_mode(False):
            storage = torch.zeros((num_pages, group.page_bytes(page_tokens)), dtype=torch.uint8, device=device)
            return cls(group, storage, page_tokens)

    @property
    def device(self) -> torch.device:
        return self.bytes.device

    def keys(self, layer_slot: int) -> torch.Tensor:
        """[num_pages, kv_heads, page_tokens, head_dim], strided."""
        return self.kv[:, layer_slot, 0]

    def values(self, layer_slot: int) -> torch.Tensor:
        """[num_pages, kv_heads, page_tokens, head_dim], strided."""
        return self.kv[:, layer_slot, 1]

    def unit_index(self, pages: torch.Tensor) -> torch.Tensor:
        """Where the pages' units of layer slot 0 are: [2 * kv_heads * n], K before V, heads outside pages.

        pages: [n] int64, any order, repeats allowed.
        """
        heads = self.group.kv_heads
        head_units = torch.arange(2 * heads, device=pages.device).unsqueeze(1)
        return (pages * self.units_per_page + head_units).view(-1)

    def row_index(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Where the tokens' K and V rows of layer slot 0 are: [2 * kv_heads * n], K before V, heads outside tokens.

        pages, offsets: [n] int64.
        """
        heads = self.group.kv_heads
        head_units = torch.arange(2 * heads, device=pages.device).unsqueeze(1)
        return ((pages * self.units_per_page + head_units) * self.page_tokens + offsets).view(-1)

    def gather(self, layer_slot: int, unit_index: torch.Tensor, out: torch.Tensor) -> None:
        """Copies units; unit_index: from `unit_index`; out: [len(unit_index), page_tokens * head_dim]."""
        torch.index_select(self._slot_units[layer_slot], 0, unit_index, out=out)

    def write(self, layer_slot: int, row_index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores new tokens; row_index: from `row_index`; keys, values: [kv_heads, n, head_dim]."""
        rows = torch.cat((keys, values)).view(-1, self.group.head_dim)
        self._slot_rows[layer_slot].index_copy_(0, row_index, rows)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole pages, (source, destination), as if all at once: a source is read before any page is written."""
        if not pairs:
            return
        sources, destinations = zip(*pairs, strict=True)
        assert len(set(destinations)) == len(destinations), "two copies have the same destination page"
        source_pages = torch.tensor(sources, device=self.device)
        self.bytes.index_copy_(
            0, torch.tensor(destinations, device=self.device), self.bytes.index_select(0, source_pages)
        )
