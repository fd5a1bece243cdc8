"""A worker's caches as one tensor of bytes, and the views of it that the layers of each group read and write.

Knows the layout of pages; nothing of who owns which page, of requests, or of models.

    large page 0                    large page 1                    large page 2
    ┌───────────────────────────────┬───────────────────────────────┬───────────────────────────────┬── ...
    │ group 0: page 0 │ 0: page 1   │ group 1: page 3 │ 4  │  5     │ not assigned                  │
    └───────────────────────────────┴───────────────────────────────┴───────────────────────────────┴── ...
      └ strides[0] bytes              └ strides[1] bytes

Small page p of group g is at byte p * strides[g]. Every group has a view of the whole pool; whoever hands out pages sees
to it that a large page is one group's at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from disagg.messages.layout import LayerGroup, state_offsets
from disagg.messages.plan import PageCopy

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
}


class PageViews:
    """The pool as the pages of one group. bytes: uint8 [num_pages, page_bytes], rows contiguous."""

    def __init__(self, group: LayerGroup, storage: torch.Tensor, stride: int, page_tokens: int) -> None:
        """storage: the pool's, uint8 [bytes], aligned to the group's dtype. stride: bytes from one page to the next."""
        page_bytes = group.page_bytes(page_tokens)
        assert stride >= page_bytes, f"pages {stride} bytes apart do not hold {page_bytes}"
        self.group = group
        self.bytes = storage.view(-1, stride)[:, :page_bytes]

    @property
    def num_pages(self) -> int:
        return self.bytes.shape[0]

    @property
    def page_bytes(self) -> int:
        return self.bytes.shape[1]


class AttentionPages(PageViews):
    """The pages of one group of attention layers.

    kv: [num_pages, layers, 2, kv_heads, page_tokens, head_dim], strided.

    Whatever is in a page must be finite numbers: attention reads whole pages and gives the places past a sequence's end
    weight zero, and zero times NaN is NaN. A new pool is zeros, a copied or landed page was computed once, and where a
    page may have been one of another group with another dtype, or of a sequence whose values overflowed, it is zeroed first
    (`Pool.blanks`).
    """

    def __init__(self, group: LayerGroup, storage: torch.Tensor, stride: int, page_tokens: int) -> None:
        layers, heads, dim = len(group.layers), group.kv_heads, group.head_dim
        head_page_bytes = group.align_bytes(page_tokens)
        assert group.planes == 2, f"attention pages hold K and V, not {group.planes} planes"
        assert stride % head_page_bytes == 0, f"a stride of {stride} bytes is no multiple of {head_page_bytes}"
        super().__init__(group, storage, stride, page_tokens)
        self.page_tokens = page_tokens
        self.kv = self.bytes.view(TORCH_DTYPES[group.dtype]).view(-1, layers, 2, heads, page_tokens, dim)
        # What a page holds of one layer and head, K or V, is a head page, [page_tokens, head_dim]. Head page (page, layer, K
        # or V, head) is row page * head_pages_per_page + (layer * 2 + which) * heads + head of this view. The views below
        # start at a layer's first head page, so that one index, computed once per forward for layer 0, serves every layer.
        self._head_pages_per_page = stride // head_page_bytes
        elements = storage.view(TORCH_DTYPES[group.dtype])
        head_pages = elements.view(-1, page_tokens * dim)
        rows = elements.view(-1, dim)
        self.elements = elements
        """The whole pool as this group's elements, 1-D, for kernels that find their way by `page_stride` and `layer_offset`."""
        self.page_stride = stride // group.dtype_bytes
        """Elements from one page to the next."""
        self._layer_head_pages = [head_pages[layer * 2 * heads :] for layer in range(layers)]
        self._layer_rows = [rows[layer * 2 * heads * page_tokens :] for layer in range(layers)]

    @property
    def device(self) -> torch.device:
        return self.bytes.device

    def layer_offset(self, layer_in_group: int) -> int:
        """Elements from a page's beginning to K of the layer's first head; its other head pages follow, then V's."""
        return layer_in_group * 2 * self.group.kv_heads * self.page_tokens * self.group.head_dim

    def keys(self, layer_in_group: int) -> torch.Tensor:
        """[num_pages, kv_heads, page_tokens, head_dim], strided."""
        return self.kv[:, layer_in_group, 0]

    def values(self, layer_in_group: int) -> torch.Tensor:
        """[num_pages, kv_heads, page_tokens, head_dim], strided."""
        return self.kv[:, layer_in_group, 1]

    def head_page_index(self, pages: torch.Tensor) -> torch.Tensor:
        """Where the head pages of layer 0 are: [2 * kv_heads * n], K before V, heads outside pages.

        pages: [n] int64, any order, repeats allowed.
        """
        heads = self.group.kv_heads
        heads_of_slot = torch.arange(2 * heads, device=pages.device).unsqueeze(1)
        return (pages * self._head_pages_per_page + heads_of_slot).view(-1)

    def row_index(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Where the tokens' K and V rows of layer 0 are: [2 * kv_heads * n], K before V, heads outside tokens.

        pages, offsets: [n] int64.
        """
        heads = self.group.kv_heads
        heads_of_slot = torch.arange(2 * heads, device=pages.device).unsqueeze(1)
        return ((pages * self._head_pages_per_page + heads_of_slot) * self.page_tokens + offsets).view(-1)

    def gather(self, layer_in_group: int, head_page_index: torch.Tensor, out: torch.Tensor) -> None:
        """Copies head pages; head_page_index: from `head_page_index`; out: [its length, page_tokens * head_dim]."""
        torch.index_select(self._layer_head_pages[layer_in_group], 0, head_page_index, out=out)

    def write(self, layer_in_group: int, row_index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores new tokens; row_index: from `row_index`; keys, values: [kv_heads, n, head_dim]."""
        rows = torch.cat((keys, values)).view(-1, self.group.head_dim)
        self._layer_rows[layer_in_group].index_copy_(0, row_index, rows)


class StatePages(PageViews):
    """The pages of one group of recurrent layers."""

    def __init__(self, group: LayerGroup, storage: torch.Tensor, stride: int, page_tokens: int) -> None:
        """A page is one state, so page_tokens matters to nothing here."""
        assert group.is_state, f"{group.name} holds no states"
        assert stride % group.align_bytes(page_tokens) == 0, f"states {stride} bytes apart are not aligned"
        super().__init__(group, storage, stride, page_tokens)
        offsets = state_offsets(group.parts)
        self._parts: list[tuple[torch.Tensor, ...]] = []
        for layer in range(len(group.layers)):
            views = []
            for part, offset in zip(group.parts, offsets, strict=False):  # the last offset is the state's end
                start = layer * offsets[-1] + offset
                raw = self.bytes[:, start : start + part.nbytes].view(TORCH_DTYPES[part.dtype])
                views.append(raw.view(-1, *part.shape))
            self._parts.append(tuple(views))

    def parts(self, layer_in_group: int) -> tuple[torch.Tensor, ...]:
        """One view per part of the group, in their order: [num_pages, *part.shape] of the part's dtype, strided."""
        return self._parts[layer_in_group]


class Pool:
    """One rank's caches. bytes: uint8 [num_large * large_bytes]; views: per layer group."""

    def __init__(
        self,
        groups: tuple[LayerGroup, ...],
        storage: torch.Tensor,
        large_bytes: int,
        strides: Sequence[int],
        page_tokens: int,
    ) -> None:
        """storage: uint8 [bytes], contiguous; strides: bytes from one small page to the next, per group."""
        assert storage.dtype == torch.uint8 and storage.is_contiguous(), "the pool's storage is contiguous bytes"
        assert storage.numel() % large_bytes == 0, f"{storage.numel()} bytes are no whole large pages of {large_bytes}"
        assert all(large_bytes % stride == 0 for stride in strides), f"{strides} do not divide {large_bytes} bytes"
        self.groups = groups
        self.page_tokens = page_tokens
        self.num_large = storage.numel() // large_bytes
        self.bytes = storage
        self.views: tuple[AttentionPages | StatePages, ...] = tuple(
            (StatePages if group.is_state else AttentionPages)(group, storage, stride, page_tokens)
            for group, stride in zip(groups, strides, strict=True)
        )
        # Whether what one group wrote may be NaN to another. (Elements of one size and dtype never straddle each other.)
        self.mixed = len({dtype for group in groups for dtype in _element_dtypes(group)}) > 1
        self.overflowed = False
        """Whether the logits of a step were no numbers. Then neither may be what its sequences leave in their pages."""

    @classmethod
    def create(
        cls,
        groups: tuple[LayerGroup, ...],
        num_large: int,
        large_bytes: int,
        strides: Sequence[int],
        page_tokens: int,
        device: str | torch.device,
    ) -> Pool:
        """A pool of zeros."""
        # Not under inference_mode, even when the caller is: an inference tensor could never be written outside it.
        with torch.inference_mode(False):
            storage = torch.zeros(num_large * large_bytes, dtype=torch.uint8, device=device)
            return cls(groups, storage, large_bytes, strides, page_tokens)

    @property
    def device(self) -> torch.device:
        return self.bytes.device

    @property
    def blanks(self) -> bool:
        """Whether pages are to be made blank before anything is written to them."""
        return self.mixed or self.overflowed

    def attention(self, group: int) -> AttentionPages:
        """The view of group `group`, which is one of attention layers."""
        view = self.views[group]
        assert isinstance(view, AttentionPages), f"group {view.group.name} holds states"
        return view

    def states(self, group: int) -> StatePages:
        """The view of group `group`, which is one of recurrent layers."""
        view = self.views[group]
        assert isinstance(view, StatePages), f"group {view.group.name} holds no states"
        return view

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Copies small pages as if all at once: every source is read before any page is written."""
        by_group: dict[int, list[PageCopy]] = defaultdict(list)
        for copy in copies:
            by_group[copy.group].append(copy)
        read = []
        for group, of_group in by_group.items():
            destinations = [copy.destination for copy in of_group]
            assert len(set(destinations)) == len(destinations), "two copies have the same destination page"
            sources = self._longs([copy.source for copy in of_group])
            read.append((group, destinations, self.views[group].bytes.index_select(0, sources)))
        for group, destinations, content in read:
            self.views[group].bytes.index_copy_(0, self._longs(destinations), content)

    def zero_pages(self, group: int, pages: Sequence[int]) -> None:
        """Makes small pages of a group blank."""
        if pages:
            self.views[group].bytes.index_fill_(0, self._longs(pages), 0)

    def _longs(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _element_dtypes(group: LayerGroup) -> set[str]:
    return {part.dtype for part in group.parts} if group.is_state else {group.dtype}
