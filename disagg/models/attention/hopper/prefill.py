"""Prefill on Hopper chips by an own kernel in Gluon, over pages of 16 bits: see hopper/kernels.

Pages that its bulk copies cannot take are left to Triton's kernel (triton_prefill), which has the same tiles.
"""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from disagg.models.attention.backend import AttentionPlan, PrefillWork, Scoring
from disagg.models.attention.hopper import kernels
from disagg.models.attention.triton_decode import scales
from disagg.models.attention.triton_prefill import TritonPrefill, tiles_on_device

BLOCK_M, BLOCK_N = 128, 128  # rows of a tile, as triton_prefill has them; keys of a block
BOX_DIMS = 64  # of 16 bits: the 128 bytes that are swizzled
LEAST_BOX = 8  # tokens after which the swizzle is the same again
WARPS = 4  # of each half of a tile
_BOX_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


class HopperPrefill:
    """Full attention in 16 bits, of heads of 64 or 128 dims."""

    def plan(self, work: PrefillWork) -> AttentionPlan:
        return HopperPrefillPlan(work) if fit(work.view.page_tokens) else TritonPrefill().plan(work)


class HopperPrefillPlan:
    """Some runs of one batch in one layer group."""

    def __init__(self, work: PrefillWork) -> None:
        self._work = work
        view = work.view
        dim = view.group.head_dim
        self._box = min(view.page_tokens, BLOCK_N)
        rows = view.elements.view(-1, dim)
        self._boxes = TensorDescriptor(rows, list(rows.shape), [dim, 1], [self._box, BOX_DIMS], _BOX_LAYOUT)
        self._tiles = tiles_on_device(work)

    def run(
        self,
        layer_in_group: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        """See AttentionPlan."""
        view, table = self._work.view, self._work.table
        _, query_heads, head_dim = out.shape
        assert query.stride(2) == 1 and out.is_contiguous(), "dims of a head are contiguous"
        scale, _ = scales(scoring)
        kernels._chunk[(self._tiles.shape[0], query_heads)](
            query,
            self._boxes,
            table.pages,
            self._tiles,
            out,
            query.stride(1),
            query.stride(0),
            table.pages.stride(0),
            view.page_stride // head_dim,
            view.layer_offset(layer_in_group) // head_dim,
            scale,
            QUERY_HEADS=query_heads,
            KV_HEADS=view.group.kv_heads,
            HEAD_DIM=head_dim,
            PAGE_TOKENS=view.page_tokens,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BOX=self._box,
            num_warps=WARPS,
        )


def fit(page_tokens: int) -> bool:
    """Whether whole boxes make up pages and blocks of keys."""
    return page_tokens % BLOCK_N == 0 or (BLOCK_N % page_tokens == 0 and page_tokens >= LEAST_BOX)
