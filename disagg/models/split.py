"""Which layers each pipeline stage has. Pure; knows numbers only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

from msgspec import Struct


class Layers(Struct, frozen=True):
    """costs: of each layer, such as its weights. head: what the last stage has beside its layers, in the same unit. keeps: the
    layers that have a cache of their own, of which every stage must have one. shared: for each layer that reads the cache of
    an earlier one, (the layer, the earlier one): both are in one stage.
    """

    costs: Sequence[float]
    head: float
    keeps: Collection[int]
    shared: Collection[tuple[int, int]] = ()

    def may_cut(self, at: int) -> bool:
        """Whether a stage may begin with this layer."""
        return not any(earlier < at <= layer for layer, earlier in self.shared)


def split_layers(layers: Layers, stages: int) -> tuple[int, ...] | None:
    """Where stages begin, and at last where the last one ends: those for which the most costly stage costs least, and of these
    those that come first. None if there are none.
    """
    end = len(layers.costs)
    before = (0.0, *accumulate(layers.costs))
    kept = (0, *accumulate(int(layer in layers.keeps) for layer in range(end)))
    places = [0, *(at for at in range(1, end) if layers.may_cut(at)), end]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}  # by where the stages so far end
    for stage in range(stages):
        head, longer = layers.head if stage == stages - 1 else 0.0, {}
        for stop in places if stage < stages - 1 else [end]:
            found = [
                (max(cost, before[stop] - before[start] + head), (*cuts, stop))
                for start, (cost, cuts) in best.items()
                if start < stop and kept[stop] > kept[start]
            ]
            if found:
                longer[stop] = min(found)
        best = longer
    return best[end][1] if end in best else None


def most_stages(layers: Layers) -> int:
    """The most stages for which there is a split: each ends as soon as it may. At least 1."""
    stages = kept = 0
    for layer in range(len(layers.costs)):
        kept += layer in layers.keeps
        if kept and layers.may_cut(layer + 1):
            stages, kept = stages + 1, 0
    return max(1, stages)
