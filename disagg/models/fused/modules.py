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
from disagg.models.overlap import overlap
from disagg.models.products.choice import MOST_ROWS
from disagg.models.products.launch import GELU_TANH, SILU, Norm, Scaled, add_one, multiply_few, multiply_one
from disagg.types.arithmetic import ceil_div

NORM_WARPS = 8
GATE_BLOCK = 1024
GATE_WARPS = 4


@dataclass(frozen=True, slots=True)
class Sum:
    """What a fused layer hands on: the next norm adds it up. residual: [1, N, hidden]; addend: [parts, N, hidden], whose
    parts are one, or float32 partial sums."""

    residual: Tensor
    addend: Tensor

    def tensor(self) -> Tensor:
        if self.addend.shape[0] == 1:
            return self.residual + self.addend
        return self.residual + self.addend.sum(0, keepdim=True).to(self.residual.dtype)


class FusedRMSNorm(torch.nn.Module):
    """weight: [size]. eps_name: of the attribute that holds it; offset: Gemma's, whose weight is one less."""

    weight: torch.nn.Parameter
    eps_name: str
    offset: bool

    def forward(self, hidden: Tensor | Sum | Scaled) -> Tensor:
        return self.normed(hidden)[1]

    def normed(self, hidden: Tensor | Sum | Scaled) -> tuple[Tensor, Tensor]:
        """(what is normed, and that normed), of [..., size] both."""
        if isinstance(hidden, Scaled):
            hidden = hidden.row.unsqueeze(0)
        x, residual = (hidden.addend, hidden.residual) if isinstance(hidden, Sum) else (hidden, hidden)
        size = self.weight.shape[0]
        parts = x.shape[0] if isinstance(hidden, Sum) else 1
        rows, before = x.reshape(-1, size), residual.reshape(-1, size)
        num_rows = before.shape[0]
        out = torch.empty(before.shape, dtype=before.dtype, device=x.device)
        total = torch.empty_like(out) if isinstance(hidden, Sum) else rows
        kernels._rms_norm[(num_rows,)](
            rows,
            before,
            self.weight,
            out,
            total,
            rows.stride(0),
            rows.stride(0) * num_rows,
            before.stride(0),
            self.epsilon,
            SIZE=size,
            BLOCK=1 << (size - 1).bit_length(),
            PARTS=parts,
            ADD=isinstance(hidden, Sum),
            OFFSET=self.offset,
            num_warps=NORM_WARPS if size >= 1024 else 1,
            **overlap(x.device),
        )
        return total.view(residual.shape), out.view(residual.shape)

    @property
    def epsilon(self) -> float:
        return float(getattr(self, self.eps_name))

    @property
    def of_product(self) -> Norm:
        """For a product that norms what it multiplies."""
        return Norm(self.weight, self.epsilon, self.offset)


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
        kernels._gate[(rows, ceil_div(inner, GATE_BLOCK))](
            both, out, SIZE=inner, BLOCK=GATE_BLOCK, TANH=self.tanh, num_warps=GATE_WARPS, **overlap(both.device)
        )
        down: Tensor = self.down_proj(out)
        return down

    @property
    def gate(self) -> int:
        """As products take it."""
        return GELU_TANH if self.tanh else SILU


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
        return self.o_proj(self.attend(qkv[0], position_embeddings).unsqueeze(0)), None

    def attend(self, qkv: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """[N, query heads * head_dim] of qkv: [N, heads * head_dim]."""
        return rotating_attention(self, qkv, position_embeddings).flatten(1)


class FusedLayer(torch.nn.Module):
    """A decoder layer whose residual is added where the next norm is.

    next_norm: of the layer behind it, which then understands `Sum` and `Scaled`; nothing, if it understands tensors alone.
    few_rows: of few rows, its products are those of models/products; then attention and MLP are fused.
    """

    input_layernorm: FusedRMSNorm
    post_attention_layernorm: FusedRMSNorm
    self_attn: torch.nn.Module
    mlp: torch.nn.Module
    next_norm: tuple[FusedRMSNorm, ...]  # in a tuple, it is no module of this one
    few_rows: bool

    def forward(self, hidden_states: Tensor | Sum | Scaled, **options: Any) -> Tensor | Sum | Scaled:
        if self.few_rows:
            num_rows = _num_rows(hidden_states)
            if num_rows == 1:
                return self._one_row(hidden_states, options["position_embeddings"])
            if num_rows <= MOST_ROWS:
                return self._few_rows(hidden_states, options["position_embeddings"])
        residual, normed = self.input_layernorm.normed(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **options)
        residual, normed = self.post_attention_layernorm.normed(Sum(residual, attended))
        return self._handed(Sum(residual, self.mlp(normed)))

    def _handed(self, result: Sum) -> Tensor | Sum:
        return result if self.next_norm else result.tensor()

    def _one_row(self, hidden: Tensor | Sum | Scaled, rotation: tuple[Tensor, Tensor]) -> Tensor | Scaled:
        """Seven launches: norms, gate and residuals are part of products."""
        attention, mlp = self.self_attn, self.mlp
        assert isinstance(attention, FusedAttention) and isinstance(mlp, FusedMLP)
        normed: Tensor | Scaled
        if isinstance(hidden, Scaled):
            residual, normed = hidden.row, hidden
        else:
            residual, normed = (part[0] for part in self.input_layernorm.normed(hidden))
        qkv = multiply_one(normed, attention.merged, attention.merged_bias)
        attended = attention.attend(qkv, rotation)
        output: Any = attention.o_proj
        row = add_one(attended, output.weight, output.bias, residual, self.post_attention_layernorm.of_product)
        assert isinstance(row, Scaled)
        inner = multiply_one(row, mlp.merged, mlp.merged_bias, gate=mlp.gate)
        down: Any = mlp.down_proj
        behind = self.next_norm[0].of_product if self.next_norm else None
        result = add_one(inner, down.weight, down.bias, row.row, behind)
        return result if isinstance(result, Scaled) else result.unsqueeze(0)

    def _few_rows(self, hidden: Tensor | Sum | Scaled, rotation: tuple[Tensor, Tensor]) -> Tensor | Sum:
        """As forward, by other products where they are faster."""
        attention, mlp = self.self_attn, self.mlp
        assert isinstance(attention, FusedAttention) and isinstance(mlp, FusedMLP)
        residual, normed = self.input_layernorm.normed(hidden)
        qkv = multiply_few(normed[0], attention.merged, attention.merged_bias)
        if qkv is None:
            qkv = linear(normed, attention.merged, attention.merged_bias)
        attended = attention.attend(qkv[0], rotation)
        residual, normed = self.post_attention_layernorm.normed(Sum(residual, _in_parts(attended, attention.o_proj)))
        inner = multiply_few(normed[0], mlp.merged, mlp.merged_bias, gate=mlp.gate)
        if inner is None:
            return self._handed(Sum(residual, mlp(normed)))
        return self._handed(Sum(residual, _in_parts(inner[0], mlp.down_proj)))


def _num_rows(hidden: Tensor | Sum | Scaled) -> int:
    match hidden:
        case Scaled():
            return 1
        case Sum():
            return hidden.residual.shape[1]
        case _:
            return hidden.shape[1]


def _in_parts(rows: Tensor, projection: Any) -> Tensor:
    """[parts, N, hidden], which the next norm adds up."""
    parts = multiply_few(rows, projection.weight, projection.bias, in_parts=True)
    return projection(rows.unsqueeze(0)) if parts is None else parts
