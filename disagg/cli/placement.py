"""Decides on which GPUs of this machine each server's ranks compute. Pure; knows names and numbers.

3 GPUs    0         1         2           each server has consecutive GPUs, one per rank: those that fewest
          prefill-0 (tp 2)    decode-0    ranks have so far, and of these the first
          decode-1 ...                    a server more: it shares
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from disagg.types.errors import ConfigError


class Placement(Struct, frozen=True):
    """first_gpu: by server, in the order in which they were placed. sharers: most ranks on any GPU of that server."""

    first_gpu: dict[str, int]
    sharers: dict[str, int]

    @property
    def shared(self) -> bool:
        """Whether a GPU has several ranks."""
        return any(number > 1 for number in self.sharers.values())


def place(tps: Mapping[str, int], num_gpus: int, first_gpu: int = 0) -> Placement:
    """tps: ranks of each server. Only GPUs from `first_gpu` on are used, and as many ranks share each as must.

    Raises ConfigError for a server with more ranks than there are GPUs: its ranks cannot share one.
    """
    if not num_gpus:
        raise ConfigError('model.device = "cuda": this machine shows no GPU; it must be "cpu" or "auto"')
    available = num_gpus - first_gpu
    for name, tp in tps.items():
        if tp > available:
            raise ConfigError(
                f"{name} has {tp} ranks, each of which needs a GPU of its own; there are {_gpus(first_gpu, num_gpus)}"
            )
    ranks = [0] * num_gpus
    placed: dict[str, int] = {}
    for name, tp in tps.items():
        starts = range(first_gpu, num_gpus - tp + 1)
        start = min(starts, key=lambda gpu: (max(ranks[gpu : gpu + tp]), sum(ranks[gpu : gpu + tp]), gpu))
        placed[name] = start
        for gpu in range(start, start + tp):
            ranks[gpu] += 1
    return Placement(placed, {name: max(ranks[start : start + tps[name]]) for name, start in placed.items()})


def describe(placement: Placement, tps: Mapping[str, int]) -> str:
    """A sentence for the operator. tps: as they were placed."""
    where = []
    for name, first in placement.first_gpu.items():
        last = first + tps[name] - 1
        where.append(f"{name} on GPU {first}" if first == last else f"{name} on GPUs {first} to {last}")
    sharing = "; there are fewer GPUs than ranks, and those on one GPU share its memory" if placement.shared else ""
    return ", ".join(where) + sharing


def _gpus(first_gpu: int, num_gpus: int) -> str:
    if first_gpu >= num_gpus:
        return f"{num_gpus}, and server.first_gpu = {first_gpu} leaves none of them"
    left = f", of which server.first_gpu = {first_gpu} leaves {num_gpus - first_gpu}" if first_gpu else ""
    return f"{num_gpus}{left}"
