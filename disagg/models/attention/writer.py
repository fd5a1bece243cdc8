"""How a forward's new K and V get into their pages: planned once per forward and layer group, then called for each layer."""

from __future__ import annotations

from typing import Protocol

import torch

from disagg.models.pool import AttentionPages

NUM_WARPS = 4


class PageWriter(Protocol):
    """Rows to slots."""

    def write(self, layer_slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values: [kv_heads, N, head_dim], dims contiguous."""


class TorchWriter:
    """By torch, on any device."""

    def __init__(self, view: AttentionPages, slot_pages: torch.Tensor, slot_offsets: torch.Tensor) -> None:
        """slot_pages, slot_offsets: [N] int64."""
        self._view = view
        self._row_index = view.row_index(slot_pages, slot_offsets)

    def write(self, layer_slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._view.write(layer_slot, self._row_index, keys, values)


class TritonWriter:
    """One launch a layer. A row whose page is negative is left out."""

    def __init__(self, view: AttentionPages, slot_pages: torch.Tensor, slot_offsets: torch.Tensor) -> None:
        """slot_pages, slot_offsets: [N] int64."""
        self._view = view
        self._slots = slot_pages, slot_offsets

    def write(self, layer_slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        from disagg.models.attention import kernels

        view, group = self._view, self._view.group
        assert keys.stride(2) == values.stride(2) == 1, "dims of a head are contiguous"
        kernels._write[(keys.shape[1],)](
            keys,
            values,
            view.elements,
            *self._slots,
            keys.stride(1),
            keys.stride(0),
            values.stride(1),
            values.stride(0),
            view.page_stride,
            view.slot_offset(layer_slot),
            KV_HEADS=group.kv_heads,
            HEAD_DIM=group.head_dim,
            PAGE_TOKENS=view.page_tokens,
            HEADS=1 << (group.kv_heads - 1).bit_length(),
            DIMS=1 << (group.head_dim - 1).bit_length(),
            num_warps=NUM_WARPS,
        )


def writer_of(view: AttentionPages, slot_pages: torch.Tensor, slot_offsets: torch.Tensor) -> PageWriter:
    """The one that fits the device."""
    return (TorchWriter if view.device.type == "cpu" else TritonWriter)(view, slot_pages, slot_offsets)
