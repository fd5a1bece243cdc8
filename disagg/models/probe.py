"""What a model's layers ask of attention, found by recording their calls. Knows nothing of what is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asked of attention. source: the layer whose K and V these are, itself or an earlier one."""

    layer: int
    module: torch.nn.Module
    source: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtypes: frozenset[torch.dtype]
    masked: bool
    causal: bool
    options: dict[str, Any]

    @property
    def window(self) -> int | None:
        return self.options.get("sliding_window")


class AttentionProbe:
    """Records calls and answers zeros."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        # Layers that share KV pass the same tensors. These are kept, so that two tensors never have one address.
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        is_causal = options.get("is_causal")
        layer = getattr(module, "layer_idx", -1)
        self.calls.append(
            AttentionCall(
                layer=layer,
                module=module,
                source=self._source(layer, key, value),
                query_heads=query.shape[1],
                kv_heads=key.shape[1],
                key_dim=key.shape[3],
                value_dim=value.shape[3],
                dtypes=frozenset({query.dtype, key.dtype, value.dtype}),
                masked=attention_mask is not None,
                causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
                options={name: option for name, option in options.items() if option is not None},
            )
        )
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))

    def _source(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> int:
        same = next(
            (
                call.source
                for call, (known_key, known_value) in zip(self.calls, self._kept, strict=True)
                if _same_tensor(known_key, key) and _same_tensor(known_value, value)
            ),
            layer,
        )
        self._kept.append((key, value))
        return same


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """By their storage, not its address, which tensors without bytes do not have."""
    return _place(one) == _place(other)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
