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
from disagg.models.ranks import Ranks
from disagg.models.sharding import RowParallelLinear
from disagg.models.sums.shared import Slot, no_sum
from disagg.types.arithmetic import ceil_div

NORM_WARPS = 8
GATE_BLOCK = 1024
GATE_WARPS = 4
ATTENTION, MLP = 0, 1  # slots of a layer's two sums, which follow each other


@dataclass(frozen=True, slots=True)
class Sum:
    """What a fused layer hands on: the next norm adds it up. residual: [1, N, hidden]; addend: [parts, N, hidden], whose
    parts are one, or float32 partial sums. slot: where ranks add up what each of them has of the addend, if it is not whole."""

    residual: Tensor
    addend: Tensor
    slot: Slot | None = None

    def tensor(self) -> Tensor:
        addend = self.addend
        if addend.shape[0] > 1:
            addend = addend.sum(0, keepdim=True).to(self.residual.dtype)
        return self.residual + (addend if self.slot is None else self.slot.whole(addend))


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
        parts, slot = (x.shape[0], hidden.slot) if isinstance(hidden, Sum) else (1, None)
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
            **(no_sum(rows) if slot is None else slot.arguments(out.element_size())),
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
        down: Tensor = self.down_proj(self.gated(hidden))
        return down

    def gated(self, hidden: Tensor) -> Tensor:
        """[..., inner]"""
        both = linear(hidden, self.merged, self.merged_bias)
        inner = both.shape[-1] // 2
        rows = both.numel() // (2 * inner)
        out = torch.empty((*both.shape[:-1], inner), dtype=both.dtype, device=both.device)
        kernels._gate[(rows, ceil_div(inner, GATE_BLOCK))](
            both, out, SIZE=inner, BLOCK=GATE_BLOCK, TANH=self.tanh, num_warps=GATE_WARPS, **overlap(both.device)
        )
        return out

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
    few_rows: of few rows, its products are those of models/products; then attention and MLP are fused. ranks: of which each has a
    part of both; then few rows are as many as these add up in memory that they share. None: there is one.
    """

    input_layernorm: FusedRMSNorm
    post_attention_layernorm: FusedRMSNorm
    self_attn: torch.nn.Module
    mlp: torch.nn.Module
    next_norm: tuple[FusedRMSNorm, ...]  # in a tuple, it is no module of this one
    few_rows: bool
    ranks: Ranks | None

    def forward(self, hidden_states: Tensor | Sum | Scaled, **options: Any) -> Tensor | Sum | Scaled:
        num_rows = _num_rows(hidden_states)
        if num_rows <= self._most_rows:
            few = self._one_row if num_rows == 1 else self._few_rows
            return few(hidden_states, options["position_embeddings"])
        residual, normed = self.input_layernorm.normed(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **options)
        residual, normed = self.post_attention_layernorm.normed(Sum(residual, attended))
        return self._handed(Sum(residual, self.mlp(normed)))

    @property
    def _most_rows(self) -> int:
        """That are few."""
        if not self.few_rows:
            return 0
        if self.ranks is None:
            return MOST_ROWS
        return 0 if self.ranks.shared is None else self.ranks.shared.most_rows

    def _slot(self, number: int) -> Slot | None:
        return None if self.ranks is None or self.ranks.shared is None else self.ranks.shared.slot(number)

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
        norm = self.post_attention_layernorm.of_product
        row = add_one(attended, output.weight, _own_bias(output), residual, norm, self._slot(ATTENTION))
        assert isinstance(row, Scaled)
        inner = multiply_one(row, mlp.merged, mlp.merged_bias, gate=mlp.gate)
        down: Any = mlp.down_proj
        behind = self.next_norm[0].of_product if self.next_norm else None
        result = add_one(inner, down.weight, _own_bias(down), row.row, behind, self._slot(MLP))
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
        part = _in_parts(attended, attention.o_proj)
        residual, normed = self.post_attention_layernorm.normed(Sum(residual, part, self._slot(ATTENTION)))
        inner = multiply_few(normed[0], mlp.merged, mlp.merged_bias, gate=mlp.gate)
        part = _in_parts(mlp.gated(normed)[0] if inner is None else inner[0], mlp.down_proj)
        return self._handed(Sum(residual, part, self._slot(MLP)))


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
    bias = _own_bias(projection)
    parts = multiply_few(rows, projection.weight, bias, in_parts=True)
    return linear(rows.unsqueeze(0), projection.weight, bias) if parts is None else parts


def _own_bias(projection: Any) -> Tensor | None:
    bias: Tensor | None = projection.own_bias if isinstance(projection, RowParallelLinear) else projection.bias
    return bias
