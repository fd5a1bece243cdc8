"""Cuts a loaded module for one of several ranks, in place, as the module's own `tp_plan` says.

    column-parallel          row-parallel: its input is cut, so what it gives is a part of the sum
    ┌──────────┐ rank 0      ┌─────┬─────┐
    ├──────────┤             │  0  │  1  │ ──> all-reduce ──> + bias, once
    └──────────┘ rank 1      └─────┴─────┘

Cut are: attention, by heads, where its plan is plain (q, k, v and what else is per head column-parallel, the output
row-parallel), feed-forward modules with such a plan, and the output layer, by the vocabulary. Experts are spread by
`models/experts`. All else stays whole on every rank, which is as right and slower: recurrent layers, embeddings, and
projections that are planned otherwise (fused, gathered, or not at all). Where that is attention, each rank takes its heads
from the whole query, key and value, and the ranks' outputs are put together (`models/attention/calls`). Either way a rank
keeps the KV of its own heads only.

Knows transformers' plans and torch's linear layers; nothing of pools, batches or requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from disagg.messages.heads import RankHeads, SliceError, rank_heads
from disagg.models.probe import AttentionCall
from disagg.models.ranks import Ranks
from disagg.types.arithmetic import ceil_div
from disagg.types.errors import ConfigError

COLUMN = "colwise"  # transformers' names of the two plain styles
ROW = "rowwise"
# Children of attention modules that give keys and values; every other column-parallel one gives something per query head.
KV_PROJECTIONS = ("k_proj", "v_proj")


class RowParallelLinear(torch.nn.Linear):
    """A linear layer of which each rank has some columns. rows: [..., this rank's part of in]; gives [..., out], whole."""

    ranks: Ranks

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        total = self.ranks.sum(linear(rows, self.weight))
        return total if self.bias is None else total + self.bias

    @property
    def own_bias(self) -> torch.Tensor | None:
        """What this rank adds to its part of the sum: one of them adds the bias."""
        return self.bias if self.ranks.rank == 0 else None


class VocabParallelLinear(torch.nn.Linear):
    """An output layer of which each rank has a part of the vocabulary. rows: [..., in], the same on all; gives [..., vocab],
    whole, on all."""

    ranks: Ranks
    vocab_size: int

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if not rows.numel():
            return rows.new_empty((*rows.shape[:-1], self.vocab_size))
        mine = linear(rows, self.weight, self.bias)
        if lacking := ceil_div(self.vocab_size, self.ranks.size) - mine.shape[-1]:
            mine = pad(mine, (0, lacking))  # which copies, if nothing is lacking too
        return self.ranks.join(mine, -1)[..., : self.vocab_size].contiguous()


def shard(module: PreTrainedModel, calls: Sequence[AttentionCall], ranks: Ranks) -> dict[int, RankHeads]:
    """By layer, what attention has to cut itself; empty where the projections were cut.

    calls: what each layer asked of attention before. Raises ConfigError when the ranks cannot share a layer's heads.
    """
    heads = {call.layer: _heads(call, ranks) for call in calls}
    plan = _Plan(module)
    attention = {call.module for call in calls}
    cuts = [_attention_cuts(plan, call, heads[call.layer]) for call in calls]
    plain = all(cut is not None for cut in cuts)
    if plain:
        for call, cut in zip(calls, cuts, strict=True):
            assert cut is not None
            _apply(plan.linears(call.module), cut, ranks)
            _cut_head_parameters(plan, call, heads[call.layer])
    for part in list(module.modules()):
        if part not in attention and (cut := _feed_forward_cuts(plan, part, ranks)) is not None:
            _apply(plan.linears(part), cut, ranks)
    _cut_output_layer(module, ranks)
    return {} if plain else heads


def _cut_output_layer(module: PreTrainedModel, ranks: Ranks) -> None:
    head: Any = module.get_output_embeddings()  # type: ignore[no-untyped-call]
    embeddings: Any = module.get_input_embeddings()
    if type(head) is not torch.nn.Linear or head.out_features < ranks.size:
        return
    vocab_size = head.out_features
    width = ceil_div(vocab_size, ranks.size)
    kept = slice(min(vocab_size, width * ranks.rank), min(vocab_size, width * (ranks.rank + 1)))
    if isinstance(embeddings, torch.nn.Embedding) and embeddings.weight.data_ptr() == head.weight.data_ptr():
        head.weight = torch.nn.Parameter(head.weight.detach()[kept], requires_grad=False)  # the embeddings stay whole
    else:
        head.weight = _part(head.weight, 0, kept)
    if head.bias is not None:
        head.bias = _part(head.bias, 0, kept)
    head.out_features = head.weight.shape[0]
    head.__class__ = VocabParallelLinear
    assert isinstance(head, VocabParallelLinear)
    head.ranks, head.vocab_size = ranks, vocab_size


def _heads(call: AttentionCall, ranks: Ranks) -> RankHeads:
    try:
        return rank_heads(ranks.rank, ranks.size, call.query_heads, call.kv_heads)
    except SliceError as error:
        raise ConfigError(f"layer {call.layer}: {error}") from error


class _Plan:
    """The styles that a model's plan gives to its modules and parameters."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._styles: Mapping[str, str] = module._tp_plan or {}
        self._names = {part: name for name, part in module.named_modules()}

    def style(self, part: torch.nn.Module, child: str) -> str | None:
        """Of a child module or parameter of `part`. Plans write layer numbers as a star."""
        return self._styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", f"{self._names[part]}.{child}"))

    def linears(self, part: torch.nn.Module) -> dict[str, torch.nn.Linear]:
        return {name: child for name, child in part.named_children() if isinstance(child, torch.nn.Linear)}

    def plain(self, part: torch.nn.Module) -> str | None:
        """The name of its one row-parallel linear layer, if all the others are column-parallel; None if they are not."""
        styles = {name: self.style(part, name) for name in self.linears(part)}
        rows = [name for name, style in styles.items() if style == ROW]
        columns = [name for name, style in styles.items() if style == COLUMN]
        return rows[0] if len(rows) == 1 and columns and len(columns) + 1 == len(styles) else None


@dataclass(frozen=True, slots=True)
class _Cut:
    """What a rank keeps of a linear layer. dim: 0, rows of the weight (column-parallel), or 1, columns (row-parallel)."""

    dim: int
    kept: slice


def _apply(linears: Mapping[str, torch.nn.Linear], cuts: Mapping[str, _Cut], ranks: Ranks) -> None:
    for name, cut in cuts.items():
        layer = linears[name]
        layer.weight = _part(layer.weight, cut.dim, cut.kept)
        layer.out_features, layer.in_features = layer.weight.shape
        if cut.dim == 1:
            layer.__class__ = RowParallelLinear
            assert isinstance(layer, RowParallelLinear)
            layer.ranks = ranks
        elif layer.bias is not None:
            layer.bias = _part(layer.bias, 0, cut.kept)


def _part(whole: torch.Tensor, dim: int, kept: slice) -> torch.nn.Parameter:
    """A copy, so that the rest can be freed."""
    part = whole.detach()[kept] if dim == 0 else whole.detach()[:, kept]
    return torch.nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)


def _attention_cuts(plan: _Plan, call: AttentionCall, heads: RankHeads) -> dict[str, _Cut] | None:
    """By linear layer. None if the plan is not plain, or if a parameter is neither per head nor the same for all heads."""
    part, output = call.module, plan.plain(call.module)
    if output is None:
        return None
    linears = plan.linears(part)
    fused = KV_PROJECTIONS[0] not in linears and call.source == call.layer
    if fused and call.kv_heads != call.query_heads:
        return None  # a rank's queries, keys and values do not lie together
    cuts = {}
    for name, layer in linears.items():
        kv = name in KV_PROJECTIONS
        count, start, stop = (
            (call.kv_heads, heads.kv_start, heads.kv_stop)
            if kv
            else (call.query_heads, heads.query_start, heads.query_stop)
        )
        width = layer.in_features if name == output else layer.out_features
        if width % count:
            return None
        cuts[name] = _Cut(int(name == output), slice(start * width // count, stop * width // count))
    for name, parameter in part.named_parameters():
        if name.rpartition(".")[0] in linears or _per_head(plan, call, name, parameter):
            continue
        norm_of_a_head = "." in name and parameter.shape == (call.key_dim,)
        if parameter.numel() != 1 and not norm_of_a_head:
            return None
    return cuts


def _per_head(plan: _Plan, call: AttentionCall, name: str, parameter: torch.Tensor) -> bool:
    """One value, or row of values, for each query head, such as attention sinks."""
    return plan.style(call.module, name) == COLUMN and parameter.shape[0] == call.query_heads


def _cut_head_parameters(plan: _Plan, call: AttentionCall, heads: RankHeads) -> None:
    for name, parameter in list(call.module.named_parameters(recurse=False)):
        if _per_head(plan, call, name, parameter):
            setattr(call.module, name, _part(parameter, 0, slice(heads.query_start, heads.query_stop)))


def _feed_forward_cuts(plan: _Plan, part: torch.nn.Module, ranks: Ranks) -> dict[str, _Cut] | None:
    """By linear layer: even parts of the inner width, as far as it divides. None if the plan is not plain."""
    output = plan.plain(part)
    # Gemma 3n's sparse layers compare each inner value with the mean of all of them.
    if output is None or getattr(part, "activation_sparsity", 0.0) > 0:
        return None
    linears = plan.linears(part)
    width = linears[output].in_features
    kept = slice(width * ranks.rank // ranks.size, width * (ranks.rank + 1) // ranks.size)
    whole = [name for name, layer in linears.items() if name != output and layer.out_features != width]
    others = [p for name, p in part.named_parameters() if name.rpartition(".")[0] not in linears and p.numel() > 1]
    if whole or others:
        return None
    return {name: _Cut(int(name == output), kept) for name in linears}
