"""What a step must do at least, of whatever model: bytes to read and operations, and how long that takes a device. Pure.

    floor    products     each weight is read once, and multiplied with every row
             attention    the KV of what each row sees is read once for all rows of its sequence, and multiplied with them

each the larger of its bytes over a copy's rate and its operations over a product's. Activations, norms and what ranks say to each
other are left out, so a floor is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from disagg.messages.layout import GroupKind, LayerGroup

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


class Ceilings(Struct, frozen=True):
    """copy: bytes/s, read and written. burst, sustained: FLOP/s of a large product over 0.03 s and after 1.5 s. device: its
    name. product: what was multiplied."""

    copy: float
    burst: float
    sustained: float
    device: str = ""
    product: str = ""

    def describe(self) -> str:
        return (
            f"copy {self.copy / 1e9:.0f} GB/s; {self.product} {self.burst / 1e12:.3g} TFLOP/s as a burst, "
            f"{self.sustained / 1e12:.3g} sustained"
        )


class Weights(Struct, frozen=True):
    """Elements of a model's products. output: of the output layer. experts: of all that are routed to, `num_experts` in each
    layer, of which each token takes `chosen`. layers: of the rest, without embeddings, which are looked up."""

    layers: int
    output: int
    experts: int = 0
    num_experts: int = 1
    chosen: int = 1


def weights_of(tensors: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], vocab_size: int) -> Weights:
    """tensors: shapes by name, as a checkpoint has them. config: of the text model, as in config.json."""
    layers = output = experts = 0
    for name, shape in tensors.items():
        count = math.prod(shape)
        if len(shape) < 2:
            continue  # norms and biases
        if shape[0] >= vocab_size:
            output = min(output, count) if output else count  # tied or not, one of them is multiplied with
        elif ".experts." in name:
            experts += count
        else:
            layers += count
    return Weights(layers, output, experts, _first(config, _EXPERTS), _first(config, _CHOSEN))


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int:
    found = [config[name] for name in names if isinstance(config.get(name), int)]
    return max(1, found[0]) if found else 1


class Rows(Struct, frozen=True):
    """Of one sequence in a step: `count` tokens behind `start`. sampled: the last one's logits are wanted."""

    start: int
    count: int
    sampled: bool


class Work(Struct, frozen=True):
    """Of one rank, in one step or several: (bytes, operations) of what takes turns."""

    parts: tuple[tuple[float, float], ...]

    @property
    def nbytes(self) -> float:
        return sum(nbytes for nbytes, _ in self.parts)

    @property
    def flops(self) -> float:
        return sum(flops for _, flops in self.parts)

    def floor_s(self, ceilings: Ceilings, sharing: int = 1) -> float:
        """sharing: ranks that have these ceilings between them."""
        return sharing * sum(max(nbytes / ceilings.copy, flops / ceilings.sustained) for nbytes, flops in self.parts)


class Shape(Struct, frozen=True):
    """A model as each of tp ranks computes it. query_heads: of the whole model; dtype_bytes: of a weight."""

    weights: Weights
    groups: tuple[LayerGroup, ...]
    query_heads: int
    dtype_bytes: int
    tp: int = 1

    def step(self, rows: Sequence[Rows]) -> Work:
        """What one step with these rows must do."""
        total, sampled = sum(each.count for each in rows), sum(each.sampled for each in rows)
        weights = self.weights
        asked = weights.num_experts * (
            1.0 - (1.0 - weights.chosen / weights.num_experts) ** total
        )  # expected of a layer
        each_expert = weights.experts / weights.num_experts / self.tp
        parts = [
            self._product(weights.layers / self.tp, total),
            self._product(weights.output / self.tp, sampled),
            (each_expert * asked * self.dtype_bytes, 2.0 * each_expert * weights.chosen * total),
            *(self._attention(group, rows) for group in self.groups),
        ]
        return Work(tuple(part for part in parts if any(part)))

    def _product(self, elements: float, rows: int) -> tuple[float, float]:
        return (elements * self.dtype_bytes if rows else 0.0, 2.0 * elements * rows)

    def _attention(self, group: LayerGroup, rows: Sequence[Rows]) -> tuple[float, float]:
        group = group.on_rank(self.tp)
        if group.is_state:
            return 2.0 * group.bytes_per_token * len(rows), 0.0  # read and written
        window = group.window if group.kind is GroupKind.WINDOW else 0
        read = sum(_seen(each, window) for each in rows) * group.bytes_per_token
        heads = max(1, self.query_heads // self.tp)
        pairs = sum(_pairs(each, window) for each in rows)
        return float(read), 4.0 * len(group.layers) * heads * group.head_dim * pairs


def _seen(rows: Rows, window: int) -> int:
    """Tokens that some of them attend to."""
    end = rows.start + rows.count
    return min(end, window + rows.count - 1) if window else end


def _pairs(rows: Rows, window: int) -> int:
    """Of a row and a token that it attends to: row p sees min(p + 1, window)."""

    def upto(end: int) -> int:
        if not window or end <= window:
            return end * (end + 1) // 2
        return window * (window + 1) // 2 + (end - window) * window

    return upto(rows.start + rows.count) - upto(rows.start)
