"""How a forward's new K and V get into their pages: planned once per forward and layer group, then called for each layer."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from disagg.models.pool import AttentionPages

NUM_WARPS = 4


class PageWriter(Protocol):
    """Rows to their places."""

    def write(self, layer_in_group: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values: [kv_heads, N, head_dim], dims contiguous."""


class TorchWriter:
    """By torch, on any device."""

    def __init__(self, view: AttentionPages, write_pages: torch.Tensor, write_offsets: torch.Tensor) -> None:
        """write_pages, write_offsets: [N] int64."""
        self._view = view
        self._row_index = view.row_index(write_pages, write_offsets)

    def write(self, layer_in_group: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._view.write(layer_in_group, self._row_index, keys, values)


class TritonWriter:
    """One launch a layer. A row whose page is negative is left out."""

    def __init__(self, view: AttentionPages, write_pages: torch.Tensor, write_offsets: torch.Tensor) -> None:
        """write_pages, write_offsets: [N] int64."""
        self._view = view
        self._slots = write_pages, write_offsets

    def write(self, layer_in_group: int, keys: torch.Tensor, values: torch.Tensor) -> None:
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
            view.layer_offset(layer_in_group),
            KV_HEADS=group.kv_heads,
            HEAD_DIM=group.head_dim,
            PAGE_TOKENS=view.page_tokens,
            HEADS=1 << (group.kv_heads - 1).bit_length(),
            DIMS=1 << (group.head_dim - 1).bit_length(),
            num_warps=NUM_WARPS,
        )


class Rotator:
    """Rotates a forward's queries and keys, and writes K and V to their places, in one launch a layer."""

    def __init__(self, view: AttentionPages, write_pages: torch.Tensor, write_offsets: torch.Tensor) -> None:
        """As for TritonWriter."""
        self._view = view
        self._slots = write_pages, write_offsets

    def rotate_and_write(
        self,
        layer_in_group: int,
        qkv: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[Any, Any] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv: [N, heads * head_dim], rotated in place; rotation: [1, N, head_dim] each; norms: of query and key heads, or
        None. Returns views of qkv: queries, keys and values, [heads, N, head_dim] each."""
        from disagg.models.fused import kernels
        from disagg.models.overlap import overlap

        view, group = self._view, self._view.group
        num_rows, width = qkv.shape
        dim, kv_heads = group.head_dim, group.kv_heads
        query_heads = width // dim - 2 * kv_heads
        cos, sin = (part.reshape(num_rows, dim).contiguous() for part in rotation)
        weights = (
            (cos, cos) if norms is None else (norms[0].weight, norms[1].weight)
        )  # any pointers, where there are none
        assert qkv.stride(1) == 1, "a row's heads are contiguous"
        kernels._rotate_and_write[(num_rows,)](
            qkv,
            cos,
            sin,
            *weights,
            view.elements,
            *self._slots,
            qkv.stride(0),
            view.page_stride,
            view.layer_offset(layer_in_group),
            0.0 if norms is None else norms[0].variance_epsilon,
            QUERY_HEADS=query_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=dim,
            PAGE_TOKENS=view.page_tokens,
            QUERY_BLOCK=1 << (query_heads - 1).bit_length(),
            KV_BLOCK=1 << (kv_heads - 1).bit_length(),
            HALF_BLOCK=1 << (dim // 2 - 1).bit_length(),
            NORM=norms is not None,
            num_warps=NUM_WARPS,
            **overlap(view.device),
        )
        heads = qkv.view(num_rows, -1, dim).transpose(0, 1)
        return heads[:query_heads], heads[query_heads:-kv_heads], heads[-kv_heads:]


def writer_of(view: AttentionPages, write_pages: torch.Tensor, write_offsets: torch.Tensor) -> PageWriter:
    """The one that fits the device."""
    return (TorchWriter if view.device.type == "cpu" else TritonWriter)(view, write_pages, write_offsets)
