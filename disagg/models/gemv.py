"""A second copy of each linear layer's weights, for steps of one row on CPU.

A decode step of one sequence reads every weight once and is as fast as memory is. BLAS streams an [out, in] matrix row
by row at 8.8 to 9.8 GB/s on one core, and its transpose, which adds up columns, at 10.5 to 11.2 (dot products reach 12).
So a step of one row reads the transpose, where that is the faster one: layers that do not narrow. Two rows are 1.5 times
slower that way and four or more alike, hence the copy instead of another layout. Costs the weights' bytes again.

Measured (SmolLM2-135M, fp32, one core): see docs/benchmarks.md. Knows torch modules; nothing of pools or batches.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear


class GemvLinear(torch.nn.Linear):
    """nn.Linear that has its weights in both layouts. weight: [out, in]; transposed: [in, out], contiguous."""

    transposed: torch.Tensor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [..., in]."""
        if rows.numel() == self.in_features:
            return linear(rows, self.transposed.t(), self.bias)
        return super().forward(rows)


@torch.no_grad()
def add_gemv_copies(module: torch.nn.Module) -> int:
    """Give every plain linear layer that does not narrow its second copy; returns the bytes added.

    Subclasses of nn.Linear (quantized, sharded) are left alone. Layers that share a weight share the copy.
    """
    copies: dict[int, torch.Tensor] = {}
    for layer in module.modules():
        if type(layer) is torch.nn.Linear and layer.out_features >= layer.in_features:
            where = layer.weight.data_ptr()
            if where not in copies:
                copies[where] = layer.weight.detach().t().contiguous()
            layer.__class__ = GemvLinear
            layer.transposed = copies[where]
    return sum(copy.nbytes for copy in copies.values())
