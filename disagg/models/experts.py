"""Spreads the experts of a module over all ranks of a server, whatever else is cut or whole on them.

    data-parallel rank 0   rows 0..2 ─┐ gather            ┌─ its experts ─┐ sum over all ranks
    data-parallel rank 1   row  3    ─┴─> rows 0..3 ──────┼─ its experts ─┴─> rows 0..3 ──> each takes its own
                                       on every rank

Each rank keeps some of the experts of each layer and computes them for the rows of all ranks; which rows those are, and by
which weights, each row's own rank says. So every rank takes part in each step in which any has rows: one without rows comes in
for its experts only (`join`). Ranks of one attention group have the same rows, and say them once.

Knows transformers' modules of experts, which can be told that some of the experts are elsewhere (later versions want to be told
so beforehand, earlier ones always look); nothing of attention, pools or batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from disagg.models.ranks import Ranks


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """What a module of experts was called with: rows [n, dim], and for each row so many experts and weights."""

    module: torch.nn.Module
    dim: int
    choices: int
    dtype: torch.dtype
    weights_dtype: torch.dtype


@contextmanager
def noting_experts(module: PreTrainedModel) -> Iterator[list[ExpertsCall]]:
    """The calls of modules that can be spread, in order, while `module` computes something."""
    calls: list[ExpertsCall] = []

    def note(part: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if named or len(arguments) != 3 or any(each.ndim != 2 for each in arguments):
            return
        hidden, index, weights = arguments
        if index.shape == weights.shape:
            calls.append(ExpertsCall(part, hidden.shape[1], index.shape[1], hidden.dtype, weights.dtype))

    parts = [part for part in module.modules() if _can_be_spread(part)]
    hooks = [part.register_forward_pre_hook(note, with_kwargs=True) for part in parts]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


# What transformers' `use_experts_implementation` says of a module, in every version: its products are transformers' own, which
# skip choices of experts that are elsewhere.
_SAID_OF_EXPERTS = ("has_gate", "has_bias", "is_transposed")


def _can_be_spread(part: torch.nn.Module) -> bool:
    """It says how many experts it has, its products are transformers' own, and all its parameters are the experts', in order."""
    count = getattr(part, "num_experts", None)
    if not isinstance(count, int) or not all(isinstance(getattr(part, name, None), bool) for name in _SAID_OF_EXPERTS):
        return False
    own = list(part.parameters(recurse=False))
    return bool(own) and len(list(part.parameters())) == len(own) and all(each.shape[0] == count for each in own)


@dataclass(slots=True)
class Spread:
    """Between which ranks. everyone: all of the server; peers: one of each data-parallel rank, by its number.

    rows: how many rows each of these has in the step that is computed; None: all have as many as this one.
    """

    everyone: Ranks
    peers: Ranks
    rows: tuple[int, ...] | None = None
    parts: list[SpreadExperts] = field(default_factory=list)  # in the order in which a forward calls them

    def join(self) -> None:
        """Take part in a step in which this rank has no rows. rows: of the others."""
        for part in self.parts:
            part.join()


class SpreadExperts(torch.nn.Module):
    """In the place of a module of experts of which this rank keeps some."""

    def __init__(self, call: ExpertsCall, spread: Spread) -> None:
        super().__init__()
        experts: Any = call.module
        rank, size = spread.everyone.rank, spread.everyone.size
        self.first = experts.num_experts * rank // size
        self.count = experts.num_experts * (rank + 1) // size - self.first
        for name, whole in list(experts.named_parameters()):
            kept = whole.detach()[self.first : self.first + self.count].clone()  # so that the rest can be freed
            setattr(experts, name, torch.nn.Parameter(kept, requires_grad=False))
        experts.num_experts = self.count
        experts._is_expert_parallel = True
        # transformers' products skip what is elsewhere; what modules compute by themselves may refuse it: they get an expert that
        # is here instead, with a weight of 0.
        self._elsewhere = 0 if experts.config._experts_implementation in (None, "eager") else self.count
        self.experts = experts
        self._call = call
        self._spread = spread

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """hidden: [n, dim], of this rank's rows; index, weights: [n, choices]. What their experts make of them: [n, dim]."""
        peers = self._spread.peers
        rows = self._spread.rows or (hidden.shape[0],) * peers.size
        assert len(rows) == peers.size and rows[peers.rank] == hidden.shape[0], f"{hidden.shape[0]} rows, of {rows}"
        if not any(rows):
            return hidden
        if peers.size > 1:
            # Numbers of experts are whole in float32, as are weights.
            routing = peers.gather(torch.cat([index.float(), weights.float()], 1), rows)
            index, weights = routing[:, : self._call.choices].long(), routing[:, self._call.choices :].to(weights.dtype)
            hidden = peers.gather(hidden, rows)
        own = index - self.first
        elsewhere = (own < 0) | (own >= self.count)
        if self.count:
            own, weights = own.masked_fill(elsewhere, self._elsewhere), weights.masked_fill(elsewhere, 0)
            part: Tensor = self.experts(hidden, own, weights)
        else:
            part = torch.zeros_like(hidden)
        before = sum(rows[: peers.rank])
        return self._spread.everyone.sum(part)[before : before + rows[peers.rank]]

    def join(self) -> None:
        """Take part without rows."""
        call, (device,) = self._call, {each.device for each in self.experts.parameters()}
        index = torch.zeros((0, call.choices), dtype=torch.int64, device=device)
        weights = torch.zeros((0, call.choices), dtype=call.weights_dtype, device=device)
        self(torch.zeros((0, call.dim), dtype=call.dtype, device=device), index, weights)


def spread_experts(module: PreTrainedModel, calls: Sequence[ExpertsCall], spread: Spread) -> None:
    """In place. calls: of one forward of all layers. Modules that were not called as they should stay whole on every rank,
    which is as right and slower.
    """
    parents = {child: (parent, name) for parent in module.modules() for name, child in parent.named_children()}
    called = [call.module for call in calls]
    for call in calls:
        if called.count(call.module) == 1 and call.module in parents:  # else it is another stage's
            parent, name = parents[call.module]
            part = SpreadExperts(call, spread)
            setattr(parent, name, part)
            spread.parts.append(part)
