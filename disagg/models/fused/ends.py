"""Modules of the fusion pass at the two ends of a forward: before the first layer and behind the last one.

    rotation  cosines and sines are looked up: one launch, where transformers computes them in nine. They are its own, computed
              once for every position, so they are the same to the bit. Token ids carried over on the device: one launch for four.
    ends      of steps that want the logits of every row no row is picked, and logits are written where they are wanted

A module becomes one of these by its class, as in modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from disagg.models.batch import ForwardBatch
from disagg.models.ends import Ends
from disagg.models.fused import kernels
from disagg.models.overlap import overlap
from disagg.models.sharding import VocabParallelLinear
from disagg.types.arithmetic import ceil_div

MOST_TABLE_BYTES = 256 << 20  # of cosines and sines: 128k tokens of 128 dims in bfloat16 take 32 MiB
_CHUNK = 4096  # positions at a time, while the table is made
_IDS_BLOCK = 256


class FusedRotation(torch.nn.Module):
    """table: [positions, 2, half a head's rotated dims], cosines before sines, in the model's dtype."""

    table: Tensor

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(cosines, sines) as transformers' modules give them, [1, N, rotated dims] each. position_ids: [1, N], each less than
        the model's longest sequence."""
        assert x.dtype == self.table.dtype and position_ids.shape[0] == 1, f"a rotation in {x.dtype}"
        half = self.table.shape[2]
        positions = position_ids[0]
        num_rows = positions.shape[0]
        cos = torch.empty((1, num_rows, 2 * half), dtype=x.dtype, device=x.device)
        sin = torch.empty_like(cos)
        kernels._look_up_rotation[(num_rows,)](
            self.table,
            positions,
            cos,
            sin,
            positions.stride(0),
            HALF=half,
            BLOCK=1 << (half - 1).bit_length(),
            num_warps=1,
            **overlap(x.device),
        )
        return cos, sin


class FusedHead(torch.nn.Module):
    """The output layer. out: where the next forward's logits belong, [rows, vocab], if somebody said so."""

    weight: torch.nn.Parameter
    out: Tensor | None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.out is None:
            return linear(hidden, self.weight)
        assert self.out.shape == (hidden.shape[1], self.weight.shape[0]), f"{self.out.shape} for {hidden.shape[1]} rows"
        return torch.mm(hidden[0], self.weight.t(), out=self.out).unsqueeze(0)


class FusedJoinedHead(VocabParallelLinear):
    """The same where each rank has a part of the vocabulary, and all of them as much."""

    out: Tensor | None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.out is None:
            return super().forward(hidden)
        assert self.out.shape == (hidden.shape[1], self.vocab_size), f"{self.out.shape} for {hidden.shape[1]} rows"
        return self.ranks.join(linear(hidden[0], self.weight), -1, out=self.out).unsqueeze(0)


def rotation_table(rotation: Any, positions: int, dtype: torch.dtype) -> Tensor | None:
    """Of transformers' own module, for so many positions. None if it is too large, or halves of a head are not rotated alike."""
    device = rotation.inv_freq.device
    like = torch.empty(1, dtype=dtype, device=device)
    parts = []
    for first in range(0, positions, _CHUNK):
        at = torch.arange(first, min(first + _CHUNK, positions), device=device).unsqueeze(0)
        both = torch.stack(rotation(like, at), dim=2)[0]  # [chunk, 2, dims]
        low, high = both.chunk(2, dim=2)
        if not torch.equal(low, high) or positions * low[0].numel() * low.element_size() > MOST_TABLE_BYTES:
            return None
        parts.append(low)
    return torch.cat(parts).contiguous()


def token_ids(batch: ForwardBatch) -> Tensor:
    """batch.token_ids(), in one launch."""
    if batch.carried is None:
        return batch.input_ids
    assert batch.tokens_before is not None, "tokens of no step are carried over"
    columns = (batch.input_ids, batch.carried, batch.tokens_before)
    assert all(each.is_contiguous() for each in columns), "a column is not contiguous"
    num_rows = batch.num_rows
    out = torch.empty_like(batch.input_ids)
    kernels._token_ids[(ceil_div(num_rows, _IDS_BLOCK),)](
        *columns, out, num_rows, BLOCK=_IDS_BLOCK, num_warps=1, **overlap(out.device)
    )
    return out


class FusedEnds(Ends):
    """Of a module that the fusion pass has been over."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._rotates = any(isinstance(part, FusedRotation) for part in module.modules())
        heads = [part for part in module.modules() if isinstance(part, FusedHead | FusedJoinedHead)]
        self._head = heads[0] if heads else None

    def token_ids(self, batch: ForwardBatch) -> Tensor:
        return token_ids(batch) if self._rotates else batch.token_ids()

    @contextlib.contextmanager
    def keeping(self, batch: ForwardBatch, logits_out: Tensor | None) -> Iterator[Tensor | int]:
        if self._head is None:
            yield batch.logits_rows
            return
        self._head.out = logits_out
        try:
            yield 0 if batch.wants_every_row else batch.logits_rows
        finally:
            self._head.out = None
