"""Modules of the fusion pass, which take the place of transformers' own. Weights stay where and what they are.

A module becomes one of these by its class: its parameters and names do not change. What is merged is one tensor, and the
weights that were there before are views of it, so that nothing is held twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from disagg.models.attention.calls import rotating_attention
from disagg.models.fused import kernels

NORM_WARPS = 8
GATE_BLOCK = 1024
GATE_WARPS = 4


@dataclass(frozen=True, slots=True)
class Sum:
    """What a fused layer hands on: the next norm adds the two up. residual, addend: [1, N, hidden]."""

    residual: Tensor
    addend: Tensor

    def tensor(self) -> Tensor:
        return self.residual + self.addend


class FusedRMSNorm(torch.nn.Module):
    """weight: [size]. eps_name: of the attribute that holds it; offset: Gemma's, whose weight is one less."""

    weight: torch.nn.Parameter
    eps_name: str
    offset: bool

    def forward(self, hidden: Tensor | Sum) -> Tensor:
        return self.normed(hidden)[1]

    def normed(self, hidden: Tensor | Sum) -> tuple[Tensor, Tensor]:
        """(what is normed, and that normed), of [..., size] both."""
        x, residual = (hidden.addend, hidden.residual) if isinstance(hidden, Sum) else (hidden, None)
        size = self.weight.shape[0]
        rows = x.reshape(-1, size)
        before = rows if residual is None else residual.reshape(-1, size)
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        total = rows if residual is None else torch.empty_like(out)
        kernels._rms_norm[(rows.shape[0],)](
            rows,
            before,
            self.weight,
            out,
            total,
            rows.stride(0),
            before.stride(0),
            getattr(self, self.eps_name),
            SIZE=size,
            BLOCK=1 << (size - 1).bit_length(),
            ADD=residual is not None,
            OFFSET=self.offset,
            num_warps=NORM_WARPS if size >= 1024 else 1,
        )
        return total.view(x.shape), out.view(x.shape)


class FusedMLP(torch.nn.Module):
    """act(gate) * up, by one product and one pass. merged: [2 * inner, hidden]; tanh: GELU by tanh, else SiLU."""

    down_proj: torch.nn.Module
    merged: Tensor
    merged_bias: Tensor | None
    tanh: bool

    def forward(self, hidden: Tensor) -> Tensor:
        both = linear(hidden, self.merged, self.merged_bias)
        inner = both.shape[-1] // 2
        rows = both.numel() // (2 * inner)
        out = torch.empty((*both.shape[:-1], inner), dtype=both.dtype, device=both.device)
        kernels._gate[(rows, -(-inner // GATE_BLOCK))](
            both, out, SIZE=inner, BLOCK=GATE_BLOCK, TANH=self.tanh, num_warps=GATE_WARPS
        )
        down: Tensor = self.down_proj(out)
        return down


class FusedAttention(torch.nn.Module):
    """Queries, keys and values by one product; RoPE and the writing of K and V by one pass.

    merged: [(query_heads + 2 * kv_heads) * head_dim, hidden]. Norms of heads, where there are any, have the same eps.
    """

    layer_idx: int
    o_proj: torch.nn.Module
    merged: Tensor
    merged_bias: Tensor | None
    head_dim: int
    scaling: float
    head_norms: tuple[FusedRMSNorm, FusedRMSNorm] | None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        assert attention_mask is None and past_key_values is None, "paged attention has neither masks nor caches"
        qkv = linear(hidden_states, self.merged, self.merged_bias)
        attended = rotating_attention(self, qkv[0], position_embeddings)
        return self.o_proj(attended.flatten(1).unsqueeze(0)), None


class FusedLayer(torch.nn.Module):
    """A decoder layer whose residual is added where the next norm is. hands_sums: the next one understands `Sum`."""

    input_layernorm: FusedRMSNorm
    post_attention_layernorm: FusedRMSNorm
    self_attn: torch.nn.Module
    mlp: torch.nn.Module
    hands_sums: bool

    def forward(self, hidden_states: Tensor | Sum, **options: Any) -> Tensor | Sum:
        residual, normed = self.input_layernorm.normed(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **options)
        residual, normed = self.post_attention_layernorm.normed(Sum(residual, attended))
        result = Sum(residual, self.mlp(normed))
        return result if self.hands_sums else result.tensor()
